"""Gradient cases on Hopper's sparse backward by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import openmla
from gluon_sim import Kind, Limits, Report, intercept, unreserved
from kernels.far_memory import FarMemory
from kernels.gradients import moved, same_bits
from openmla.backward.reference import Saved
from openmla.backward.sparse_operands import EVERY, RowGradients, WantedRows
from openmla.kernels.hopper.sparse_backward import launch as own_launch
from openmla.kernels.hopper.sparse_backward.plan import HopperSparseBackwardVariant
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.row_gradients import (
    BuiltRowGradients,
    build_row_gradients,
    judge_rows_twice,
)
from openmla.operands import SparseOperands
from openmla.planning import Plan, cached_plan, target_by_name

LIMITS = Limits(steps=20_000)


def on(case: GradientCase, background: str = "zero") -> BuiltRowGradients:
    """A case on the CPU; `background` fills what it does not address."""
    return build_row_gradients(case, Memory("cpu", background))


def forward(built: BuiltRowGradients) -> Saved:
    """out and lse, by the CPU kernel."""
    with torch.no_grad():
        return Saved(*openmla.mla_prefill_sparse(**built.built.arguments, return_lse=True))


def plan_of(built: BuiltRowGradients, saved: Saved) -> Plan:
    """The plan of a case."""
    return cached_plan(built.backward(saved).problem(), target_by_name("h200"), "hopper", (3, 6))


class Chunked:
    """A plan whose workspace holds so many queries."""

    def __init__(self, plan: Plan, tokens: int) -> None:
        self.config, self.problem = plan.config, plan.problem
        self.variant = HopperSparseBackwardVariant(tokens=tokens)


def run(
    built: BuiltRowGradients,
    saved: Saved,
    tokens: int = 0,
    wanted: WantedRows = EVERY,
    launch: ModuleType = own_launch,
    memory: Memory | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Report]]:
    """Gradients by name, every element of which is written exactly once, and the reports. tokens:
    queries of one launch, unless as many as the plan says. memory: where the gradient of q lies,
    unless side by side."""
    op = built.backward(saved)
    gradients = RowGradients.allocate(op.forward, wanted)
    if memory is not None:
        gradients = replace(gradients, q=moved(gradients.q, memory))
    given = gradients.tensors()
    for x in given.values():
        x.fill_(torch.nan)
    plan: Any = plan_of(built, saved)
    if tokens:
        plan = Chunked(plan, tokens)
    with intercept(outputs=given, **options) as reports:
        for call in launch.calls(plan, op, gradients):
            call.run()
    return given, reports


def assert_right_clean_and_deaf_to_poison(case: GradientCase, seed: int = 1) -> None:
    """By the acceptance rule, and with the same bits when all around the operands is NaN, some
    partitions run far ahead of others and the workspace holds one query."""
    found = []
    for background, schedule, tokens in (("zero", "random", 0), ("nan", "unfair", 1)):
        built = on(case, background)
        got, reports = run(built, forward(built), tokens, seed=seed, schedule=schedule)
        assert [str(f) for report in reports for f in report.findings] == []
        found.append(got)
    assert same_bits(found[1], found[0])
    built = on(case)
    for verdict in judge_rows_twice(built, found[0], forward(built)):
        assert verdict.ok, verdict.report()


def is_right_and_clean_far_away(
    case: GradientCase, axis: int, launch: ModuleType = own_launch
) -> bool:
    """Operands, what the forward pass saved and the gradient of q past element 2^31, with lists
    that lie as far apart, have the same bits."""
    built = on(case)
    saved = forward(built)
    want, _ = run(built, saved)
    far = FarMemory(axis)
    apart = build_row_gradients(case, far)
    out, lse = (moved(x, far) for x in saved)
    assert out is not None and lse is not None and out.stride() != saved.out.stride()
    op = apart.operands
    if axis == 0:
        apart = replace(apart, built=replace(apart.built, operands=with_far_lists(op)))
    got, reports = run(apart, Saved(out, lse), memory=far, launch=launch)
    return all(report.ok for report in reports) and same_bits(got, want)


def with_far_lists(op: SparseOperands) -> SparseOperands:
    """The same lists, a step of 2^30 entries from one query's to the next."""
    lists, step = op.indices, 2**30
    far = torch.frombuffer(unreserved(len(lists) * step * 4), dtype=torch.int32)
    return replace(op, indices=far.as_strided(lists.shape, (step, 1)).copy_(lists))


def check(
    launch: ModuleType, case: GradientCase, schedule: str, seed: int, launches: int = 1
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN."""
    kinds: set[Kind] = set()
    right = True
    for _ in range(launches):
        built = on(case, "nan")
        saved = forward(built)
        options = {"schedule": schedule, "seed": seed, "limits": LIMITS}
        got, reports = run(built, saved, 2, launch=launch, **options)
        kinds |= {kind for report in reports for kind in report.kinds()}
        right &= all(verdict.ok for verdict in judge_rows_twice(on(case), got, saved))
    return kinds, right


def of_query(built: BuiltRowGradients, saved: Saved, query: int) -> tuple[BuiltRowGradients, Saved]:
    """A case with one of its queries alone."""
    op, one = built.operands, slice(query, query + 1)
    lengths = None if op.topk_lengths is None else op.topk_lengths[one]
    alone = replace(op, q=op.q[one], indices=op.indices[one], topk_lengths=lengths)
    apart = replace(
        built,
        built=replace(built.built, operands=alone),
        d_out=built.d_out[one],
        d_lse=None if built.d_lse is None else built.d_lse[one],
    )
    return apart, Saved(saved.out[one], saved.lse[one])
