"""Proof that rows compute what their ops say: oracles, derived bounds, cases and the conformance runner."""

from .conformance import check_callable, check_row

__all__ = ["check_callable", "check_row"]
