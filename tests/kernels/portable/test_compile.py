"""The portable kernels compile for every kind of GPU, and their shared memory fits the chip."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from openmla.aot import store as aot_store
from openmla.aot.key import stable_key
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
    "dense, shared keys": Problem(
        form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, has_k_start=True
    ),
    "dense, key mask": Problem(
        form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, has_key_mask=True
    ),
    "latent": Problem(form="latent", heads=16, d_nope=512, d_rope=64, d_v=512, page_size=64),
    "sparse": Problem(form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=64),
    "sparse fp8": Problem(
        form="sparse", heads=16, d_nope=512, d_rope=64, d_v=512, topk=64, page_size=64,
        kv_dtype="fp8_656",
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
        k_start = cu[:1] if problem.has_k_start else None
        mask = torch.zeros(64, 4, dtype=torch.int32) if problem.has_key_mask else None
        op = DenseOperands(q, k, rope, v, cu, cu, True, weights, k_start=k_start, key_mask=mask)
        return op, results
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
    from kernels.portable.ahead import compiling_for
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


@pytest.mark.slow
@pytest.mark.compile
def test_rope_bytes_at_odd_addresses_are_multiplied_row_by_row() -> None:
    """Stored column by column, blocks of 32 keys were multiplied wrongly (Triton 3.6.0, H200)."""
    from kernels.portable.ahead import compiling_for
    from openmla.kernels.portable.launch import calls

    problem = Problem(form="dense", heads=1, d_nope=448, d_rope=64, d_v=64, rope="cache",
                      rope_dtype="fp8_656", page_size=32)  # fmt: skip
    (op, results), pool = operands_of(problem), torch.zeros(2 * 32 * 656 + 1, dtype=torch.uint8)
    pages = pool[1:].view(2, 32, 656)
    cache = replace(LatentCache.allocate(num_pages=2, page_size=32, format="fp8_656"), data=pages)
    table = torch.zeros(1, 2, dtype=torch.int32)
    op = replace(op, k_rope=None, rope_cache=cache, block_table=table)
    chosen = plan(problem, "h200", "portable")
    with compiling_for("sm_90"):
        text = next(calls(chosen, op, results)).compile().asm["ttgir"]
    assert "dense_kernel" in text and chosen.config.BN == 32
    # The layouts of both: keys lie in shared memory by rows, so the compiler transposes a view.
    lying = {name: line for line in text.splitlines() if (name := line.split(" ", 1)[0])[:1] == "#"}
    keys = re.findall(r"warp_group_dot .*memdesc<\d+x32xbf16, (#\w+)", text)
    assert len(keys) >= 4 and all("transposed = true" in lying[name] for name in keys)
