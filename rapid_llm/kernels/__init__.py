"""Ops, and the dispatch that chooses a proven row for each."""
