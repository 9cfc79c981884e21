"""From operands to launches: the plan of a step of the indexer, and its kernels' only launcher.

`windows_of` is the one thing computed before a plan: where every query's keys begin and end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openmla.dispatch import device_target, triton_version
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import IndexOperands, Windows
from openmla.indexer.windows import paged_windows
from openmla.kernels.fallback import launcher_of, run_calls, run_plan, without_failed
from openmla.kernels.launch import current
from openmla.planning import NEWEST_TRITON
from openmla.planning.indexer import IndexPlan, cached_index_plan


def plan_step(operands: IndexOperands, results: Any, backend: str) -> IndexPlan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    target = device_target(operands.device)
    triton = NEWEST_TRITON if target.vendor == "cpu" else triton_version()
    problem = operands.problem(results)
    return without_failed(lambda name: cached_index_plan(problem, target, name, triton), backend)


def run_step(operands: IndexOperands, results: Any, backend: str) -> IndexPlan:
    """Plan and launch."""

    def launch(plan: IndexPlan) -> None:
        with current(operands.device):
            run_calls(launcher_of(plan).calls(plan, operands, results))

    return run_plan(lambda: plan_step(operands, results, backend), launch)[0]


def windows_of(cu_seqlens_q: Tensor, cache_lengths: Tensor, total_q: int) -> Windows:
    """`paged_windows` on any device, without waiting for it."""
    if cu_seqlens_q.device.type == "cpu":
        return paged_windows(cu_seqlens_q, cache_lengths, total_q)
    from openmla.kernels.portable.indexer import windows

    with current(cu_seqlens_q.device):
        return windows.paged_windows(cu_seqlens_q, cache_lengths, total_q)


def append_keys(cache: IndexCache, k: Tensor, slots: Tensor) -> None:
    """`IndexCache.append` for checked arguments; on a GPU, slots outside the pool are skipped."""
    if cache.device.type == "cpu":
        cache.write(k, slots)
        return
    from openmla.kernels.portable.indexer import windows

    with current(cache.device):
        windows.append(cache, k, slots)
