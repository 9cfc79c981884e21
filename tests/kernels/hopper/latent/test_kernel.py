"""The latent Hopper kernel on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gluon_sim import intercept
from kernels.hopper.simulated import run
from kernels.judging import (
    assert_clean,
    assert_every_schedule_is_clean,
    assert_right_clean_and_deaf_to_poison,
    ends_with_invalid,
    on,
)
from openmla import dispatch
from openmla.kernels.hopper.latent.jobs import JOBS
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import SparseOperands
from openmla.planning import target_by_name

V32 = Case("sparse", 12, 512, 64, 512, q_lens=(3,), k_lens=(300,), topk=200, scale=0.05, spare=5)
SMALL = replace(V32, d_nope=128, d_rope=32, d_v=128)
CASES = {
    "distinct": V32,
    "mixed indices, sink": replace(V32, index_kind="mixed", sink="mixed", return_max_logits=True),
    "70 heads, wild lengths": replace(
        V32, heads=70, topk_lengths="wild", topk=130, index_kind="duplicates"
    ),
    "128 heads": replace(V32, heads=128, q_lens=(2,), topk=64),
    "many steps": replace(V32, q_lens=(2,), topk=520, k_lens=(600,), values="rising"),
    "all invalid": replace(V32, index_kind="invalid", sink="high", return_max_logits=True),
    "topk 0": replace(V32, topk=0, return_lse=False),
    "topk 1": replace(V32, topk=1, heads=1, q_lens=(5,)),
    "topk 65": replace(SMALL, topk=65),
    "topk 129": replace(SMALL, topk=129),
    "no rows": replace(V32, k_lens=(0,), spare=0, topk=3),
    "fp16": replace(V32, dtype="fp16", index_kind="mixed", sink="normal"),
    "negative scale": replace(V32, scale=-0.1, topk=70, return_max_logits=True),
    "scale 0": replace(V32, scale=0.0, topk=70),
    "pages of 24": replace(V32, kv="bf16", page_size=24, index_kind="mixed"),
    "peaky": replace(V32, values="peaky", topk=300, q_lens=(1,)),
    "exact": replace(V32, values="exact", scale=0.125, topk=256, q_lens=(1,)),
    "large": replace(V32, values="large", q_lens=(1,)),
    "512+0": replace(V32, d_rope=0, rope="none", index_kind="mixed"),
    "256+64": replace(V32, d_nope=256, d_v=256, topk=400, index_kind="mixed"),
    "256+32": replace(V32, d_nope=256, d_rope=32, d_v=256, topk=400, q_lens=(2,)),
    "128+32, 7 short work items": replace(SMALL, q_lens=(7,), topk=40, topk_lengths="ragged"),
    "128+32, long": replace(SMALL, topk=1100, k_lens=(700,), index_kind="mixed", sink="low"),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


def test_the_first_index_that_does_not_count_ends_a_block() -> None:
    case = replace(SMALL, topk=200)
    assert_right_clean_and_deaf_to_poison(case, run, change=ends_with_invalid)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_clean(name: str) -> None:
    assert_every_schedule_is_clean(CASES[name], run)


def test_a_token_does_not_see_its_neighbors() -> None:
    built = on(replace(V32, q_lens=(4,), index_kind="mixed", topk_lengths="ragged"))
    together = run(built)[0].out
    op = built.operands
    assert isinstance(op, SparseOperands) and op.topk_lengths is not None
    for token in range(4):
        rows = slice(token, token + 1)
        alone = replace(
            op, q=op.q[rows], indices=op.indices[rows], topk_lengths=op.topk_lengths[rows]
        )
        single = replace(built, operands=alone)
        assert torch.equal(run(single)[0].out, together[rows])


def test_a_maximum_that_every_block_raises() -> None:
    """Lists in the order of their scores: O is rescaled in every step."""
    built = on(replace(SMALL, q_lens=(2,), topk=520, k_lens=(600,), values="rising", scale=0.2))
    op = built.operands
    assert isinstance(op, SparseOperands)
    built = replace(built, operands=replace(op, indices=op.indices.sort(1).values))
    outcome, reports = run(built)
    assert_clean(reports)
    verdict = judge(built, outcome)
    assert verdict.ok, verdict.report()


def test_pages_with_gaps() -> None:
    built = on(replace(V32, kv="bf16", page_size=24, index_kind="mixed"))
    op = built.operands
    assert isinstance(op, SparseOperands)
    whole = run(built)[0].out
    data = op.cache.data  # type: ignore[union-attr]
    wide = torch.full((data.shape[0], 30, data.shape[2]), torch.nan, dtype=data.dtype)
    wide[:, :24] = data
    cache = replace(op.cache, data=wide[:, :24])  # type: ignore[arg-type]
    gapped = replace(built, operands=replace(op, cache=cache))
    assert torch.equal(run(gapped)[0].out, whole)


@pytest.mark.compile
@pytest.mark.parametrize("job", list(jobs_of(JOBS)), ids=lambda job: job.name)
def test_compiles_as_planned(job: CompileJob) -> None:
    report = compile_job(job)
    assert report.differences(job.predicted) == []
    if report.triton.startswith("3.6"):
        assert report.spills == 0


def test_results_without_rows() -> None:
    built = on(replace(V32, q_lens=(0,)))
    outcome, reports = run(built)
    assert not reports and outcome.out.shape[0] == 0


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are planned for as if they were on an H200."""
    monkeypatch.setattr(dispatch, "device_target", lambda device: target_by_name("h200"))


def test_the_public_call_on_an_h200_runs_this_kernel(h200: None) -> None:
    built = on(replace(V32, q_lens=(2,), topk=70, return_max_logits=True))
    with intercept() as reports:
        assert judge(built, built.run()).ok
    assert len(reports) == 1 and reports[0].ok


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(V32, kv="bf16", d_v=256), "d_v 256"),
        (replace(V32, d_rope=48), "d_rope 48"),
        (replace(V32, layout="strided"), "16 bytes"),
    ],
    ids=["narrow V", "odd rope", "unaligned"],
)
def test_what_it_does_not_serve_runs_on_the_portable_kernel(
    h200: None, case: Case, reason: str
) -> None:
    built = on(case)
    chosen = dispatch.plan_call(built.operands, new_results(built))
    assert chosen.backend == "portable" and reason in chosen.passed_over[0]
