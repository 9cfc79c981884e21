"""Cases on the Hopper kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.kernels.launch import launch
from openmla.operands import DenseOperands, Results
from openmla.plan import Plan, plan
from openmla.problem import Problem
from openmla.sim import Report, intercept
from openmla.testing.build import BuiltCase, Outcome

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def plan_of(built: BuiltCase, sm_count: int = 2, num_qo: int = 0) -> Plan:
    """The plan of a case, for a small chip so that blocks do several pieces of work."""
    case, op = built.case, built.operands
    assert isinstance(op, DenseOperands)
    rope = {"shared_3d": "shared"}.get(case.rope, case.rope)
    dtype = _NAMES[op.q.dtype]
    problem = Problem(
        form="dense", heads=case.heads, d_nope=case.d_nope, d_rope=case.d_rope, d_v=case.d_v,
        q_dtype=dtype, kv_dtype=dtype, v_dtype=dtype, rope=rope,  # type: ignore[arg-type]
        rope_dtype=dtype, page_size=case.page_size if rope == "cache" else 0, causal=case.causal,
        has_sink=case.sink != "none", wants_lse=case.return_lse, batch=len(case.q_lens),
        total_q=op.q.shape[0], total_k=op.k_nope.shape[0],
    )  # fmt: skip
    chosen = plan(problem, "h200", "hopper")
    config = replace(chosen.config, sm_count=sm_count)
    return replace(chosen, config=config.with_num_qo(num_qo) if num_qo else config)


def run(
    built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernels make of a case, and what the simulator found."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    shape = (*op.q.shape[:2], built.case.d_v)
    out = built.memory.new(shape, op.q.dtype, strided=False)
    out.fill_(torch.nan)
    lse = torch.full(shape[:2], torch.nan) if built.case.return_lse else None
    outcome = Outcome(out, lse)
    with intercept(outputs=outcome.tensors(), **options) as reports:
        launch(chosen or plan_of(built), op, Results(out, lse))
    return outcome, reports
