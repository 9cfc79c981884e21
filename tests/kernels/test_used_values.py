"""NaN and Inf in what a row uses: the row is not finite then, and no other row changes by a bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.blackwell.simulated as blackwell
import kernels.cdna4.simulated as cdna4
import kernels.hopper.simulated as hopper
import openmla.kernels.hopper as package
import openmla.kernels.hopper.dense_fp8.launch as fp8_launch
from gluon_sim import intercept
from kernels.hopper.few.test_few import few_plan
from kernels.judging import on
from kernels.mutants import load_mutant, once
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results, simulated
from openmla.operands import DenseOperands, SparseOperands
from openmla.planning import Plan

NAN, INF = torch.nan, torch.inf
DENSE = Case("dense", 2, 128, 64, 128, q_lens=(5, 70), k_lens=(140, 90), causal=True)
LATENT = Case(
    "latent", 16, 512, 64, 512, kv="bf16", page_size=64, q_lens=(2, 3), k_lens=(150, 70), scale=0.05
)
LISTS = Case(
    "sparse",
    16,
    512,
    64,
    512,
    q_lens=(4,),
    k_lens=(300,),
    topk=150,
    scale=0.05,
    index_kind="distinct",
)


def few(built: BuiltCase) -> Plan:
    return few_plan(hopper.plan_of(built), 64)


FAMILIES: dict[str, tuple[Callable[[BuiltCase], Plan], Case]] = {
    "hopper dense": (hopper.plan_of, DENSE),
    "hopper latent": (hopper.plan_of, LATENT),
    "hopper lists": (hopper.plan_of, LISTS),
    "hopper few": (few, LISTS),
    "blackwell dense": (blackwell.plan_of, DENSE),
    "blackwell lists": (blackwell.plan_of, LISTS),
    "cdna4 dense": (cdna4.plan_of, DENSE),
    "cdna4 lists": (cdna4.plan_of, LISTS),
}
SPOILED = {
    "a query": ("q", NAN),
    "an infinite query": ("q", INF),
    "a key": ("k", NAN),
    "a value": ("v", NAN),
    "an infinite value": ("v", INF),
}
TOKEN, HEAD, KEY = 3, 1, 40


def spoil(built: BuiltCase, what: str, value: float) -> None:
    """One element of one query, key or value that is used."""
    op = built.operands
    if what == "q":
        op.q[TOKEN, HEAD, 3] = value
    elif isinstance(op, DenseOperands):
        (op.k_nope if what == "k" else op.v)[KEY, HEAD, 3] = value
    else:
        rows = op.cache if isinstance(op.cache, torch.Tensor) else op.cache.data
        key = KEY
        if isinstance(op, SparseOperands):  # which the first list names and the second does not
            key = next(i for i in op.indices[0].tolist() if i >= 0 and i not in op.indices[1])
        rows.view(-1, rows.shape[-1])[key, 515 if what == "k" else 3] = value


def result_of(plan_of: Callable[[BuiltCase], Plan], built: BuiltCase) -> Outcome:
    results = new_results(built)
    outcome, reports = simulated(plan_of(built), built.operands, results, seed=1)
    assert [str(one) for report in reports for one in report.findings] == []
    return outcome


@cache
def unspoiled(name: str) -> tuple[BuiltCase, Outcome]:
    """A family's case as it is, and its result: the same whatever is spoiled elsewhere."""
    plan_of, case = FAMILIES[name]
    built = on(case)
    return built, result_of(plan_of, built)


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_finite_shows_where_it_is_used(name: str, spoiled: str) -> None:
    plan_of, case = FAMILIES[name]
    sound, clean = unspoiled(name)
    built = on(case)
    spoil(built, *SPOILED[spoiled])
    lost = ~built.truth().out.isfinite()
    assert lost.any() and not lost.all()
    outcome = result_of(plan_of, built)
    verdict = judge(built, outcome)
    assert verdict.ok, verdict.report()
    rows = ~lost.any(-1)
    assert torch.equal(outcome.out[rows], clean.out[rows])
    assert not judge(built, clean).ok, "numbers where there are none"
    assert not judge(sound, outcome).ok, "none where there are numbers"


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("case", [DENSE, LATENT, LISTS], ids=["dense", "latent", "lists"])
def test_on_the_cpu_too(case: Case, spoiled: str) -> None:
    built = on(case)
    spoil(built, *SPOILED[spoiled])
    verdict = judge(built, built.run("cpu"))
    assert verdict.ok, verdict.report()


FP8 = replace(DENSE, dtype="e4m3", q_scale=True)


def with_a_scale_of_nan() -> BuiltCase:
    built = on(FP8)
    assert isinstance(built.operands, DenseOperands)
    q_scale = built.operands.weights.q_scale
    assert q_scale is not None
    q_scale[TOKEN] = NAN
    return built


def is_right(launch: ModuleType) -> bool:
    """Whether a row whose queries are multiplied by NaN is NaN, and the others are as they were."""
    built = with_a_scale_of_nan()
    results = new_results(built)
    with intercept(seed=1) as reports:
        for call in launch.calls(hopper.plan_of(built), built.operands, results):
            call.run()
    assert all(report.ok for report in reports)
    return judge(built, Outcome(results.out, results.lse), fp8_sums=True).ok


def test_a_scale_that_is_nan_makes_its_row_nan(tmp_path: Path) -> None:
    assert is_right(fp8_launch)
    lost = once("gl.where(scale == scale, 0, 127)", "gl.where(scale == scale, 0, 0)")
    assert not is_right(
        load_mutant(package, "dense_fp8.products", lost, "dense_fp8.launch", tmp_path)
    )
