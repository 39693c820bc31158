"""Tests of the timing harness."""
