"""Time gradients of attention over a selection on an H200: dense with a key mask, and over lists.

PYTHONPATH=src python benchmarks/device/selection_backward_h200.py --out DIR
[--section compile|times ...]

A layer of DeepSeek-V3.2 whose queries see 2048 of the keys before them can train its attention in
the expanded form, where a key mask hides the others, or in the latent form over lists of rows. Both
have the same selection here, drawn from the causal keys. "mask" and "lists" are Hopper's own
kernels, "no mask" the same backward without one, "portable mask" the portable kernels. FLOPs are
not counted: the forms have different ones. Caches are flushed before every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from backward_h200 import SCALE, Timer, attend, launches, normal, operands
from sections import Section, run
from sparse_backward_h200 import LATENT, WIDTH
from torch import Tensor

import openmla
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.dispatch import device_target, plan_for
from openmla.kernels.call import Call
from openmla.kernels.hopper.sparse_backward import launch as sparse
from openmla.operands import DenseOperands, SparseOperands, Weights

TOPK = 2048
SHAPES = {
    "8192 h128": (8192, 128),
    "16384 h128": (16384, 128),
    "8192 h64": (8192, 64),
    "24576 h64": (24576, 64),
}
PORTABLE = "8192 h128"  # the shape that it runs too, which takes it long
SLOW_ROUNDS = 3


def selection(tokens: int) -> tuple[Tensor, Tensor]:
    """Lists of rows, and the bits of the same keys, of every causal query."""
    torch.manual_seed(1)
    ends = torch.arange(1, tokens + 1, device="cuda", dtype=torch.int32)
    scores = torch.rand(tokens, tokens, device="cuda")
    indices, mask = openmla.select_topk(scores, TOPK, ends=ends, return_mask=True)
    return indices, mask


def masked(op: DenseOperands, mask: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a call with a mask."""
    return openmla.mla_prefill(
        op.q,
        op.k_nope,
        op.k_rope,
        op.v,
        cu_seqlens_q=op.cu_seqlens_q,
        scale=SCALE,
        causal=True,
        key_mask=mask,
        return_lse=True,
    )


def lists(heads: int, indices: Tensor) -> SparseBackwardOperands:
    """A call over lists, and its gradient."""
    tokens = len(indices)
    q, rows = normal(tokens, heads, WIDTH), normal(tokens, WIDTH)
    out, lse = openmla.mla_prefill_sparse(
        q, rows, indices, scale=SCALE, d_v=LATENT, return_lse=True
    )
    op = SparseOperands(q, rows, indices, None, LATENT, Weights(SCALE, None))
    return SparseBackwardOperands(op, out, lse, normal(tokens, heads, LATENT))


def run_all(calls: list[Call]) -> None:
    for call in calls:
        call.run()


def compiled(name: str, _: int) -> Iterator[dict[str, Any]]:
    """What the shapes need, by way of a few tokens."""
    op, d_out = operands(1, 256, 16)
    mask = torch.full((256, 8), -1, dtype=torch.int32, device="cuda")
    op = replace(op, key_mask=mask)
    for call in launches(op, d_out, masked(op, mask), name)[0]:
        call.compile()
    yield {"compiled": name}


def times(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    tokens, heads = SHAPES[name]
    indices, mask = selection(tokens)
    over = lists(heads, indices)
    row_gradients = RowGradients.allocate(over.forward)
    row_plan = plan_for(over.problem(), device_target(over.device), "hopper")
    plain, d_out = operands(1, tokens, heads)
    op = replace(plain, key_mask=mask)
    saved = masked(op, mask)
    ours, gradients = launches(op, d_out, saved, "hopper")
    unmasked, _ = launches(plain, d_out, attend(plain), "hopper")
    contestants: dict[str, Callable[[], object]] = {
        "mask": partial(run_all, ours),
        "no mask": partial(run_all, unmasked),
        "lists": lambda: run_all(list(sparse.calls(row_plan, over, row_gradients))),
    }
    far: dict[str, float] = {}
    run_all(ours)
    found = {n: x.clone() for n, x in gradients.tensors().items()}
    if name == PORTABLE:
        slow, theirs = launches(op, d_out, saved, "portable")
        contestants["portable mask"] = partial(run_all, slow)
        run_all(slow)
        far = {
            n: float(f"{float((x.float() - y.float()).norm() / y.float().norm()):.3g}")
            for (n, x), y in zip(found.items(), theirs.tensors().values(), strict=True)
        }
    for function in contestants.values():
        function()
    same = all(torch.equal(x, gradients.tensors()[n]) for n, x in found.items())
    timer = Timer()
    taken: dict[str, list[float]] = {n: [] for n in contestants}
    for number in range(rounds):
        for n, function in contestants.items():
            if not (n.startswith("portable") and number >= SLOW_ROUNDS):
                taken[n].append(timer(function))
    ms = {n: round(median(t), 3) for n, t in taken.items()}
    stages = {}
    for call in ours:
        stages[call.kernel.__name__] = round(min(timer(call.run) for _ in range(3)), 3)
    yield {
        "shape": name,
        "ms": ms,
        "fastest_ms": {n: round(min(t), 3) for n, t in taken.items()},
        "over": {n: round(t / ms["mask"], 3) for n, t in ms.items() if n != "mask"},
        "stages_ms": stages,
        "same_bits": same,
        "from_portable": far,
    }


def line(result: dict[str, Any]) -> str:
    return "  ".join(f"{name}: {value}" for name, value in result.items())


if __name__ == "__main__":
    sections = {
        "compile": Section(compiled, 120, ("hopper", "portable"), side_by_side=True),
        "times": Section(times, 90, tuple(SHAPES)),
    }
    run(__file__, sections, line)
