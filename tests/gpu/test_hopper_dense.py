"""The dense kernel on a Hopper GPU: right, repeatable, alone or in a batch, near and far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from gpu.on_device import (
    DEVICE,
    attend,
    different,
    drawn_problems,
    normal,
    offsets,
    on,
    on_hopper,
    problems,
)
from kernels.shared_keys import with_shared_keys
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences
from openmla.operands import DenseOperands

pytestmark = on_hopper

V3 = Case("dense", 1, 128, 64, 128)
PAGES: dict[str, Any] = {"rope": "cache", "kv": "bf16"}
# What is compiled in, with the number of query tiles; one kernel each.
PROFILES: dict[str, tuple[Case, int]] = {
    "V3": (V3, 2),
    "V3 without lse": (replace(V3, return_lse=False), 1),
    "V3 full fp16 sink": (replace(V3, causal=False, dtype="fp16", sink="mixed"), 2),
    "V3 rope per head": (replace(V3, rope="per_head", scale=-0.1), 2),
    "V3 pages of 64": (replace(V3, **PAGES, page_size=64, sink="normal"), 2),
    "V3 pages of 16": (replace(V3, **PAGES, page_size=16), 1),
    "V3 pages of 256": (replace(V3, **PAGES, page_size=256), 2),
    "V3 window": (replace(V3, window=65), 2),
    "V3 fp16 window sink": (replace(V3, window=128, dtype="fp16", sink="mixed"), 1),
    "192+64-256 window": (Case("dense", 1, 192, 64, 256, window=100), 2),
    **{
        f"{nope}+{rope}-{v}": (Case("dense", 1, nope, rope, v), 2)
        for nope, rope, v in ((192, 64, 256), (64, 64, 128), (64, 32, 64))
    },
    **{
        f"{nope}+{rope}-{v} full pages": (
            Case("dense", 1, nope, rope, v, **PAGES, page_size=48, causal=False, sink="normal"),
            1,
        )
        for nope, rope, v in ((192, 64, 256), (64, 64, 128), (64, 32, 64))
    },
    **{
        f"{width}+0-{width}": (Case("dense", 1, width, 0, width, rope="none"), 2)
        for width in (128, 256)
    },
    **{
        f"{width}+0-{width} full fp16": (
            Case("dense", 1, width, 0, width, rope="none", dtype="fp16", causal=False),
            1,
        )
        for width in (128, 256)
    },
}
# Lengths at the edges of tiles, any head count, every kind of numbers, fewer keys than queries.
BATCHES: tuple[dict[str, Any], ...] = (
    {"heads": 3, "q_lens": (129, 0, 300), "k_lens": (129, 5, 301), "spare": 7},
    {"heads": 1, "q_lens": (1, 64, 65), "k_lens": (513, 64, 65), "values": "peaky"},
    {"heads": 8, "q_lens": (257,), "k_lens": (557,), "values": "rising", "spare": 1},
    {"heads": 5, "q_lens": (63, 127, 2), "k_lens": (63, 191, 1), "values": "large", "seed": 1},
    {"heads": 2, "q_lens": (256, 128), "k_lens": (128, 640), "seed": 2},
)
# Short chunks on long contexts: computed in ranges of keys, which are merged.
SPLIT = replace(V3, heads=2, q_lens=(64,), k_lens=(9000,))
SPLITS = [
    SPLIT,
    replace(SPLIT, heads=1, q_lens=(1,), k_lens=(16384,)),
    replace(SPLIT, q_lens=(200, 64, 300), k_lens=(8200, 300, 300), spare=3),
    replace(SPLIT, heads=8, q_lens=(512,), k_lens=(4096,)),
    replace(SPLIT, q_lens=(130,), k_lens=(5000,), causal=False, dtype="fp16", sink="normal"),
    replace(SPLIT, q_lens=(33,), k_lens=(6000,), rope="cache", kv="bf16", page_size=64),
    replace(SPLIT, d_nope=192, d_v=256, k_lens=(4700,)),
    replace(SPLIT, d_nope=64, d_rope=32, d_v=64, k_lens=(4200,), values="rising"),
]

SHARED = ["V3", "V3 full fp16 sink", "V3 rope per head", "V3 pages of 64", "192+64-256", "64+32-64"]


@pytest.mark.parametrize("name", PROFILES)
def test_right_repeatable_and_deaf_to_poison(name: str):
    case, num_qo = PROFILES[name]
    found = [
        problem
        for batch in BATCHES
        for problem in problems(replace(case, **batch), "hopper", lambda c: c.with_num_qo(num_qo))
    ]
    assert found == []


@pytest.mark.parametrize("name", PROFILES)
def test_one_block_of_keys_gives_the_bits_of_the_general_kernel(name: str):
    """Which runs where there is another request."""
    for heads, q_len, k_len, spare in ((128, 128, 128, 0), (3, 70, 50, 7), (2, 1, 50, 0)):
        if k_len > 64 and PROFILES[name][0].d_v > 128:
            continue  # two blocks
        case = replace(
            PROFILES[name][0], heads=heads, q_lens=(q_len,), k_lens=(k_len,), spare=spare
        )
        assert problems(case, "hopper") == []
        built = on(case)
        op, alone = built.operands, attend(built, "hopper")
        assert isinstance(op, DenseOperands)
        cu_q, cu_k = (torch.cat([x, x[-1:]]) for x in (op.cu_seqlens_q, op.cu_seqlens_k))
        table = op.block_table if op.block_table is None else op.block_table.repeat(2, 1)
        pair = replace(op, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, block_table=table)
        together = attend(replace(built, operands=pair), "hopper")
        assert differences(together, alone) == []


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_split_requests(case: Case):
    assert problems(case, "hopper") == []


@pytest.mark.parametrize("case", SPLITS[:3], ids=str)
def test_split_requests_in_two_query_tiles(case: Case):
    assert problems(case, "hopper", lambda config: config.with_num_qo(2)) == []


@pytest.mark.parametrize("name", SHARED)
def test_requests_that_share_keys(name: str):
    """Keys that begin anywhere in those of the batch."""
    case, num_qo = PROFILES[name]
    for seed, batch in enumerate(BATCHES):
        here = replace(case, **batch)
        shared = [with_shared_keys(on(here, around), seed) for around in ("zero", "nan")]
        on_cpu = with_shared_keys(build(here), seed)  # where the truth is
        for tiles in {1, num_qo}:
            first, second = (
                attend(built, "hopper", lambda c, n=tiles: c.with_num_qo(n)) for built in shared
            )
            assert [*judge(on_cpu, first).problems, *differences(second, first)] == []


@pytest.mark.parametrize("causal", [True, False])
def test_split_requests_that_share_keys(causal: bool):
    """Three requests, each over all keys, and each cut into ranges of its own."""
    case = replace(SPLIT, q_lens=(20, 1, 33), k_lens=(4500, 300, 2), causal=causal)
    built, on_cpu = (with_shared_keys(x, seed=1, all_keys=True) for x in (on(case), build(case)))
    assert judge(on_cpu, attend(built, "hopper")).problems == ()
    assert different(lambda: built.run("hopper").out, 20) == 0


def test_shared_keys_change_no_bit():
    """Two parts of a prompt over one set of keys, against the same parts over copies of theirs."""
    q, k, rope, v = (
        normal(600, 8, 192),
        normal(2000, 8, 128),
        normal(2000, 64),
        normal(2000, 8, 128),
    )
    parts: dict[str, Any] = {"cu_seqlens_q": offsets(300, 300), "return_lse": True}
    starts = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.cat([torch.arange(700), torch.arange(2000)]).to(DEVICE)
    for _ in range(3):  # as a first call, as the first of its kind that is kept, from there
        shared = openmla.mla_prefill(
            q, k, rope, v, cu_seqlens_k=offsets(700, 2000), k_start=starts, **parts
        )
        copied = openmla.mla_prefill(
            q, k[rows], rope[rows], v[rows], cu_seqlens_k=offsets(700, 2000), **parts
        )
        assert shared[0].equal(copied[0]) and shared[1].equal(copied[1])


@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_one_and_two_query_tiles_give_the_same_bits(batch: int):
    built = on(replace(V3, **BATCHES[batch]))
    one, two = (attend(built, "hopper", lambda c, n=n: c.with_num_qo(n)) for n in (1, 2))
    assert differences(two, one) == []


@pytest.mark.parametrize("name", ["V3", "V3 full fp16 sink", "V3 pages of 64", "64+32-64"])
@pytest.mark.parametrize("layout", ["values", "aligned"])
def test_rows_with_gaps_give_the_same_bits(name: str, layout: str):
    """V alone as a view of a projection's output, or every tensor and out with gaps."""
    for batch in BATCHES:
        case = replace(PROFILES[name][0], **batch)
        out = "aligned" if layout == "aligned" else "fresh"
        gapped = attend(on(replace(case, layout=layout, out=out), "nan"), "hopper")
        assert differences(gapped, attend(on(case), "hopper")) == []


