"""Running cases on a GPU and judging them: what the tests of this folder share.

A kernel family is run through its plan with outputs full of NaN, so that a row it does not write
cannot pass for right because freed memory still held the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla import Unsupported
from openmla.checks import out_dtype
from openmla.dispatch import plan_call
from openmla.formats import FORMATS
from openmla.kernels.launch import launch
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.draw import random_case
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.poison import differences, poison_problems
from openmla.operands import Results

DEVICE = "cuda"
HAS_GPU = torch.cuda.is_available()
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")]
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

MOST_SEEDS = 2000
Change = Callable[[Any], Any]
"""From a plan's config to the one to run with."""


def on(case: Case, background: str = "zero") -> BuiltCase:
    """A case on the GPU; `background` fills what it does not address."""
    return build(case, memory=Memory(DEVICE, background))


def attend(
    built: BuiltCase, backend: str, change: Change | None = None, target: str = ""
) -> Outcome:
    """One family's kernels, with another config or another chip's plan where one is given."""
    op, case = built.operands, built.case
    shape = (*op.q.shape[:2], case.d_v)
    gaps = {"strided": case.out == "strided", "aligned": case.out == "aligned"}
    out = built.memory.new(shape, out_dtype(op.q.dtype), **gaps)
    rows = [
        torch.full(op.q.shape[:2], torch.nan, dtype=torch.float32, device=op.q.device)
        for _ in range(2)
    ]
    results = Results(
        out.fill_(torch.nan),
        rows[0] if case.return_lse else None,
        rows[1] if case.return_max_logits else None,
    )
    if target:
        chosen = openmla.plan(op.problem(results), target, backend)
    else:
        chosen = plan_call(op, results, backend)
    if change is not None:
        chosen = replace(chosen, config=change(chosen.config))
    launch(chosen, op, results)
    return Outcome(results.out, results.lse, results.max_logits)


def problems(case: Case, backend: str, change: Change | None = None, target: str = "") -> list[str]:
    """What is wrong by the acceptance rule, with any memory around, and in a second run."""

    def run(built: BuiltCase) -> Outcome:
        return attend(built, backend, change, target)

    built = on(case)
    outcome = run(built)
    results = Results(outcome.out, outcome.lse, outcome.max_logits)
    fp8_weights = plan_call(built.operands, results, backend).kernel.fp8_weights
    verdict = judge(built, outcome, fp8_weights=fp8_weights)
    found = [*verdict.problems, *poison_problems(case, run, DEVICE)]
    found += [f"second run: {p}" for p in differences(run(built), outcome)]
    return [f"{case}: {p}" for p in found]


def drawn_problems(form: str, backend: str, count: int, first: int = 0, **fixed: Any) -> list[str]:
    """The first `count` drawn cases of a form that the family serves, from seed `first` on.

    `fixed` fields are the same in all of them: a family for a few widths would find hardly any.
    """
    found, served = [], 0
    for seed in range(first, first + MOST_SEEDS):
        if served == count:
            return found
        case = random_case(seed)
        if case.form != form:
            continue
        case = replace(case, **fixed)
        format = FORMATS.get(case.kv)
        if format and not format.takes(case.d_nope, case.d_rope):
            continue
        try:
            found += problems(case, backend)
        except Unsupported:
            continue
        served += 1
    return [*found, f"{backend} serves only {served} of {MOST_SEEDS} drawn cases"]


def different(call: Callable[[], Tensor], launches: int) -> int:
    """How many of so many calls do not give the bits of the first, which must be finite."""
    first = call().clone()
    assert bool(torch.isfinite(first).all())
    return sum(not torch.equal(call(), first) for _ in range(launches - 1))


def offsets(*lengths: int) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(DEVICE)


def normal(*shape: int) -> Tensor:
    """bf16 numbers made on the GPU: the tensors of the largest tests are too large for the host."""
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
