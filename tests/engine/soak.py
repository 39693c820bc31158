"""`python -m tests.engine.soak REQUESTS`: the property test on as many requests as one likes, with other seeds."""

from __future__ import annotations

import sys
import time
from collections import Counter

from .scenarios import MUST_HAPPEN, Events, run_scenario

FIRST = 1_000_000
"""Seeds from here on, so that a soak does not repeat what the property test covers."""


def main(wanted: int) -> None:
    """Run scenarios until `wanted` requests have been compared; raises where one differs or a page leaks."""
    events: Events = Counter()
    started = time.monotonic()
    requests = scenarios = 0
    while requests < wanted:
        requests += run_scenario(FIRST + scenarios, events)
        scenarios += 1
    seconds = time.monotonic() - started
    print(f"{requests} requests in {scenarios} scenarios, {seconds:.0f} s: each as if alone, no page lost")
    print(", ".join(f"{name} {count}" for name, count in events.most_common()))
    if events["at_the_edge"] > 1e-3 * requests:
        sys.exit(f"{events['at_the_edge']} answers differ where rounding decides, which is too many to believe")
    missing = [event for event in MUST_HAPPEN if not events[event]]
    if missing:
        sys.exit(f"never happened: {', '.join(missing)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
