"""Sparse cases on the Blackwell kernel by way of the simulator."""

from __future__ import annotations

from typing import Any

import torch

from openmla.kernels.launch import launch
from openmla.operands import Results, SparseOperands
from openmla.plan import Plan, plan
from openmla.sim import Report, intercept
from openmla.testing.build import BuiltCase, Outcome


def results_of(built: BuiltCase) -> Results:
    """Where the kernel writes, full of NaN."""
    op, case = built.operands, built.case
    shape = (*op.q.shape[:2], case.d_v)
    out = built.memory.new(shape, op.q.dtype, strided=case.out == "strided")
    out.fill_(torch.nan)
    lse = torch.full(shape[:2], torch.nan) if case.return_lse else None
    logits = torch.full(shape[:2], torch.nan) if case.return_max_logits else None
    return Results(out, lse, logits)


def plan_of(built: BuiltCase, results: Results) -> Plan:
    """The planner's choice for a B200."""
    return plan(built.operands.problem(results), "b200", "blackwell")


def run(built: BuiltCase, **options: Any) -> tuple[Outcome, list[Report]]:
    """What the kernel makes of a case, and what the simulator found."""
    op, results = built.operands, results_of(built)
    assert isinstance(op, SparseOperands)
    outcome = Outcome(results.out, results.lse, results.max_logits)
    with intercept(outputs=outcome.tensors(), **options) as reports:
        launch(plan_of(built, results), op, results)
    return outcome, reports
