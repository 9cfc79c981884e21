"""Time the backward of sparse attention (DSA) on an H200.

PYTHONPATH=src python benchmarks/device/sparse_backward_h200.py --out DIR
[--section compile|right|times|portable ...]

Widths of DeepSeek-V3.2: rows of 512 + 64 columns, lists of 2048 rows of 8192, 4096 queries. FLOPs
are five products, whoever computes them. "right" judges small cases by the acceptance rule first.
"times" has every variant of the plan in one process: what differs is named in VARIANTS. Stages are
times of the kernels by name, with a wait after each; "sort" is what finds the entries of a row.
Caches are flushed before every measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from sections import Section, run
from torch import Tensor

import openmla
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.dispatch import device_target, plan_for
from openmla.kernels.call import Call
from openmla.kernels.hopper.sparse_backward import launch as hopper
from openmla.kernels.portable.sparse_backward import launch as portable
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.row_gradients import build_row_gradients, judge_rows_twice
from openmla.operands import SparseOperands, Weights
from openmla.planning import Plan

LATENT, ROPE, TOPK, ROWS, QUERIES = 512, 64, 2048, 8192, 4096
WIDTH = LATENT + ROPE
SCALE = WIDTH**-0.5
FLOPS = 2 * (3 * WIDTH + 2 * LATENT)  # of an entry and head
SHAPES = {"h64": 64, "h128": 128}
VARIANTS: dict[str, dict[str, int]] = {
    "plan": {},
    "224 + 56 registers": {"consumer_registers": 224, "producer_registers": 56},
    "216 + 72 registers": {"consumer_registers": 216, "producer_registers": 72},
    "half of the workspace": {"part_cap": 500_000_000},
}
_LISTS = Case("sparse", 5, LATENT, ROPE, LATENT, q_lens=(3,), k_lens=(300,), topk=129, scale=0.05)
CASES = {
    "lists": GradientCase(replace(_LISTS, index_kind="mixed")),
    "64 heads": GradientCase(replace(_LISTS, heads=64, topk=200)),
    "two blocks of heads, lengths": GradientCase(
        replace(_LISTS, heads=65, topk_lengths="ragged", index_kind="duplicates"), d_lse=True
    ),
    "sink": GradientCase(replace(_LISTS, heads=16, sink="mixed")),
    "128 + 64": GradientCase(replace(_LISTS, d_nope=128, d_v=128, q_lens=(40,))),
    "512 + 0": GradientCase(replace(_LISTS, d_rope=0, rope="none", scale=-0.05)),
}
FLUSHED = 256 << 20


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def operands(heads: int, queries: int) -> SparseBackwardOperands:
    """A call whose lists are drawn without repetition, and its gradient."""
    torch.manual_seed(0)
    drawn = torch.rand(queries, ROWS, device="cuda")
    indices = drawn.topk(TOPK, sorted=False).indices.sort().values.int()
    q, rows = normal(queries, heads, WIDTH), normal(ROWS, WIDTH)
    op = SparseOperands(q, rows, indices, None, LATENT, Weights(SCALE, None))
    out, lse = openmla.mla_prefill_sparse(
        q, rows, indices, scale=SCALE, d_v=LATENT, return_lse=True
    )
    return SparseBackwardOperands(op, out, lse, normal(queries, heads, LATENT))


def plan_of(backward: SparseBackwardOperands, variant: str) -> Plan:
    plan = plan_for(backward.problem(), device_target(backward.device), "hopper")
    return replace(plan, config=replace(plan.config, **VARIANTS[variant]))


def launches(backward: SparseBackwardOperands, gradients: RowGradients, plan: Plan) -> None:
    for call in hopper.calls(plan, backward, gradients):
        call.run()


def compiled(variant: str, _: int) -> Iterator[dict[str, Any]]:
    for heads in SHAPES.values():
        backward = operands(heads, 64)
        gradients = RowGradients.allocate(backward.forward)
        launches(backward, gradients, plan_of(backward, variant))
        torch.cuda.synchronize()
    yield {"compiled": variant}


def right(name: str, _: int) -> Iterator[dict[str, Any]]:
    """The rule, by autograd; and what comes out of a second run."""
    built = build_row_gradients(CASES[name], Memory("cuda"))
    found, again = built.run("hopper"), built.run("hopper")
    same = all(torch.equal(x, again.gradients[n]) for n, x in found.gradients.items())
    verdicts = judge_rows_twice(built, found.gradients, found.saved)
    yield {
        "case": name,
        "right": all(v.ok for v in verdicts),
        "same_bits": same,
        "problems": [p for v in verdicts for p in v.problems][:8],
    }


class Timer:
    """Milliseconds of a call, after a write that leaves nothing in L2."""

    def __init__(self) -> None:
        self.flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def __call__(self, function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        torch.cuda._sleep(4_000_000)  # the host is ahead of the GPU
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def stages(backward: SparseBackwardOperands, gradients: RowGradients, plan: Plan) -> dict[str, Any]:
    """Milliseconds by kernel."""
    marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    torch.cuda._sleep(8_000_000)
    mark("")
    for call in hopper.calls(plan, backward, gradients):
        mark("sort")
        call.run()
        mark(call.kernel.__name__.removesuffix("_kernel"))
    torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for (_, before), (name, after) in pairwise(marks):
        found[name] += before.elapsed_time(after)
    return {name: round(ms, 3) for name, ms in found.items()}


def times(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    heads = SHAPES[name]
    backward, timer = operands(heads, QUERIES), Timer()
    gradients = RowGradients.allocate(backward.forward)
    first: dict[str, Tensor] = {}
    for variant in VARIANTS:
        plan = plan_of(backward, variant)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        launches(backward, gradients, plan)
        torch.cuda.synchronize()
        space = torch.cuda.max_memory_allocated() - before
        bits = {n: x.clone() for n, x in gradients.tensors().items()}
        first = first or bits
        same = all(torch.equal(x, first[n]) for n, x in bits.items())
        once = partial(launches, backward, gradients, plan)
        taken = [timer(once) for _ in range(rounds)]
        ms = median(taken)
        yield {
            "shape": name,
            "variant": variant,
            "ms": round(ms, 3),
            "fastest_ms": round(min(taken), 3),
            "tflops": round(FLOPS * heads * QUERIES * TOPK / ms / 1e9),
            "queries_of_a_launch": plan.variant.tokens,
            "workspace_mb": round(space / 1e6),
            "same_bits": same,
            "stages_ms": stages(backward, gradients, plan),
        }


def plain(name: str, _: int) -> Iterator[dict[str, Any]]:
    """The portable kernels over fewer queries, and how far gradients are from theirs."""
    heads, queries = SHAPES[name], QUERIES // 8
    backward = operands(heads, queries)
    ours, theirs = (RowGradients.allocate(backward.forward) for _ in range(2))
    launches(backward, ours, plan_of(backward, "plan"))
    plan = plan_for(backward.problem(), device_target(backward.device), "portable")

    def run_plain() -> None:
        calls: Iterator[Call] = portable.calls(plan, backward, theirs)
        for call in calls:
            call.run()

    run_plain()
    far = {
        n: float((x.float() - theirs.tensors()[n].float()).norm() / x.float().norm())
        for n, x in ours.tensors().items()
    }
    ms = min(Timer()(run_plain) for _ in range(2))
    tflops = round(FLOPS * heads * queries * TOPK / ms / 1e9)
    yield {"shape": name, "portable_ms": round(ms, 2), "tflops": tflops, "differs_by": far}


def line(result: dict[str, Any]) -> str:
    return "  ".join(f"{name}: {value}" for name, value in result.items())


if __name__ == "__main__":
    sections = {
        "compile": Section(compiled, 90, tuple(VARIANTS), side_by_side=True),
        "right": Section(right, 60, tuple(CASES), side_by_side=True),
        "times": Section(times, 40, tuple(SHAPES)),
        "portable": Section(plain, 60, tuple(SHAPES)),
    }
    run(__file__, sections, line)
