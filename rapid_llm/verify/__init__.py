"""Proof that rows compute what their ops say: oracles, derived bounds, cases and the conformance runner."""
