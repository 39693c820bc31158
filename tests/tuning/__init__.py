"""Tests of measuring and tuning."""
