"""`mla_prefill_latent(invariant=True)` on the CPU: bits of a row are the row's own.

The kernels of other families are asked the same in tests/kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from kernels.chunks import Prompt, other_bits
from openmla import InvalidArgument, Problem, Unsupported, plan
from openmla.lab.testing.case import Case
from openmla.lab.testing.checker import Checker
from openmla.operands import LatentOperands, Results

PROMPT = Prompt.of(tokens=600, heads=3, d_v=64, rope=16)
LATENT = Problem(
    form="latent",
    heads=16,
    d_nope=512,
    d_rope=64,
    d_v=512,
    page_size=64,
    total_q=8,
    total_k=65536,
    invariant=True,
)


def called(op: LatentOperands, **options: Any) -> Results:
    """By the public call."""
    out, lse = openmla.mla_prefill_latent(
        *(op.q, op.cache, op.block_table, op.cache_lengths),
        cu_seqlens_q=op.cu_seqlens_q,
        scale=op.weights.scale,
        sink=op.weights.sink,
        causal=op.causal,
        return_lse=True,
        **options,
    )
    return Results(out, lse)


@pytest.fixture(scope="module")
def whole() -> Results:
    return called(PROMPT.call((0, 600)), invariant=True)


PARTS = {
    "chunks": ((0, 200), (200, 390), (390, 600)),
    "cached prefix": ((590, 600), (512, 520)),
    "decode steps": ((0, 1), (511, 512), (512, 513), (599, 600)),
    "neighbors": ((599, 600), *((i, i + 1) for i in range(0, 128)), (300, 350)),
}


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_bits_of_the_prompt(whole: Results, name: str, page: int) -> None:
    parts = PARTS[name]
    assert other_bits(whole, called(PROMPT.call(*parts, page=page), invariant=True), parts) == []


@pytest.mark.parametrize("name", PARTS)
def test_so_they_have_with_ranges_of_a_length_of_their_own(whole: Results, name: str) -> None:
    """`range_keys` alone makes a call invariant. The CPU's blocks are as long as before."""
    parts = PARTS[name]
    for options in ({"range_keys": 256}, {"range_keys": 256, "invariant": True}):
        assert other_bits(whole, called(PROMPT.call(*parts), **options), parts) == []


def test_without_the_switch_they_have_others(whole: Results) -> None:
    parts = PARTS["decode steps"]
    plain = called(PROMPT.call((0, 600)))
    assert other_bits(plain, called(PROMPT.call(*parts)), parts)


def test_nan_in_a_key_shows_in_rows_that_see_it_alone() -> None:
    op = PROMPT.call((0, 600))
    page = op.block_table[0, 550 // 16]
    op.cache.data[page, 550 % 16, 3] = torch.nan
    clean = called(PROMPT.call((0, 600)), invariant=True)
    got = called(op, invariant=True)
    assert torch.equal(got.out[:550], clean.out[:550]) and got.out[550:].isnan().any(-1).all()


def test_fewer_tokens_have_as_many_keys_fewer() -> None:
    """`of_tokens` is a chunk: a request past it has no token, one before it none either."""
    op = PROMPT.call((0, 40), (10, 20), (580, 600))
    part = op.of_tokens(slice(30, 55))
    assert part.cu_seqlens_q.tolist() == [0, 10, 20, 25]
    assert part.cache_lengths.tolist() == [40, 20, 585]
    full = replace(op, causal=False).of_tokens(slice(30, 55))
    assert full.cache_lengths.tolist() == [40, 20, 600]


@pytest.mark.parametrize("range_keys", [0, 128])
@pytest.mark.parametrize("seed", range(6))
def test_the_rule_accepts_it(seed: int, range_keys: int) -> None:
    case = Case(
        "latent",
        5,
        32,
        16,
        32,
        q_lens=(3, 0, 9),
        k_lens=(530, 4, 5),
        kv=("bf16", "plain")[seed % 2],
        causal=seed % 3 > 0,
        q_scale=seed % 2 > 0,
        k_scale=seed > 3,
        sink="mixed",
        spare=2,
        scale=0.2,
        invariant=not range_keys,
        range_keys=range_keys,
        seed=seed,
    )
    assert not Checker().result(case, True).kind


def test_who_serves_it() -> None:
    assert plan(LATENT, "h200").backend == "hopper"
    assert plan(LATENT, "cpu").backend == "cpu"
    for target in ("a100", "b200", "mi355x"):
        assert plan(LATENT, target).backend == "portable"
    with pytest.raises(Unsupported, match="invariant True"):
        plan(LATENT, "b200", backend="blackwell")
    assert "invariant, ranges of 2048 keys" in plan(LATENT, "h200").explain()
    short = replace(LATENT, range_keys=512)
    for target in ("h200", "a100", "b200", "mi355x"):
        assert plan(short, target).backend == plan(LATENT, target).backend
        assert "invariant, ranges of 512 keys" in plan(short, target).explain()
    assert plan(short, "cpu").backend == "cpu"
    with pytest.raises(Unsupported, match="invariant True"):
        plan(short, "mi355x", backend="cdna4")


def test_one_plan_whatever_the_queries() -> None:
    """Tiles and the way rows are read do not follow from how many queries there are."""
    for target in ("cpu", "a100", "h200", "mi355x"):
        for kv in ("bf16", "fp8_656"):
            one = replace(LATENT, kv_dtype=kv, total_q=1)
            many = replace(one, total_q=4096, total_k=1 << 22, table_keys=1 << 17)
            a, b = plan(one, target).config, plan(many, target).config
            if target == "h200":  # both ways give the same bits
                a, b = (replace(x, cache_read=a.cache_read) for x in (a, b))
            if target in ("a100", "mi355x"):
                assert a.cache_read.mode == b.cache_read.mode
                a, b = (replace(x, cache_read=a.cache_read) for x in (a, b))
            assert a == b


def test_other_forms_have_no_such_switch() -> None:
    with pytest.raises(InvalidArgument, match="invariant"):
        Problem(form="dense", heads=1, d_nope=16, d_rope=0, d_v=16, invariant=True)
    with pytest.raises(InvalidArgument, match="invariant"):
        called(PROMPT.call((0, 4)), invariant=1)
