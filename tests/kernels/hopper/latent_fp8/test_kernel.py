"""The latent FP8 kernel on the simulator: right, clean under every schedule, deaf to poison.

With exact sums of FP8 products, e4m3 rows must be as accurate as bf16 ones are; with sums as an
H200's tensor cores make them (13 places), the acceptance rule allows what those lose. Rows with
scales are multiplied as they are stored, not as bf16 numbers, which the same rule covers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from gluon_sim import Limits, intercept
from kernels.far_memory import FarMemory
from kernels.hopper.simulated import plan_of, run
from kernels.judging import (
    assert_clean,
    assert_every_schedule_is_clean,
    assert_right_clean_and_deaf_to_poison,
    ends_with_invalid,
    on,
)
from openmla import dispatch
from openmla.kernels.hopper.chip import SMEM_PER_BLOCK
from openmla.kernels.hopper.latent_fp8.jobs import JOBS
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import LatentOperands, SparseOperands
from openmla.planning import target_by_name

H200 = Limits(fp8_bits=13)
on_h200 = partial(run, limits=H200)
PLAIN = Case(
    "sparse",
    12,
    512,
    64,
    512,
    q_lens=(3,),
    k_lens=(300,),
    topk=200,
    scale=0.05,
    spare=5,
    dtype="e4m3",
)
CASES = {
    "distinct": PLAIN,
    "mixed indices, sink": replace(PLAIN, index_kind="mixed", sink="mixed", return_max_logits=True),
    "70 heads, wild lengths": replace(
        PLAIN, heads=70, q_lens=(2,), topk_lengths="wild", topk=130, index_kind="duplicates"
    ),
    "many steps": replace(PLAIN, q_lens=(1,), topk=520, k_lens=(600,), values="rising"),
    "all invalid": replace(PLAIN, index_kind="invalid", sink="high", return_max_logits=True),
    "topk 0": replace(PLAIN, topk=0, return_lse=False),
    "topk 1": replace(PLAIN, topk=1, heads=1, q_lens=(7,)),
    "no rows": replace(PLAIN, k_lens=(0,), spare=0, topk=3),
    "negative scale": replace(PLAIN, scale=-0.1, topk=70, return_max_logits=True),
    "scale 0": replace(PLAIN, scale=0.0, topk=70),
    "peaky": replace(PLAIN, values="peaky", topk=300, q_lens=(1,)),
    "scales": replace(PLAIN, q_scale=True, k_scale=True, index_kind="mixed"),
    "512+0, no lse": replace(PLAIN, d_rope=0, rope="none", index_kind="mixed", return_lse=False),
    # A program has nine or more: its ring of four sums turns twice.
    "19 short work items": replace(PLAIN, q_lens=(19,), topk=40, topk_lengths="ragged"),
}
TOKEN = replace(PLAIN, kv="fp8_token", page_size=24, index_kind="mixed", q_scale=True)
PAGES = replace(TOKEN, form="latent", topk=0, page_size=64, q_lens=(5, 0, 3), k_lens=(5, 9, 200))
CACHES = {
    "fp8_token": TOKEN,
    "fp8_token 512+0, sink": replace(TOKEN, d_rope=0, rope="none", sink="normal"),
    "fp8_token rising, max logits": replace(
        TOKEN, values="rising", topk=400, q_lens=(1,), return_max_logits=True
    ),
    "pages": PAGES,
    "pages, not causal, no keys": replace(PAGES, causal=False, k_lens=(70, 0, 0), sink="mixed"),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


@pytest.mark.parametrize("name", ["mixed indices, sink", "scales", *CACHES])
def test_right_with_the_sums_of_an_h200(name: str) -> None:
    assert_right_clean_and_deaf_to_poison((CASES | CACHES)[name], on_h200, fp8_sums=True)


def test_every_step_moves_the_reference() -> None:
    """Lists in the order of rows, whose scores rise: factors go through their ring twice."""
    case = replace(PLAIN, q_lens=(1,), topk=640, k_lens=(700,), values="rising")
    assert_right_clean_and_deaf_to_poison(case, run, change=in_order)


def in_order(built: BuiltCase) -> BuiltCase:
    op = built.operands
    assert isinstance(op, SparseOperands)
    op.indices.copy_(op.indices.sort(1).values)
    return built


def test_the_first_index_that_does_not_count_ends_a_block() -> None:
    assert_right_clean_and_deaf_to_poison(PLAIN, run, change=ends_with_invalid)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *CACHES])
def test_every_schedule_is_clean(name: str) -> None:
    assert_every_schedule_is_clean((CASES | CACHES)[name], run)


def test_a_token_does_not_see_its_neighbors() -> None:
    built = on(replace(PLAIN, q_lens=(4,), index_kind="mixed", topk_lengths="ragged", q_scale=True))
    together = run(built)[0].out
    op = built.operands
    assert isinstance(op, SparseOperands) and op.topk_lengths is not None
    scale = op.weights.q_scale
    assert scale is not None
    for token in range(4):
        rows = slice(token, token + 1)
        alone = replace(
            op,
            q=op.q[rows],
            indices=op.indices[rows],
            topk_lengths=op.topk_lengths[rows],
            weights=replace(op.weights, q_scale=scale[rows]),
        )
        assert torch.equal(run(replace(built, operands=alone))[0].out, together[rows])


def test_small_scales_are_as_good_as_large_ones() -> None:
    """Values of rows whose scales differ by 2^40 from case to case: fp16 holds neither alone."""
    for power in (-20, 20):
        built = on(replace(TOKEN, index_kind="distinct"))
        op = built.operands
        assert isinstance(op, SparseOperands) and op.cache.scales is not None  # type: ignore[union-attr]
        op.cache.scales.mul_(2.0**power)  # type: ignore[union-attr]
        by = replace(op.weights, scale=op.weights.scale * 2.0**-power)
        built = replace(built, operands=replace(op, weights=by))
        outcome, reports = on_h200(built)
        assert_clean(reports)
        verdict = judge(built, outcome, fp8_sums=True)
        assert verdict.ok, verdict.report()


def test_pages_with_gaps() -> None:
    built = on(PAGES)
    op = built.operands
    assert isinstance(op, LatentOperands)
    whole = run(built)[0].out
    data, scales = op.cache.data, op.cache.scales
    assert scales is not None
    wide = torch.zeros(data.shape[0], 80, data.shape[2], dtype=torch.uint8).view(data.dtype)
    wide[:, :64] = data
    far = torch.full((data.shape[0], 70, scales.shape[2]), torch.nan)
    far[:, :64] = scales
    cache = replace(op.cache, data=wide[:, :64], scales=far[:, :64])
    gapped = replace(built, operands=replace(op, cache=cache))
    assert torch.equal(run(gapped)[0].out, whole)


@pytest.mark.compile
@pytest.mark.parametrize("job", list(jobs_of(JOBS)), ids=lambda job: job.name)
def test_compiles_as_planned(job: CompileJob) -> None:
    report = compile_job(job)
    assert report.differences(job.predicted) == []
    assert report.shared is not None and report.shared <= SMEM_PER_BLOCK


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are planned for as if they were on an H200."""
    monkeypatch.setattr(dispatch, "device_target", lambda device: target_by_name("h200"))


