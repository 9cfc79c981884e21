"""The plan of the dense FP8 kernel: what it serves, what it holds, when it runs."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from openmla.errors import Unsupported
from openmla.kernels.hopper.dense_fp8 import plan as dense_fp8
from openmla.kernels.hopper.dense_fp8.plan import HopperDenseFp8Config
from openmla.planning import NEWEST_TRITON, cached_plan, plan, target_by_name
from openmla.problem import Problem

MIXED = Problem(
    form="dense",
    heads=128,
    d_nope=128,
    d_rope=64,
    d_v=128,
    total_q=4096,
    total_k=4096,
    q_dtype="e4m3",
    kv_dtype="e4m3",
    rope_dtype="e4m3",
)
FP8 = replace(MIXED, v_dtype="e4m3")


def runs(problem: Problem, backend: str = "auto") -> str:
    return cached_plan(problem, target_by_name("h200"), backend, NEWEST_TRITON).backend


def config(problem: Problem) -> HopperDenseFp8Config:
    found = plan(problem, "h200", "hopper").config
    assert isinstance(found, HopperDenseFp8Config)
    return found


def test_examples() -> None:
    assert doctest.testmod(dense_fp8).failed == 0


@pytest.mark.parametrize("problem", [MIXED, FP8], ids=["mixed", "fp8"])
def test_it_is_chosen(problem: Problem) -> None:
    assert runs(problem) == "hopper"
    kernel = plan(problem, "h200", "hopper").kernel
    assert not kernel.coarse and not kernel.fp8_weights


@pytest.mark.parametrize("v_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("rope_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256), (64, 32, 64), (96, 0, 16)])
def test_every_served_type_and_width_has_a_plan(
    v_dtype: str, rope_dtype: str, dims: tuple[int, int, int]
) -> None:
    nope, rope, v = dims
    problem = replace(
        MIXED,
        v_dtype=v_dtype,
        rope_dtype=rope_dtype,
        d_nope=nope,
        d_rope=rope,
        d_v=v,
        has_q_scale=True,
        has_k_scale=True,
    )
    assert config(problem).supported()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d_nope": 48}, "d_nope 48"),
        ({"d_rope": 16}, "d_rope 16"),
        ({"rope": "cache", "rope_dtype": "fp8_656", "page_size": 64}, "rope_dtype fp8_656"),
        ({"has_key_mask": True}, "has_key_mask"),
        ({"aligned_16": False}, "multiple of 16 bytes"),
        ({"q_dtype": "bf16"}, "q_dtype bf16"),
    ],
)
def test_what_is_not_declared_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        plan(replace(MIXED, **change), "h200", "hopper")  # type: ignore[arg-type]


def test_a_wider_rope_takes_a_copy_of_the_queries() -> None:
    narrow, wide = config(FP8), config(replace(FP8, rope_dtype="bf16"))
    assert wide.q_bytes - narrow.q_bytes == 128 * 64 * 2
    assert wide.key_bytes - narrow.key_bytes == 64


def test_scales_take_a_stage_each() -> None:
    plain, scaled = config(MIXED), config(replace(MIXED, has_k_scale=True))
    assert scaled.smem_used - plain.smem_used == plain.num_kv_stages * plain.BN * 4
    assert config(replace(MIXED, has_q_scale=True)) == plain


def test_both_numbers_of_query_tiles_have_one_key_tile() -> None:
    for problem in (MIXED, FP8, replace(FP8, d_nope=192)):
        two = config(problem)
        assert two.with_num_qo(1).BN == two.BN and type(two.with_num_qo(1)) is type(two)


def test_explain_says_what_is_different() -> None:
    text = plan(replace(FP8, rope_dtype="bf16"), "h200", "hopper").explain()
    for words in ("FP8 products", "16-bit products", "upcast to bf16 by a kernel"):
        assert words in text


def test_words_of_two_blocks_are_registers_beside_o_and_the_scores() -> None:
    assert config(MIXED).accumulators == 64 + 64 + 64
    assert "packed P of two blocks 64" in plan(MIXED, "h200", "hopper").explain()


def test_explain_says_when_weights_are_computed_again() -> None:
    assert any(f"more than {dense_fp8.MOST_SUM:g}" in line for line in config(MIXED).explain())


def test_values_of_8_bits_have_the_block_of_16() -> None:
    assert config(FP8) == replace(config(MIXED), v_bytes=1)
    assert config(FP8).smem_map == config(MIXED).smem_map
