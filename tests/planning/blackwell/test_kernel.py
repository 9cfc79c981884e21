"""What the dense Blackwell kernel cannot run goes elsewhere, with the reason."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from openmla.planning import NEWEST_TRITON, cached_plan, plan, target_by_name
from openmla.planning.blackwell import kernel
from openmla.planning.models import MODELS, problem_for_model
from openmla.problem import Problem

V3 = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
FP8 = replace(V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
B200 = target_by_name("b200")


def cached(problem: Problem, rope_dtype: str, page_size: int = 64) -> Problem:
    return replace(problem, rope="cache", rope_dtype=rope_dtype, page_size=page_size)


REFUSED = {
    "d_v 192: 64, 128 or 256 are served": replace(V3, d_nope=192, d_v=192),
    "multiple of 8 rows": cached(V3, "bf16", 4),
    "rope_dtype fp8_block64": cached(FP8, "fp8_block64"),
    "rope_dtype fp8_token": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "fp8_token"
    ),
    "q_dtype fp16, kv_dtype fp16, v_dtype fp16, rope_dtype bf16": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "bf16"
    ),
    "rope_dtype fp16": replace(V3, rope_dtype="fp16"),
    "d_rope 32: 64 is served": replace(V3, d_nope=64, d_rope=32, d_v=64),
}


def test_examples() -> None:
    assert doctest.testmod(kernel).failed == 0


@pytest.mark.parametrize("reason", REFUSED)
def test_the_portable_kernel_takes_over_and_says_why(reason: str) -> None:
    instead = cached_plan(REFUSED[reason], B200, "auto", NEWEST_TRITON)
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
        assert chosen.backend == "blackwell" and chosen.runs_today == (dtype == "bf16")


def test_fp8_weights_are_too_coarse_to_run_unasked() -> None:
    """Weights below 2^-17 of a row's largest are lost: 4096 keys 10 nats below one weigh 17 %."""
    fp8 = replace(FP8, rope_dtype="e4m3")
    instead = cached_plan(fp8, B200, "auto", NEWEST_TRITON)
    assert instead.backend == "portable" and "runs when named" in instead.passed_over[0]
    assert cached_plan(fp8, B200, "blackwell", NEWEST_TRITON).backend == "blackwell"


@pytest.mark.parametrize("rope_dtype", ["bf16", "fp8_656", "fp8_block32", "fp8_token"])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_rope_pages_run_on_blackwell(rope_dtype: str, page_size: int) -> None:
    assert plan(cached(V3, rope_dtype, page_size), B200).backend == "blackwell"
