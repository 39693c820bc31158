"""Small cases of every CUDA kernel of this package, for compute-sanitizer to watch.

    compute-sanitizer --error-exitcode 1 python -m tests.kernels.sanitize [--backend jit] [--op rmsnorm]

Run by itself it compares the results with the oracle. Exit status: 0 good, 1 a wrong result, or no row that could run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rapid_llm.kernels.registry import KernelSpec
from rapid_llm.verify.conformance import check_row, unavailable, variants
from tests.kernels.gpu_rows import BUILT, built_rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sanitize", description=__doc__)
    parser.add_argument("--backend", action="append", choices=BUILT, help="only rows of this backend; may be repeated")
    parser.add_argument("--op", action="append", help="only rows of this op; may be repeated")
    options = parser.parse_args(arguments)
    rows = [row for row in built_rows(*(options.backend or BUILT)) if not options.op or row.op in options.op]
    ran, wrong = 0, 0
    for row in rows:
        if reason := unavailable(row, "cuda"):
            print(f"{row.name}: not run: {reason}")
            continue
        ran += 1
        wrong += _run(row)
    print(f"{ran} of {len(rows)} rows ran, {wrong} wrong")
    return 0 if ran and not wrong else 1


def _run(row: KernelSpec) -> int:
    """1 if any of the row's small cases is wrong, in any dtype."""
    from rapid_llm.kernels import registry

    bad = 0
    for dtype, scheme in variants(registry.get_op(row.op), row):
        report = check_row(row.op, row.name, device="cuda", dtype=dtype, scheme=scheme, budget="interpret")
        print(f"{row.name} {dtype} {scheme or ''}: {report.cases} cases, {'good' if report.ok else report}")
        bad |= not report.ok
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
