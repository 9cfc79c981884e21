"""The portable kernels compile for every kind of GPU, and their shared memory fits the chip."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from openmla.aot.ahead import compiling_for
from openmla.aot.operands import operands_of
from openmla.cache import LatentCache
from openmla.kernels.launch import calls
from openmla.kernels.portable import jobs
from openmla.kernels.portable.indexer import jobs as index_jobs
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import TARGETS, plan
from openmla.problem import Problem

JOBS = [job for listed in (*jobs.JOBS, *index_jobs.JOBS) for job in jobs_of(listed)]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_compiles_and_fits(job: CompileJob) -> None:
    report = compile_job(job)
    assert not report.error
    chip = job.name.rsplit(" on ", 1)[1].split(",")[0]
    assert report.shared is not None and 0 < report.shared <= TARGETS[chip].smem_per_block


@pytest.mark.slow
@pytest.mark.compile
def test_rope_bytes_at_odd_addresses_are_multiplied_row_by_row() -> None:
    """Stored column by column, blocks of 32 keys were multiplied wrongly (Triton 3.6.0, H200)."""
    problem = Problem(
        form="dense",
        heads=1,
        d_nope=448,
        d_rope=64,
        d_v=64,
        rope="cache",
        rope_dtype="fp8_656",
        page_size=32,
        total_q=64,
        total_k=64,
    )
    (op, results), pool = operands_of(problem), torch.zeros(2 * 32 * 656 + 1, dtype=torch.uint8)
    cache = LatentCache(pool[1:].view(2, 32, 656), None, 512, 64, "fp8_656")
    op = replace(op, rope_cache=cache)
    chosen = plan(problem, "h200", "portable")
    with compiling_for("sm_90"):
        text = next(calls(chosen, op, results)).compile().asm["ttgir"]
    assert "dense_kernel" in text and chosen.config.BN == 32
    # The layouts of both: keys lie in shared memory by rows, so the compiler transposes a view.
    lying = {name: line for line in text.splitlines() if (name := line.split(" ", 1)[0])[:1] == "#"}
    keys = re.findall(r"warp_group_dot .*memdesc<\d+x32xbf16, (#\w+)", text)
    assert len(keys) >= 4 and all("transposed = true" in lying[name] for name in keys)
