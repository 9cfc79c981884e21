"""Latent and sparse cases on the Hopper kernel by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.kernels.launch import launch
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.plan import Plan, plan
from openmla.sim import Report, intercept
from openmla.testing.build import BuiltCase, Outcome


def results_of(built: BuiltCase) -> Results:
    """Outputs full of NaN."""
    case, op = built.case, built.operands
    shape = (*op.q.shape[:2], case.d_v)
    out = built.memory.new(shape, op.q.dtype, strided=False)
    out.fill_(torch.nan)
    lse = torch.full(shape[:2], torch.nan) if case.return_lse else None
    logits = torch.full(shape[:2], torch.nan) if case.return_max_logits else None
    return Results(out, lse, logits)


def plan_of(built: BuiltCase, sm_count: int = 2) -> Plan:
    """The plan of a case, for a small chip so that blocks do several pieces of work."""
    problem = replace(built.operands.problem(results_of(built)), aligned_16=True)
    chosen = plan(problem, "h200", "hopper")
    return replace(chosen, config=replace(chosen.config, sm_count=sm_count))


def run(
    built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernel makes of a case, and what the simulator found."""
    op, results = built.operands, results_of(built)
    assert isinstance(op, SparseOperands | LatentOperands)
    outcome = Outcome(results.out, results.lse, results.max_logits)
    with intercept(outputs=outcome.tensors(), **options) as reports:
        launch(chosen or plan_of(built), op, results)
    return outcome, reports
