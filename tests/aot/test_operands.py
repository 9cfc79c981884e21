"""Stand-ins pose the problem they are made from."""

from __future__ import annotations

import doctest
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from openmla.aot import operands as aot_operands
from openmla.aot.operands import operands_of
from openmla.indexer.loss_problem import LossProblem
from openmla.indexer.problem import IndexProblem
from openmla.problem import Problem

KERNELS = (
    "hopper.dense",
    "hopper.latent",
    "blackwell.dense",
    "blackwell.sparse",
    "cdna4.dense",
    "cdna4.sparse",
)
JOBS = [import_module(f"openmla.kernels.{name}.jobs").JOBS for name in KERNELS]
PROBLEMS = [
    pytest.param(problem, id=f"{name} {job}")
    for name, listed in zip(KERNELS, JOBS, strict=True)
    for job, problem in listed.problems.items()
]
SMALL = Problem(
    form="dense",
    heads=2,
    d_nope=16,
    d_rope=8,
    d_v=16,
    total_q=6,
    total_k=9,
    batch=3,
    has_k_start=True,
    has_sink=True,
    has_q_scale=True,
    has_k_scale=True,
    has_key_mask=True,
    window=4,
)
STEPS = (
    IndexProblem(form="scores", heads=4, total_q=3, width=96),
    IndexProblem(form="scores", heads=4, total_q=3, width=128, page_size=64, batch=2),
    IndexProblem(form="select", topk=8, total_q=3, width=96, add_starts=True, keeps=True),
    IndexProblem(
        form="select",
        topk=8,
        total_q=3,
        width=128,
        page_size=64,
        wants_counts=True,
        wants_mask=True,
    ),
)


def posed(problem: Problem) -> Problem:
    """As a call poses it: lists have no mask, FP8 rows are in pages, and pages are whole."""
    if problem.form == "sparse":
        problem = replace(problem, causal=False)
    if problem.form == "sparse" and problem.kv_dtype.startswith("fp8_"):
        problem = replace(problem, page_size=problem.page_size or 64)
    if problem.form != "dense" and problem.page_size:
        pages = -(-problem.total_k // problem.page_size)
        problem = replace(problem, total_k=pages * problem.page_size)
    if problem.form == "latent":
        problem = replace(problem, table_keys=problem.table_keys or problem.total_k)
    return problem


def test_examples() -> None:
    assert doctest.testmod(aot_operands).failed == 0


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_job_is_compiled_with_the_operands_of_its_problem(problem: Problem) -> None:
    operands, results = operands_of(problem)
    assert operands.problem(results) == posed(problem)
    assert operands.q.device.type == "meta"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_option_has_its_tensor(device: str) -> None:
    operands, results = operands_of(SMALL, device)
    assert operands.problem(results) == SMALL
    assert operands.cu_seqlens_q.tolist() == [0, 2, 4, 6]


def test_a_whole_prompt_has_one_tensor_of_offsets() -> None:
    whole = operands_of(replace(SMALL, total_q=9, self_attention=True))[0]
    chunk = operands_of(SMALL)[0]
    assert whole.cu_seqlens_q is whole.cu_seqlens_k
    assert chunk.cu_seqlens_q.data_ptr() != chunk.cu_seqlens_k.data_ptr()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_block32"])
def test_pages_may_lie_apart(kv_dtype: str) -> None:
    problem = Problem(
        form="latent",
        heads=2,
        d_nope=64,
        d_rope=64,
        d_v=64,
        page_size=16,
        total_q=2,
        total_k=32,
        kv_dtype=kv_dtype,
    )
    cache = operands_of(problem, page_gap=4)[0].cache
    assert (cache.page_size, cache.data.stride(0)) == (16, 20 * 128)
    assert cache.scales is None or cache.scales.stride(0) == 20 * 4


@pytest.mark.parametrize("problem", STEPS, ids=str)
def test_steps_of_the_indexer(problem: IndexProblem) -> None:
    operands, results = operands_of(problem)
    assert operands.problem(results) == problem


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_the_loss_of_an_indexer(wants_gradients: bool) -> None:
    options = {"has_k_start": False, "has_key_mask": True, "has_sink": True, "wants_lse": True}
    dense = replace(SMALL, **options)
    problem = LossProblem.of(dense, 5, 32, wants_gradients)
    operands, results = operands_of(problem)
    assert operands.problem(results) == problem


def test_a_job_has_pages_apart_only_where_its_problem_has_pages() -> None:
    for listed in JOBS:
        assert set(listed.page_gaps) | set(listed.configs) <= set(listed.problems)
        assert all(listed.problems[name].page_size for name in listed.page_gaps)


def test_zeros_whatever_torch_defaults_to() -> None:
    with torch.device("meta"):
        assert operands_of(SMALL, "cpu")[0].q.device.type == "cpu"
