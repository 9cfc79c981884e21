"""The portable backward kernels: right in Triton's interpreter, and compiled for their chips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import openmla
from kernels.portable.interpreting import Interpreting
from openmla.backward.problem import BackwardProblem
from openmla.errors import Unsupported
from openmla.kernels.portable.backward import jobs
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import target_by_name
from openmla.problem import Problem

JOBS = [job for listed in jobs.JOBS for job in jobs_of(listed)]
V3 = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "first", "number"),
    [
        # More of them: TRITON_INTERPRET=1 python …/interpreted_backward.py fuzz 0 100
        ("fuzz", 100, 6),
        pytest.param("fuzz", 100, 12, marks=pytest.mark.long),
        ("poison", 200, 1),
        pytest.param("poison", 200, 4, marks=pytest.mark.long),
        ("neighbors", 0, 4),
        ("parts", 0, 3),
        ("unseen", 0, 4),
        ("steps", 0, 3),
        ("apart", 0, 4),
    ],
)
def test_interpreted(interpreted: Interpreting, part: str, first: int, number: int) -> None:
    *problems, counts = interpreted("interpreted_backward", part, first, number)
    assert not problems
    assert counts == {"done": number, "rejected": 0}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_compiles_and_fits(job: CompileJob) -> None:
    report = compile_job(job)
    assert not report.error
    chip = target_by_name(job.name.rsplit(" on ", 1)[1])
    assert report.shared is not None and report.shared <= chip.smem_per_block


def test_every_kernel_is_compiled_for_every_kind_of_chip() -> None:
    archs = {target_by_name(listed.chip).arch for listed in jobs.JOBS}
    assert {f"sm_{n}" for n in (80, 89, 90, 100, 103, 120)} | {"gfx942", "gfx950"} == archs
    for chip in jobs.CHIPS:
        names = {job.call.kernel.__name__ for job in JOBS if f" on {chip}" in job.name}
        sums = {"rope_sum_kernel", "sink_sum_kernel"}
        assert names == {"query_pass_kernel", "key_pass_kernel", *sums}


WIDTHS = [(1, 0, 1), (128, 64, 128), (192, 64, 256), (256, 0, 256), (256, 256, 256)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("chip", (*jobs.CHIPS, "rtx3090", "mi250x"))
def test_every_chip_has_tiles_that_fit(chip: str, widths: tuple[int, int, int]) -> None:
    named: dict[str, Any] = dict(zip(("d_nope", "d_rope", "d_v"), widths, strict=True))
    named["rope"] = "shared" if widths[1] else "none"
    plan = openmla.plan(BackwardProblem.of(replace(V3, **named)), chip, "portable")
    assert plan.backend == "portable" and plan.config.supported()
    assert plan.config.smem_used <= target_by_name(chip).smem_per_block
    assert "BM = " in plan.explain() and "backward of dense bf16" in plan.explain()


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("chip", [c for c in jobs.CHIPS if c != "h200"])
def test_the_plan_takes_no_less_shared_memory_than_the_compiler(chip: str) -> None:
    """Hopper's asynchronous products have copies that are not estimated; its tiles ran on one."""
    listed = next(one for one in jobs.JOBS if one.chip == chip)
    for name, problem in listed.problems.items():
        planned = openmla.plan(problem, chip, "portable").config.smem_used
        alone = replace(listed, problems={name: problem})
        shared = [compile_job(job).shared for job in jobs_of(alone)]
        assert 0 < max(n or 0 for n in shared) <= planned


@pytest.mark.parametrize(
    ("changed", "chip", "reason"),
    [
        ({}, "t4", "sm_75: Triton's products of bf16 and fp16 need sm_80"),
        ({}, "sm_89:58x16384", "shared memory: "),
        ({"q_dtype": "fp16", "kv_dtype": "fp16", "v_dtype": "fp16"}, "h200", "q_dtype fp16"),
        ({"d_nope": 512}, "h200", "d_nope 512: 1 to 256 are served"),
        ({"has_k_start": True}, "h200", "has_k_start True: not served"),
        ({"has_q_scale": True}, "h200", "has_q_scale True: not served"),
        ({"rope": "cache"}, "h200", "rope of a cache has no gradient"),
        ({"form": "latent", "d_nope": 512, "d_v": 512}, "h200", "latent form has no"),
    ],
)
def test_what_is_not_declared_is_refused(changed: dict[str, Any], chip: str, reason: str) -> None:
    problem = Problem(**{**V3.to_json(), **changed})
    with pytest.raises(Unsupported, match=reason):
        openmla.plan(BackwardProblem.of(problem), chip)
