"""Timing GPU contestants fairly, in one process, with CUDA events.

Contestants take turns (A, B, C, B, C, A, …), because a GPU's clock follows its power: whoever runs
alone, or first, looks better. The L2 cache is overwritten before each timed call. What is reported
is the median; `back_to_back` is the mean of calls in a row without that, at sustained power.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

MATMUL = 8192
"""Rows and columns of the bf16 product that is a chip's ceiling of the day."""
MATMUL_FLOPS = 2.0 * MATMUL**3
FLUSH_BYTES = 512 * 1024 * 1024
WARM_UPS = 3
IN_A_ROW = 10
Span = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True)
class GpuTiming:
    """Milliseconds of one contestant."""

    median: float
    least: float
    back_to_back: float


def race(contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, GpuTiming]:
    """Time every contestant `rounds` times, interleaved, after the same warm-up."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    names = list(contestants)
    for name in names:
        for _ in range(WARM_UPS):
            contestants[name]()
    samples: dict[str, list[Span]] = {n: [] for n in names}
    for number in range(rounds):
        torch.cuda.synchronize()
        for _ in range(3):  # the host gets ahead of the device, so no launch is waited for
            flush.zero_()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            flush.zero_()
            samples[name].append(_timed(contestants[name], 1))
    rows = {n: _timed(contestants[n], IN_A_ROW) for n in names}
    torch.cuda.synchronize()
    return {n: _summary(samples[n], rows[n]) for n in names}


def graph_of(function: Callable[[], object]) -> Callable[[], object]:
    """Replays what a function launches. The function is kept, and so is the memory that it uses:
    a graph holds addresses only, and capturing another one gives freed memory back to the chip."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return partial(_replay, graph, function)


def _replay(graph: torch.cuda.CUDAGraph, function: Callable[[], object]) -> None:
    graph.replay()


def matmul() -> Callable[[], object]:
    """The product, to be timed among others."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def _summary(samples: list[Span], row: Span) -> GpuTiming:
    times = [start.elapsed_time(end) for start, end in samples]
    in_a_row = row[0].elapsed_time(row[1]) / IN_A_ROW
    return GpuTiming(statistics.median(times), min(times), in_a_row)


def _timed(function: Callable[[], object], times: int) -> Span:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        function()
    end.record()
    return start, end
