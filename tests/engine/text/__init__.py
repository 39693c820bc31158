"""Tests of `rapid_llm.engine.text`."""
