"""The portable sparse backward in Triton's interpreter: the rule, bits, seeded defects."""

from __future__ import annotations

from dataclasses import replace

import pytest

import openmla
from kernels.portable.interpreting import Interpreting
from openmla import Unsupported
from openmla.backward.problem import BackwardProblem
from openmla.kernels.jobs import Jobs
from openmla.problem import Problem

pytest.importorskip("triton")

from openmla.kernels.portable.backward import jobs as backward_jobs
from openmla.kernels.portable.sparse_backward import jobs
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import target_by_name

V32 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    total_q=4096,
    total_k=8192,
    topk=2048,
    causal=False,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "first", "number"),
    [
        # More: TRITON_INTERPRET=1 python …/interpreted_sparse_backward.py fuzz 0 60
        ("fuzz", 100, 4),
        pytest.param("fuzz", 200, 16, marks=pytest.mark.long),
        ("edges", 0, 2),
        ("bits", 0, 1),
        pytest.param("bits", 1, 2, marks=pytest.mark.long),
        ("apart", 0, 4),
        ("last row", 0, 1),
        pytest.param("defects", 0, 11, marks=pytest.mark.seeded),
    ],
)
def test_interpreted(interpreted: Interpreting, part: str, first: int, number: int) -> None:
    *problems, counts = interpreted("interpreted_sparse_backward", part, first, number)
    assert not problems
    assert counts == {"done": number, "rejected": 0}


JOBS = [job for listed in jobs.JOBS for job in jobs_of(listed)]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_compiles_and_fits(job: CompileJob) -> None:
    report = compile_job(job)
    assert not report.error
    chip = target_by_name(job.name.rsplit(" on ", 1)[1])
    assert report.shared is not None and report.shared <= chip.smem_per_block


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("listed", jobs.JOBS, ids=lambda listed: listed.chip)
def test_the_plan_takes_no_less_shared_memory_than_the_compiler(listed: Jobs) -> None:
    for name, problem in listed.problems.items():
        planned = openmla.plan(problem, listed.chip, "portable").config.smem_used
        alone = replace(listed, problems={name: problem})
        shared = [compile_job(job).shared for job in jobs_of(alone)]
        assert 0 < max(n or 0 for n in shared) <= planned


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("chip", (*backward_jobs.CHIPS, "rtx3090", "mi250x"))
def test_every_chip_has_tiles_that_fit(chip: str, heads: int) -> None:
    plan = openmla.plan(BackwardProblem.of(replace(V32, heads=heads)), chip, backend="portable")
    assert plan.config.smem_used <= target_by_name(chip).smem_per_block
    assert (plan.backend, plan.kernel_name) == ("portable", "sparse_backward")
    # 2048 entries of 576 columns in fp32 are 4.5 MiB of a query.
    assert plan.variant.tokens == 113
    assert "BM = " in plan.explain()


def test_others_refuse() -> None:
    for chip, why in (("v100", "need sm_80"), ("sm_89:58x16384", "shared memory: ")):
        with pytest.raises(Unsupported, match=why):
            openmla.plan(BackwardProblem.of(V32), chip, "portable")
