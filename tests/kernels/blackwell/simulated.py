"""Cases on the dense Blackwell kernel by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.kernels.launch import launch
from openmla.operands import DenseOperands, Results
from openmla.plan import Plan, plan
from openmla.sim import Report, intercept
from openmla.testing.build import BuiltCase, Outcome


def results_for(built: BuiltCase) -> Results:
    """Outputs full of NaN."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    shape = (*op.q.shape[:2], built.case.d_v)
    dtype = torch.bfloat16 if op.q.dtype == torch.float8_e4m3fn else op.q.dtype
    out = built.memory.new(shape, dtype, strided=False)
    out.fill_(torch.nan)
    lse = torch.full(shape[:2], torch.nan) if built.case.return_lse else None
    return Results(out, lse)


def plan_of(built: BuiltCase, num_qo: int = 0) -> Plan:
    """The plan of a case on a B200; `num_qo` 0: as planned."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    chosen = plan(op.problem(results_for(built)), "b200", "blackwell")
    if not num_qo or num_qo == chosen.config.num_qo:
        return chosen
    return replace(chosen, config=chosen.config.with_num_qo(num_qo))


def run(
    built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernel makes of a case, and what the simulator found."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    results = results_for(built)
    outcome = Outcome(results.out, results.lse)
    with intercept(outputs=outcome.tensors(), **options) as reports:
        launch(chosen or plan_of(built), op, results)
    return outcome, reports
