"""A plan is of one kernel over latent rows: a pair of CTAs, or CTAs of 64 heads each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmla.planning import Plan, cached_plan, target_by_name
from openmla.planning.family import Kernel
from openmla.problem import Problem

LISTS = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, total_q=4096, total_k=65536, topk=2048
)
FP8 = replace(LISTS, kv_dtype="fp8_656", page_size=64)
B200 = target_by_name("b200")


def planned(problem: Problem, triton: tuple[int, int]) -> Plan:
    return cached_plan(problem, B200, "blackwell", triton)


@pytest.mark.parametrize(
    ("problem", "triton", "folder"),
    [
        (LISTS, (3, 9), "pair"),
        (LISTS, (3, 7), "sparse"),
        (replace(LISTS, heads=64), (3, 9), "sparse"),
        (FP8, (3, 9), "pair"),
        (FP8, (3, 7), "sparse"),
    ],
    ids=str,
)
def test_the_launcher_is_that_of_the_plans_kernel(
    problem: Problem, triton: tuple[int, int], folder: str
) -> None:
    kernel: Kernel = planned(problem, triton).kernel
    assert kernel.launcher == f"openmla.kernels.blackwell.{folder}.launch"
    assert kernel.config.__module__ == f"openmla.kernels.blackwell.{folder}.plan"


def test_a_pair_reads_fp8_rows_from_a_workspace_that_holds_them_all() -> None:
    workspace = planned(FP8, (3, 9)).variant.workspace
    assert workspace is not None and not workspace.may_overflow
    assert planned(LISTS, (3, 9)).variant.workspace is None
    assert planned(FP8, (3, 7)).variant is None  # one CTA dequantizes rows itself
