"""Simulate what host code launches, without changing the host code.

>>> with intercept(seed=3) as reports:                                     # doctest: +SKIP
...     launch_my_kernel(q, k, v)   # any `kernel[grid](...)` of a @gluon.jit kernel inside
>>> assert all(r.ok for r in reports)                                      # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from openmla.sim.findings import Report
from openmla.sim.launch import simulate


@contextlib.contextmanager
def intercept(**options: Any) -> Iterator[list[Report]]:
    """Within the block, launches of Gluon kernels run on the simulator; yields their reports.

    `options` are those of `simulate`. Not thread-safe: it replaces the launch method itself.
    """
    from triton.experimental.gluon._runtime import GluonJITFunction

    reports: list[Report] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        size = grid(dict(kwargs)) if callable(grid) else grid
        reports.append(simulate(self, size, args, kwargs, **options))

    GluonJITFunction.run = run
    try:
        yield reports
    finally:
        del GluonJITFunction.run  # the inherited method is visible again
