"""Tests of `rapid_llm.cli`."""
