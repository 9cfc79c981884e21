"""Invariant calls on a GPU: however a prompt is cut, its rows have the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from gpu.on_device import DEVICE, on_gpu
from kernels.chunks import Prompt, other_bits
from openmla.errors import Unsupported
from openmla.operands import LatentOperands, Results

pytestmark = on_gpu
TOKENS = 5000
PARTS = (
    ((0, 3000), (3000, 4999), (4999, 5000)),
    ((2047, 2048), (2048, 2049), (4095, 4097), (0, 1)),
    tuple((i, i + 1) for i in range(4800, 4928)),
)


def called(op: LatentOperands, **options: Any) -> Results:
    """By the public call, with the tensors on the GPU."""
    out, lse = openmla.mla_prefill_latent(
        op.q.to(DEVICE),
        replace(op.cache, data=op.cache.data.to(DEVICE)),
        op.block_table.to(DEVICE),
        op.cache_lengths.to(DEVICE),
        cu_seqlens_q=op.cu_seqlens_q.to(DEVICE),
        scale=op.weights.scale,
        sink=None if op.weights.sink is None else op.weights.sink.to(DEVICE),
        causal=op.causal,
        return_lse=True,
        **options,
    )
    return Results(out.cpu(), lse.cpu())


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("heads", [16, 128])
def test_parts_have_the_bits_of_the_prompt(backend: str, heads: int) -> None:
    prompt = Prompt.of(TOKENS, heads, d_v=512, rope=64)
    try:
        whole = called(prompt.call((0, TOKENS), page=64), invariant=True, backend=backend)
    except Unsupported as error:
        pytest.skip(str(error))
    assert not whole.out.isnan().any()
    for parts, page in zip(PARTS, (64, 16, 64), strict=True):
        got = called(prompt.call(*parts, page=page), invariant=True, backend=backend)
        assert other_bits(whole, got, parts) == []


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("keys", [128, 512, 4096])
def test_parts_have_them_with_ranges_of_a_named_length(backend: str, keys: int) -> None:
    prompt = Prompt.of(TOKENS, 16, d_v=512, rope=64)
    options = {"range_keys": keys, "backend": backend}
    try:
        whole = called(prompt.call((0, TOKENS), page=64), **options)
    except Unsupported as error:
        pytest.skip(str(error))
    assert not whole.out.isnan().any()
    for parts in PARTS:
        assert other_bits(whole, called(prompt.call(*parts, page=64), **options), parts) == []
    usual = called(prompt.call((0, TOKENS), page=64), invariant=True, backend=backend)
    torch.testing.assert_close(whole.out.float(), usual.out.float(), atol=0.02, rtol=0.02)


def test_repeats_have_equal_bits() -> None:
    op = Prompt.of(3000, 16, d_v=512, rope=64).call((0, 3000), (2999, 3000), page=64)
    first = called(op, invariant=True)
    for _ in range(20):
        again = called(op, invariant=True)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