def test_drawn_cases():
    plain = {"layout": "aligned", "q_scale": False, "k_scale": False, "out": "aligned"}
    v3 = {"d_nope": 128, "d_rope": 64, "d_v": 128, "rope": "shared", "kv": "plain"}
    assert drawn_problems("dense", "hopper", 24, **v3, **plain) == []


@pytest.mark.parametrize(
    "case",
    [
        replace(V3, heads=16, q_lens=(512,) * 3, k_lens=(512,) * 3),
        replace(V3, heads=4, q_lens=(64,), k_lens=(16384,)),
        replace(V3, heads=8, q_lens=(1000,), k_lens=(1000,)),
    ],
    ids=str,
)
def test_a_thousand_launches_give_the_same_bits(case: Case):
    built = on(case)
    assert different(lambda: built.run("hopper").out, 1000) == 0


def test_a_request_alone_has_the_bits_it_has_in_a_batch():
    lens_q, lens_k = [64, 300, 1, 700, 128, 40], [9000, 300, 513, 1400, 128, 5000]
    q, v = normal(sum(lens_q), 8, 192), normal(sum(lens_k), 8, 128)
    k, rope = normal(sum(lens_k), 8, 128), normal(sum(lens_k), 64)
    options: dict[str, Any] = {"return_lse": True, "backend": "hopper"}
    whole, lse = openmla.mla_prefill(
        q, k, rope, v, cu_seqlens_q=offsets(*lens_q), cu_seqlens_k=offsets(*lens_k), **options
    )
    parts = zip(torch.split(q, lens_q), whole.split(lens_q), lse.split(lens_q), strict=True)
    keys = zip(k.split(lens_k), rope.split(lens_k), v.split(lens_k), strict=True)
    for (one, want, want_lse), (k_one, rope_one, v_one) in zip(parts, keys, strict=True):
        out, own = openmla.mla_prefill(
            one,
            k_one,
            rope_one,
            v_one,
            cu_seqlens_q=offsets(len(one)),
            cu_seqlens_k=offsets(len(k_one)),
            **options,
        )
        assert torch.equal(out, want) and torch.equal(own, want_lse), len(one)


def test_more_than_2_to_the_31_elements():
    """The last request has the bits it has alone; and so with the heads of V far apart."""
    heads, length, count = 128, 1025, 129
    tokens, last = length * count, slice(length * (count - 1), length * count)
    q, k, v = (normal(tokens, heads, width) for width in (192, 128, 128))
    rope, cu = normal(tokens, 64), offsets(*[length] * count)
    options: dict[str, Any] = {"return_lse": True, "backend": "hopper"}
    out, lse = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, **options)
    assert min(x.numel() for x in (q, k, v, out)) > 2**31
    alone = [x[last].clone() for x in (q, k, rope, v)]
    own, own_lse = openmla.mla_prefill(*alone, cu_seqlens_q=cu[:2], **options)
    assert torch.equal(own, out[last]) and torch.equal(own_lse, lse[last])
    apart = v.transpose(0, 1).contiguous().transpose(0, 1)
    again = openmla.mla_prefill(q, k, rope, apart, cu_seqlens_q=cu, backend="hopper")
    assert torch.equal(again, out)