def test_the_public_call_runs_this_kernel(h200: None) -> None:
    built = on(replace(PLAIN, q_lens=(2,), topk=70, return_max_logits=True))
    with intercept() as reports:
        assert judge(built, built.run("auto")).ok
    assert len(reports) == 1 and reports[0].ok


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(PLAIN, d_nope=256, d_v=256), "256"),
        (replace(TOKEN, kv="fp8_656"), "fp8_656"),
        (replace(PLAIN, layout="strided"), "16 bytes"),
        (replace(TOKEN, k_scale=True), "has_k_scale"),
    ],
    ids=["narrow latent", "several scales a row", "unaligned", "k_scale of a cache"],
)
def test_what_it_does_not_serve_runs_on_the_portable_kernel(
    h200: None, case: Case, reason: str
) -> None:
    built = on(case)
    chosen = dispatch.plan_call(built.operands, new_results(built))
    assert chosen.backend == "portable" and reason in chosen.passed_over[0]
    assert plan_of(on(PLAIN)).backend == "hopper"


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_scales_past_element_2_31(axis: int) -> None:
    built = build(TOKEN, memory=FarMemory(axis))
    outcome, reports = on_h200(built, seed=1)
    assert_clean(reports)
    verdict = judge(built, outcome, fp8_sums=True)
    assert verdict.ok, verdict.report()
