"""The portable kernels compile for every kind of GPU, and their shared memory fits the chip."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch

from openmla import aot_store
from openmla.aot_key import stable_key
from openmla.cache import LatentCache
from openmla.kernels.call import Call
from openmla.operands import (
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.planning import TARGETS, plan
from openmla.problem import Problem

triton = pytest.importorskip("triton")
CHIPS = ("a100", "l40s", "h200", "rtx5090", "mi300x", "mi355x")
PROBLEMS = {
    "dense": Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128),
    "latent": Problem(form="latent", heads=16, d_nope=512, d_rope=64, d_v=512, page_size=64),
    "sparse": Problem(form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=64),
    "sparse fp8": Problem(
        form="sparse", heads=16, d_nope=512, d_rope=64, d_v=512, topk=64, page_size=64,
        kv_dtype="fp8_656", v_dtype="fp8_656", rope_dtype="fp8_656",
    ),
}  # fmt: skip


def operands_of(problem: Problem) -> tuple[Operands, Results]:
    """Small CPU tensors that compile the kernels of a problem."""
    bf16, heads = torch.bfloat16, problem.heads
    q = torch.zeros(64, heads, problem.d_qk, dtype=bf16)
    out = torch.zeros(64, heads, problem.d_v, dtype=bf16)
    results, weights = Results(out, torch.zeros(64, heads)), Weights(0.1)
    cu = torch.tensor([0, 64], dtype=torch.int32)
    if problem.form == "dense":
        k, v = (torch.zeros(64, heads, n, dtype=bf16) for n in (problem.d_nope, problem.d_v))
        rope = torch.zeros(64, problem.d_rope, dtype=bf16)
        return DenseOperands(q, k, rope, v, cu, cu, True, weights), results
    cache = LatentCache.allocate(
        num_pages=2, page_size=64, latent=problem.d_nope, rope=problem.d_rope,
        format=problem.kv_dtype,
    )  # fmt: skip
    if problem.form == "latent":
        table, lengths = torch.zeros(1, 2, dtype=torch.int32), cu[1:]
        return LatentOperands(q, cache, table, lengths, cu, True, problem.d_v, weights), results
    indices = torch.zeros(64, problem.topk, dtype=torch.int32)
    return SparseOperands(q, cache, indices, None, problem.d_v, weights), results


def compiled(name: str, chip: str) -> Iterator[int]:
    """Shared memory of every kernel that a launch would run there."""
    problem = PROBLEMS[name]
    from openmla.kernels.portable.ahead import compiling_for
    from openmla.kernels.portable.launch import calls

    chosen = plan(problem, chip, "portable")
    with compiling_for(TARGETS[chip].arch):
        for number, call in enumerate(calls(chosen, *operands_of(problem))):
            label, key = label_of(name, chip, number), call_key(call, chip)
            kept = aot_store.stored(label, triton.__version__, key)
            if kept is None:
                kept = {"shared": call.compile().metadata.shared}
                aot_store.keep(label, triton.__version__, key, kept)
            yield kept["shared"]


def label_of(name: str, chip: str, number: int) -> str:
    """The name of a report: the first kernel of a launch is number 0."""
    return f"portable {name} on {chip}, kernel {number}"


def call_key(call: Call, chip: str) -> str:
    """Changes with the kernel's source, its arguments' types and values, the chip and Triton."""
    arguments = {
        name: str(value.dtype) if isinstance(value, torch.Tensor) else _text(value)
        for name, value in call.arguments.items()
    }
    parts = [triton.__version__, stable_key(call.kernel), TARGETS[chip].arch, str(arguments)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _text(value: object) -> str:
    block = getattr(value, "block_shape", None)  # a tensor descriptor
    return str(value) if block is None else f"descriptor {block}"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiles_and_fits(name: str, chip: str) -> None:
    for shared in compiled(name, chip):
        assert 0 < shared <= TARGETS[chip].smem_per_block
