"""The portable loss of an indexer in Triton's interpreter, its plans, and how it compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import openmla
from kernels.portable.interpreting import Interpreting
from openmla import Unsupported
from openmla.indexer.loss_problem import LossProblem
from openmla.problem import Problem

pytest.importorskip("triton")

from openmla.kernels.portable.indexer_loss import jobs
from openmla.kernels.portable.indexer_loss.plan import SCORE_CAP
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import target_by_name

JOBS = [job for listed in jobs.JOBS for job in jobs_of(listed)]
DENSE = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)


def loss_of(dense: Problem = DENSE, heads: int = 64, width: int = 128) -> LossProblem:
    """Gradients of a loss against a dense call."""
    return LossProblem.of(dense, heads, width, wants_gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "first", "number"),
    [
        # More of them: TRITON_INTERPRET=1 python …/interpreted_index_loss.py fuzz 0 60
        ("fuzz", 100, 4),
        pytest.param("fuzz", 200, 20, marks=pytest.mark.long),
        ("edges", 0, 4),
        ("steep", 0, 2),
        ("apart", 0, 4),
        ("bits", 0, 1),
        pytest.param("bits", 1, 3, marks=pytest.mark.long),
        ("controls", 0, 4),
        ("layer", 0, 1),
        pytest.param("defects", 0, 25, marks=pytest.mark.seeded),
    ],
)
def test_interpreted(interpreted: Interpreting, part: str, first: int, number: int) -> None:
    *problems, counts = interpreted("interpreted_index_loss", part, first, number)
    assert not problems
    assert counts == {"done": number, "rejected": 0}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_compiles_and_fits(job: CompileJob) -> None:
    report = compile_job(job)
    assert not report.error
    chip = target_by_name(job.name.rsplit(" on ", 1)[1].split(",")[0])
    assert report.shared is not None and report.shared <= chip.smem_per_block


def test_every_kernel_is_compiled_for_every_chip() -> None:
    for chip in jobs.CHIPS:
        names = {job.call.kernel.__name__ for job in JOBS if f" on {chip}" in job.name}
        passes = {f"loss_{name}_pass_kernel" for name in ("score", "row", "query", "key")}
        assert names == {*passes, "rope_sum_kernel"}


@pytest.mark.parametrize("chip", (*jobs.CHIPS, "rtx3090", "mi250x"))
@pytest.mark.parametrize("widths", [(128, 64), (1, 0), (192, 64), (256, 256)], ids=str)
def test_every_chip_has_tiles_that_fit(chip: str, widths: tuple[int, int]) -> None:
    named: dict[str, Any] = dict(zip(("d_nope", "d_rope"), widths, strict=True))
    named["rope"] = "shared" if widths[1] else "none"
    plan = openmla.plan(loss_of(replace(DENSE, **named)), chip)
    assert (plan.backend, plan.kernel_name, plan.word) == ("portable", "index_loss", "portable")
    assert plan.config.smem_used <= target_by_name(chip).smem_per_block
    assert "BM = " in plan.explain()


def test_the_workspace_is_bounded() -> None:
    for tokens in (4096, 131072):
        plan = openmla.plan(loss_of(replace(DENSE, total_q=tokens, total_k=tokens)), "h200")
        rows = plan.variant.tiles * plan.config.BM
        assert 2 * 4 * rows * plan.config.columns(tokens) <= SCORE_CAP
    assert plan.variant.tiles < plan.config.tiles(plan.problem)  # several launches of each pass
    for nothing in ({"total_q": 0}, {"total_k": 0}):
        assert openmla.plan(loss_of(replace(DENSE, **nothing)), "h200").variant.tiles == 0


@pytest.mark.parametrize(
    ("changed", "chip", "reason"),
    [
        ({"q_dtype": "fp16", "kv_dtype": "fp16", "v_dtype": "fp16"}, "h200", "q_dtype fp16"),
        ({"d_nope": 512}, "h200", "d_nope 512: 1 to 256 are served"),
        ({"has_k_start": True}, "a100", "has_k_start True: not served"),
        ({}, "t4", "sm_75: Triton's products of bf16 and fp16 need sm_80"),
    ],
)
def test_what_is_not_declared_is_refused(changed: dict[str, Any], chip: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        openmla.plan(loss_of(replace(DENSE, **changed)), chip)


def test_wide_index_heads_are_refused() -> None:
    with pytest.raises(Unsupported, match="index_dim 512: 1 to 256 are served"):
        openmla.plan(loss_of(width=512), "h200")
