"""What the dense Blackwell kernel cannot run goes elsewhere, with the reason."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from openmla.plan import blackwell_dense, plan, target_by_name
from openmla.plan.models import MODELS, problem_for_model
from openmla.plan.support import runnable_plan
from openmla.problem import Problem

V3 = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
FP8 = replace(V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
B200 = target_by_name("b200")


def cached(problem: Problem, rope_dtype: str, page_size: int = 64) -> Problem:
    return replace(problem, rope="cache", rope_dtype=rope_dtype, page_size=page_size)


REFUSED = {
    "V of 192 columns": replace(V3, d_nope=192, d_v=192),
    "multiple of 8 rows": cached(V3, "bf16", 4),
    "rope from an FP8 cache beside e4m3": cached(FP8, "fp8_block64"),
    "rope from an FP8 cache beside fp16": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "fp8_token"
    ),
    "rope stored as bfloat16 and multiplied as float16": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "bf16"
    ),
    "rope stored as float16 and multiplied as bfloat16": replace(V3, rope_dtype="fp16"),
    "rope of 32 columns": replace(V3, d_nope=64, d_rope=32, d_v=64),
}


def test_examples() -> None:
    assert doctest.testmod(blackwell_dense).failed == 0


@pytest.mark.parametrize("reason", REFUSED)
def test_the_portable_kernel_takes_over_and_says_why(reason: str) -> None:
    instead = runnable_plan(REFUSED[reason], B200)
    assert instead.backend == "portable"
    assert any(reason in line for line in instead.passed_over)


@pytest.mark.parametrize(
    "name", [m.name for m in MODELS.values() if m.rope == 64 and not m.one_row]
)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_every_model_with_rope_64_runs_on_blackwell(name: str, dtype: str) -> None:
    for tokens in (64, 8192):
        problem = problem_for_model(name, tokens=tokens, form="dense", dtype=dtype)
        chosen = plan(problem, B200)
        assert chosen.backend == "blackwell" and chosen.runs_today


@pytest.mark.parametrize("rope_dtype", ["bf16", "fp8_656", "fp8_block32", "fp8_token"])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_rope_pages_run_on_blackwell(rope_dtype: str, page_size: int) -> None:
    assert plan(cached(V3, rope_dtype, page_size), B200).backend == "blackwell"
