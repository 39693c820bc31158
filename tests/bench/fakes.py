"""A clock that moves only when told to, so that timing is tested without time."""

from __future__ import annotations

from collections.abc import Callable

from rapid_llm.bench.load import Snapshot


class FakeClock:
    """Nanoseconds; `work(ns)` returns a function that takes that long, whatever its arguments."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def work(self, ns: int) -> Callable[..., None]:
        def run(*args: object, **kwargs: object) -> None:
            self.now += ns

        return run


class FakeMachine:
    """Snapshots of a machine on which others use `others` CPUs; its sleep moves the time."""

    def __init__(self, others: list[float], own: float = 0.0) -> None:
        self.others, self.own = others, own
        self.wall = self.busy = self.spent = 0.0
        self.slept = 0

    def sleep(self, seconds: float) -> None:
        share = self.others[min(self.slept, len(self.others) - 1)]
        self.slept += 1
        self.wall += seconds
        self.spent += self.own * seconds
        self.busy += (share + self.own) * seconds

    def snapshot(self) -> Snapshot:
        return Snapshot(self.wall, self.busy, self.spent)
