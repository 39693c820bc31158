"""Benchmarks: each is run as `python -m benchmarks.<name>` and writes its result file to `benchmarks/results/`."""
