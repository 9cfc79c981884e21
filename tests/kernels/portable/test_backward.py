"""The portable backward kernels: right in Triton's interpreter, and compiled for their chips."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import openmla
from kernels.portable.interpreting import Interpreting
from openmla.backward.problem import BackwardProblem
from openmla.errors import Unsupported
from openmla.kernels.portable.backward import jobs
from openmla.kernels.portable.backward.plan import COMPILED
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import TARGETS
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
    chip = job.name.rsplit(" on ", 1)[1]
    assert report.shared is not None and report.shared <= TARGETS[chip].smem_per_block


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    assert {TARGETS[listed.chip].arch for listed in jobs.JOBS} == set(COMPILED)
    for chip in jobs.CHIPS:
        names = {job.call.kernel.__name__ for job in JOBS if f" on {chip}" in job.name}
        sums = {"rope_sum_kernel", "sink_sum_kernel"}
        assert names == {"query_pass_kernel", "key_pass_kernel", *sums}


@pytest.mark.parametrize("chip", jobs.CHIPS)
def test_it_is_planned_where_it_is_compiled(chip: str) -> None:
    plan = openmla.plan(BackwardProblem.of(V3), chip, "portable")
    assert plan.backend == "portable" and plan.config.supported()
    assert "BM = " in plan.explain() and "backward of dense bf16" in plan.explain()


@pytest.mark.parametrize(
    ("changed", "chip", "reason"),
    [
        ({}, "b200", "backward kernels are compiled for sm_80, sm_90, gfx950 alone"),
        ({}, "sm_86:84x101376", "backward kernels are compiled for"),
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
