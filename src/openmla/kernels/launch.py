"""The only launcher: takes a Plan and the operands, runs the kernel that the Plan names.

Called by openmla.ops. Nothing here chooses: the Plan did. Cache rows and `quantize` need no plan:
their kernels are the same on every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.errors import Unsupported
from openmla.formats import Writer
from openmla.indexer.cache import IndexCache
from openmla.kernels.fallback import launcher_of, run_calls
from openmla.operands import AnyOperands
from openmla.planning import Plan

if TYPE_CHECKING:
    from openmla.kernels.call import Call


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside it, a GPU is the current one: Triton launches there, wherever the tensors are. On a
    CPU a caller's autocast ends here: kernels choose the types of their products."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return torch.autocast("cpu", enabled=False) if device.type == "cpu" else nullcontext()


def launch(plan: Plan, operands: AnyOperands, results: Any) -> list[tuple[Call, Any]]:
    """Fill every row of `results`; returns what was launched, with the compiled kernels.

    Raises NotCompiled where this Triton refuses a kernel: `fallback.run_plan` takes another.
    """
    with current(operands.device):
        return run_calls(calls(plan, operands, results))


def calls(plan: Plan, operands: AnyOperands, results: Any) -> Iterator[Call]:
    """The kernel calls of a plan, in order; none for an empty output.

    The plan's launcher is imported when it is needed: a CPU has no Triton. It may fill `results`
    itself where there is nothing to compute, and then yields none.
    """
    if not plan.kernel.launcher:
        raise Unsupported(
            f"backend {plan.backend!r} is planned for {plan.target} but has no kernel yet",
            nearest="backend='auto', which takes a kernel that exists",
        )
    yield from launcher_of(plan).calls(plan, operands, results)


def append_rows(
    cache: LatentCache, latent: Tensor, rope: Tensor, slots: Tensor, writer: Writer = "openmla"
) -> None:
    """`LatentCache.append` for checked arguments; on a GPU, slots outside the pool are skipped."""
    if cache.device.type == "cpu":
        cache.write(latent, rope, slots, writer)
        return
    from openmla.kernels.portable.cache_ops import append

    with current(cache.device):
        append(cache, latent, rope, slots, writer)


def append_keys(cache: IndexCache, k: Tensor, slots: Tensor) -> None:
    """`IndexCache.append` for checked arguments; on a GPU, slots outside the pool are skipped."""
    if cache.device.type == "cpu":
        cache.write(k, slots)
        return
    from openmla.kernels.portable.indexer.windows import append

    with current(cache.device):
        append(cache, k, slots)


def gather_rows(cache: LatentCache, rows: Tensor, out: Tensor) -> None:
    """`LatentCache.gather` for checked arguments; on a GPU, rows outside the pool become zeros."""
    if cache.device.type == "cpu":
        out.copy_(cache.read(rows))
        return
    from openmla.kernels.portable.cache_ops import gather

    with current(cache.device):
        gather(cache, rows, out)


def quantize_rows(parts: list[Tensor], outs: list[Tensor], scale: Tensor) -> None:
    """e4m3 of one or two parts of every token, and the scale that they share."""
    x, rope = parts[0], parts[1] if len(parts) > 1 else None
    if x.device.type == "cpu":
        from openmla.kernels.cpu.quantize import quantize as on_cpu

        on_cpu(x, rope, outs, scale)
        return
    from openmla.kernels.portable.quantize import quantize

    with current(x.device):
        quantize(x, rope, outs, scale)
