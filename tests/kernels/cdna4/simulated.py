"""Cases on the CDNA4 kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.kernels.launch import launch
from openmla.operands import Results
from openmla.plan import Plan, plan
from openmla.sim import Report, intercept
from openmla.testing.build import BuiltCase, Outcome


def new_results(built: BuiltCase) -> Results:
    """Outputs full of NaN."""
    op, case = built.operands, built.case
    shape = (*op.q.shape[:2], case.d_v)
    dtype = torch.bfloat16 if op.q.dtype == torch.float8_e4m3fn else op.q.dtype
    out = built.memory.new(shape, dtype, strided=case.layout == "strided")
    out.fill_(torch.nan)
    lse = torch.full(shape[:2], torch.nan) if case.return_lse else None
    logits = torch.full(shape[:2], torch.nan) if case.return_max_logits else None
    return Results(out, lse, logits)


def plan_of(built: BuiltCase, results: Results, **config: Any) -> Plan:
    """The plan of a case, with some fields of its config changed."""
    chosen = plan(built.operands.problem(results), "mi355x", "cdna4")
    return replace(chosen, config=replace(chosen.config, **config)) if config else chosen


def run(
    built: BuiltCase, config: dict[str, Any] | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernels make of a case, and what the simulator found."""
    results = new_results(built)
    chosen = plan_of(built, results, **(config or {}))
    outcome = Outcome(results.out, results.lse, results.max_logits)
    with intercept(outputs=outcome.tensors(), **options) as reports:
        launch(chosen, built.operands, results)
    return outcome, reports
