"""The portable kernels compile for every kind of GPU, and their shared memory fits the chip."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from openmla.aot import store as aot_store
from openmla.aot.ahead import compiling_for
from openmla.aot.jobs import CompileJob, build, job_key
from openmla.aot.operands import operands_of
from openmla.cache import LatentCache
from openmla.kernels.call import Call
from openmla.kernels.launch import calls
from openmla.planning import TARGETS, plan
from openmla.problem import Problem

triton = pytest.importorskip("triton")
CHIPS = ("a100", "l40s", "h200", "rtx5090", "mi300x", "mi355x")
DENSE = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64, wants_lse=True
)
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64, total_k=128)
PROBLEMS = {
    "dense": DENSE,
    "dense, shared keys": replace(DENSE, has_k_start=True),
    "dense, key mask": replace(DENSE, has_key_mask=True),
    "latent": LATENT,
    "latent, split": replace(LATENT, total_q=1, total_k=32768),
    "sparse": replace(LATENT, form="sparse", heads=128, topk=64),
    # So many rows that none is dequantized ahead.
    "sparse fp8": replace(LATENT, form="sparse", topk=64, kv_dtype="fp8_656", total_k=1 << 20),
    "sparse fp8_584": replace(
        LATENT, form="sparse", d_rope=0, rope="none", topk=64, kv_dtype="fp8_584",
        v_dtype="fp8_584", rope_dtype="fp8_584", total_k=1 << 20,
    ),
}  # fmt: skip


def shared_memory(name: str, call: Call, chip: str) -> int:
    """What the compiler takes on a chip, kept as long as the kernel stays the same."""
    job = CompileJob(f"portable {name}", call, TARGETS[chip].arch)
    key, version = job_key(job), triton.__version__
    kept = aot_store.stored(job.name, version, key)
    if kept is None:
        kept = {"shared": build(job).metadata.shared}
        aot_store.keep(job.name, version, key, kept)
    shared: int = kept["shared"]
    return shared


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiles_and_fits(name: str, chip: str) -> None:
    problem = PROBLEMS[name]
    made = calls(plan(problem, chip, "portable"), *operands_of(problem))
    for number, call in enumerate(made):
        shared = shared_memory(f"{name} on {chip}, kernel {number}", call, chip)
        assert 0 < shared <= TARGETS[chip].smem_per_block


@pytest.mark.slow
@pytest.mark.compile
def test_rope_bytes_at_odd_addresses_are_multiplied_row_by_row() -> None:
    """Stored column by column, blocks of 32 keys were multiplied wrongly (Triton 3.6.0, H200)."""
    problem = Problem(form="dense", heads=1, d_nope=448, d_rope=64, d_v=64, rope="cache",
                      rope_dtype="fp8_656", page_size=32, total_q=64, total_k=64)  # fmt: skip
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
