"""Simulate what host code launches, without changing the host code.

>>> with intercept(seed=3) as reports:                                     # doctest: +SKIP
...     launch_my_kernel(q, k, v)   # any `kernel[grid](...)` of a @gluon.jit kernel inside
>>> assert all(r.ok for r in reports)                                      # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from gluon_sim.launch import simulate
from gluon_sim.memory.history import History
from gluon_sim.report.findings import Report
from gluon_sim.report.outputs import faults_of_all


@contextlib.contextmanager
def intercept(
    *, outputs: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> Iterator[list[Report]]:
    """Within the block, launches of Gluon kernels run on the simulator; yields their reports.

    `outputs` are tensors by name: all launches of the block together write every element of them
    exactly once, and nothing else of their memory. What is wrong with them is added to the last
    report when the block ends, unless something else was found before.
    Other `options` are those of `simulate`. Not thread-safe: it replaces the launch method itself.
    """
    from triton.experimental.gluon._runtime import GluonJITFunction

    reports: list[Report] = []
    history = History()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        size = grid(dict(kwargs)) if callable(grid) else grid
        reports.append(simulate(self, size, args, kwargs, history=history, **options))

    GluonJITFunction.run = run
    try:
        yield reports
    finally:
        del GluonJITFunction.run  # the inherited method is visible again
    if outputs and reports and all(report.ok for report in reports):
        found = faults_of_all(outputs, [report.stores for report in reports])
        reports[-1] = replace(reports[-1], findings=tuple(found))
