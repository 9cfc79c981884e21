"""Offsets, lengths, tables and lists that hold anything, on a GPU: nothing beside the tensors is
touched, launches end, and calls after them are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from gpu.on_device import DEVICE, IS_HOPPER, attend, on, on_gpu
from indexer import cases
from indexer.on_device import on_gpu as moved
from kernels.shared_keys import with_shared_keys
from kernels.wild_values import KINDS, make_wild, with_wild_values
from openmla import Unsupported
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory.margin import MarginMemory
from openmla.lab.testing.memory.poison import differences

pytestmark = on_gpu
SEEDS = range(6)
DENSE = Case("dense", 16, 128, 64, 128, q_lens=(200, 56), k_lens=(300, 100), spare=2, out="given")
LATENT = Case(
    "latent",
    16,
    512,
    64,
    512,
    q_lens=(40, 24),
    k_lens=(400, 200),
    scale=0.05,
    kv="bf16",
    page_size=64,
    spare=2,
    out="given",
)
SPARSE = Case(
    "sparse",
    64,
    512,
    64,
    512,
    q_lens=(50,),
    k_lens=(900,),
    topk=130,
    scale=0.05,
    out="given",
    topk_lengths="ragged",
)
FP8 = {"dtype": "e4m3", "q_scale": True, "k_scale": True}
CASES: dict[str, Case] = {
    "dense": DENSE,
    "dense, one block": replace(DENSE, q_lens=(70,), k_lens=(70,)),
    "dense, many requests": replace(DENSE, q_lens=(3,) * 70, k_lens=(9,) * 70),
    "dense, split": replace(DENSE, heads=4, q_lens=(40, 24), k_lens=(7000, 9000)),
    "dense, pages": replace(DENSE, rope="cache", kv="bf16", page_size=64),
    "dense, fp8 pages": replace(DENSE, rope="cache", kv="fp8_block32", page_size=64),
    "dense, mask": replace(DENSE, key_mask="half"),
    "dense, fp8": replace(DENSE, side_dtype="bf16", rope_dtype="e4m3", **FP8),
    "dense, fp8 values": replace(DENSE, **FP8),
    "latent": LATENT,
    "latent, small pages": replace(LATENT, page_size=16),
    "latent, split": replace(LATENT, heads=4, q_lens=(3, 1), k_lens=(6000, 9000)),
    "latent, fp8": replace(LATENT, kv="fp8_656"),
    "latent, fp8 queries": replace(LATENT, kv="fp8_token", dtype="e4m3", q_scale=True),
    "sparse": replace(SPARSE, return_max_logits=True),
    "sparse, pages": replace(SPARSE, kv="bf16", page_size=64),
    "sparse, fp8": replace(SPARSE, kv="fp8_656", page_size=64),
    "sparse, few": replace(SPARSE, q_lens=(2,), topk=600),
    "sparse, few, fp8": replace(SPARSE, q_lens=(2,), topk=600, kv="fp8_656", page_size=64),
    "sparse, fp8 queries": replace(SPARSE, **FP8),
}
BACKENDS = ("hopper", "portable") if IS_HOPPER else ("portable",)


def problems_of(case: Case, backend: str, kind: str) -> Iterator[str]:
    """What was written between tensors, or into inputs."""
    for seed in SEEDS:
        memory = MarginMemory(DEVICE)
        built = build(case, memory=memory)
        if case.form == "dense" and case.rope != "cache" and seed % 3 == 2:
            built = with_shared_keys(built, seed)
        with_wild_values(built, kind, seed)
        inputs = [buffer.clone() for buffer in memory.buffers]
        attend(built, backend)
        torch.cuda.synchronize()
        changed = [
            n
            for n, (a, b) in enumerate(zip(inputs, memory.buffers, strict=False))
            if not torch.equal(a, b)
        ]
        yield from (f"seed {seed}: {problem}" for problem in memory.written())
        yield from (f"seed {seed}: input {n} was written" for n in changed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_nothing_beside_the_tensors_is_written(name: str, backend: str, kind: str) -> None:
    case = CASES[name]
    try:
        before = attend(on(case), backend)
    except Unsupported:
        pytest.skip(f"{backend} does not serve it")
    assert list(problems_of(case, backend, kind)) == []
    # No counter is left, and no workspace is remembered.
    assert differences(attend(on(case), backend), before) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nor_by_the_indexer(backend: str, kind: str) -> None:
    case = cases.paged([20, 9], [4000, 1700], heads=64, page_size=64)
    arguments: tuple[Any, ...] = (*moved((case.q, case.keys, case.weights)), 512)
    options = moved(case.options) | {"backend": backend}
    right = openmla.index_topk(*arguments, **options)
    for seed in SEEDS:
        rng, memory = random.Random(f"{kind} {seed}"), MarginMemory(DEVICE)
        wild = {name: memory.of(x) for name, x in moved(case.options).items()}
        for x in wild.values():
            make_wild(x, kind, rng)
        out = memory.new((29, 512), torch.int32)
        openmla.index_topk(*arguments, **wild, backend=backend, out=out)
        torch.cuda.synchronize()
        assert memory.written() == []
    assert torch.equal(openmla.index_topk(*arguments, **options), right)
