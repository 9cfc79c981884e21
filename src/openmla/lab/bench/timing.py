"""Timing several ways to compute the same thing, fairly, in one process.

Contestants take turns (A, B, C, A, B, C, …), because a machine drifts: clocks, caches, neighbors.
What is reported is the median of each. A contestant that would take minutes is timed on a share of
the work, and says so.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# A full run longer than this is replaced by a share of it, scaled.
SLOW_SECONDS = 8.0


@dataclass(frozen=True)
class Contestant:
    """`run` does the whole work; `run_share`, if given, does `share` of it."""

    name: str
    run: Callable[[], object]
    run_share: Callable[[], object] | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Timing:
    """Median seconds for the whole work, over `runs` runs of `share` of it each."""

    name: str
    seconds: float
    runs: int
    share: float = 1.0

    @property
    def note(self) -> str:
        """Empty, or how a slow contestant was measured."""
        return "" if self.share == 1.0 else f"scaled from 1/{round(1 / self.share)} of the work"


def race(contestants: list[Contestant], rounds: int) -> dict[str, Timing]:
    """Time every contestant `rounds` times, interleaved, after one warm-up each."""
    running = [_fit(contestant) for contestant in contestants]
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    for _ in range(rounds):
        for name, function, share, first in running:
            # A slow contestant has already taken its time once; its noise is far below its lag.
            if share < 1.0 and samples[name]:
                continue
            samples[name].append(first if share < 1.0 else seconds_of(function))
    return {
        name: Timing(name, statistics.median(samples[name]) / share, len(samples[name]), share)
        for name, _, share, _ in running
    }


def seconds_of(function: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _fit(contestant: Contestant) -> tuple[str, Callable[[], object], float, float]:
    """Warm up, and decide between the whole work and a share of it."""
    if contestant.run_share is not None:
        first = seconds_of(contestant.run_share)
        if first / contestant.share > SLOW_SECONDS:
            return contestant.name, contestant.run_share, contestant.share, first
    contestant.run()
    return contestant.name, contestant.run, 1.0, 0.0
