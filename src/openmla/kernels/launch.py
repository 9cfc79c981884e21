"""The only launcher: takes a Plan and the operands, runs the kernel that the Plan names.

Called by openmla.ops. Nothing here chooses: the Plan did. Cache rows need no plan: their kernels
are the same on every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.errors import Unsupported
from openmla.operands import DenseOperands, LatentOperands, Operands, Results
from openmla.plan import Plan

if TYPE_CHECKING:
    from openmla.kernels.call import Call

# Which module lists the kernel calls of a plan, by family and form: its `calls` yields them in
# order. They are imported when they are needed: a CPU has no Triton.
MODULES = {
    ("portable", "dense"): "openmla.kernels.portable.launch",
    ("portable", "latent"): "openmla.kernels.portable.launch",
    ("portable", "sparse"): "openmla.kernels.portable.launch",
    ("hopper", "dense"): "openmla.kernels.hopper.launch",
    ("hopper", "latent"): "openmla.kernels.hopper.sparse_launch",
    ("hopper", "sparse"): "openmla.kernels.hopper.sparse_launch",
    ("blackwell", "dense"): "openmla.kernels.blackwell.launch",
    ("blackwell", "sparse"): "openmla.kernels.blackwell.sparse_launch",
    ("cdna4", "dense"): "openmla.kernels.cdna4.launch",
    ("cdna4", "sparse"): "openmla.kernels.cdna4.sparse_launch",
}


def launch(plan: Plan, operands: Operands, results: Results) -> None:
    """Fill every row of `results`."""
    if plan.backend == "cpu":
        _launch_cpu(plan, operands, results)
        return
    # Triton launches on the current GPU, wherever the tensors are.
    with torch.cuda.device(operands.q.device) if operands.q.is_cuda else nullcontext():
        for call in calls(plan, operands, results):
            call.run()


def calls(plan: Plan, operands: Operands, results: Results) -> Iterator[Call]:
    """The kernel calls of a plan, in order; none for an empty output.

    A module may fill `results` itself where there is nothing to compute, and then yields none.
    """
    name = MODULES.get((plan.backend, plan.problem.form))
    if name is None:
        raise Unsupported(
            f"backend {plan.backend!r} is planned for {plan.target} but has no kernel yet",
            nearest="CPU tensors with backend='cpu'",
        )
    module: Any = import_module(name)
    yield from module.calls(plan, operands, results)


def append_rows(cache: LatentCache, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """`LatentCache.append` for checked arguments; on a GPU, slots outside the pool are skipped."""
    if cache.device.type == "cpu":
        cache.write(latent, rope, slots)
        return
    from openmla.kernels.portable.cache_ops import append

    append(cache, latent, rope, slots)


def gather_rows(cache: LatentCache, rows: Tensor, out: Tensor) -> None:
    """`LatentCache.gather` for checked arguments; on a GPU, rows outside the pool become zeros."""
    if cache.device.type == "cpu":
        out.copy_(cache.read(rows))
        return
    from openmla.kernels.portable.cache_ops import gather

    gather(cache, rows, out)


def _launch_cpu(plan: Plan, operands: Operands, results: Results) -> None:
    from openmla.kernels.cpu.dense import dense
    from openmla.kernels.cpu.latent import latent
    from openmla.kernels.cpu.sparse import sparse

    results.clear()  # the CPU kernels write only rows that see a key
    if isinstance(operands, DenseOperands):
        dense(plan.config, operands, results)
    elif isinstance(operands, LatentOperands):
        latent(plan.config, operands, results)
    else:
        sparse(plan.config, operands, results)
