"""Gradient cases on Hopper's backward kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import openmla
from gluon_sim import Kind, Limits, Report, intercept
from kernels.far_memory import FarMemory
from openmla.backward.operands import EVERY, Gradients, Wanted
from openmla.backward.reference import Saved
from openmla.kernels.hopper.backward import launch as own_launch
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import BuiltGradients, GradientCase, build_gradients
from openmla.lab.testing.memory import Memory
from openmla.planning import Plan, cached_plan, target_by_name

LIMITS = Limits(steps=20_000)
SMALL_CHIP = 2  # SMs: blocks do several work items


def on(case: GradientCase, background: str = "zero") -> BuiltGradients:
    """A case on the CPU; `background` fills what it does not address."""
    return build_gradients(case, Memory("cpu", background))


def forward(built: BuiltGradients) -> Saved:
    """out and lse, by the CPU kernel."""
    with torch.no_grad():
        return Saved(*openmla.mla_prefill(**built.built.arguments, return_lse=True))


def plan_of(built: BuiltGradients, saved: Saved, sm_count: int = SMALL_CHIP) -> Plan:
    """The plan of a case, for a small chip."""
    chip = target_by_name("h200")
    chosen = cached_plan(built.backward(saved).problem(), chip, "hopper", (3, 6))
    return replace(chosen, config=replace(chosen.config, sm_count=sm_count))


def moved(x: Tensor | None, memory: Memory) -> Tensor | None:
    """A copy that lies in another memory."""
    return None if x is None else memory.new(x.shape, x.dtype).copy_(x)


def run(
    built: BuiltGradients,
    saved: Saved,
    plan: Plan | None = None,
    wanted: Wanted = EVERY,
    launch: ModuleType = own_launch,
    memory: Memory | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Report]]:
    """Gradients by name, every element of which is written exactly once, and the reports. memory:
    where the gradients of q, k and v lie, unless side by side."""
    op = built.backward(saved)
    gradients = Gradients.allocate(op.forward, wanted)
    if memory is not None:
        rope = gradients.k_rope
        gradients = replace(
            gradients,
            q=moved(gradients.q, memory),
            kv=moved(gradients.kv, memory),
            k_rope=moved(rope, memory) if rope is not None and rope.dim() == 3 else rope,
        )
    names = ("q", "kv", "k_rope", "sink")
    buffers = {name: getattr(gradients, name) for name in names}
    given = {name: x for name, x in buffers.items() if x is not None}
    for x in given.values():
        x.fill_(torch.nan)
    with intercept(outputs=given, **options) as reports:
        for call in launch.calls(plan or plan_of(built, saved), op, gradients):
            call.run()
    return gradients.tensors(), reports


def is_right_and_clean_far_away(
    case: GradientCase, axis: int, launch: ModuleType = own_launch
) -> bool:
    """Operands, what the forward pass saved and gradients past element 2^31 have the same bits."""
    built = on(case)
    saved = forward(built)
    want, _ = run(built, saved)
    far = FarMemory(axis)
    apart = build_gradients(case, far)
    out, lse = (moved(x, far) for x in saved)
    assert out is not None and lse is not None and out.stride() != saved.out.stride()
    got, reports = run(apart, Saved(out, lse), memory=far, launch=launch)
    return all(report.ok for report in reports) and same_bits(got, want)


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all gradients are equal, signs of zeros too."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    pairs = ((got[name], want[name]) for name in want)
    return all(torch.equal(*(x.contiguous().view(integer[x.dtype]) for x in p)) for p in pairs)


def assert_right_clean_and_deaf_to_poison(case: GradientCase, seed: int = 1) -> None:
    """By the acceptance rule, and with the same bits when all around the operands is NaN and some
    partitions run far ahead of others."""
    found = []
    for background, schedule in (("zero", "random"), ("nan", "unfair")):
        built = on(case, background)
        gradients, reports = run(built, forward(built), seed=seed, schedule=schedule)
        assert [str(f) for report in reports for f in report.findings] == []
        found.append(gradients)
    assert same_bits(found[1], found[0])
    built = on(case)
    for verdict in judge_twice(built, found[0], forward(built)):
        assert verdict.ok, verdict.report()


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
        gradients, reports = run(built, saved, launch=launch, **options)
        kinds |= {kind for report in reports for kind in report.kinds()}
        right &= all(verdict.ok for verdict in judge_twice(on(case), gradients, saved))
    return kinds, right
