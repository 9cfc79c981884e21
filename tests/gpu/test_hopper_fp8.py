"""The latent kernels over FP8 rows. bf16 queries: listed rows are dequantized in the kernel or a
workspace, same bits. FP8 queries: listed rows and pages, as they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu.on_device import DEVICE, attend, different, on, on_hopper, problems
from openmla import LatentCache
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory.poison import differences
from openmla.operands import SparseOperands
from openmla.planning import dequantize

pytestmark = on_hopper

MODES = ("in_kernel", "named", "whole")
BASE = Case(
    "sparse",
    20,
    512,
    64,
    512,
    q_lens=(70,),
    k_lens=(3000,),
    topk=389,
    scale=0.05,
    spare=3,
    kv="fp8_656",
    page_size=64,
    index_kind="mixed",
)
# What is compiled in; one kernel each way.
FORMATS: dict[str, Case] = {
    **{kv: replace(BASE, kv=kv) for kv in ("fp8_656", "fp8_block32", "fp8_block64")},
    **{kv: replace(BASE, kv=kv) for kv in ("fp8_block128", "fp8_token")},
    "512+0": replace(BASE, kv="fp8_block64", d_rope=0, rope="none"),
    "fp8_528_v32": replace(BASE, kv="fp8_528_v32", d_rope=0, rope="none"),
    "256+64": replace(BASE, kv="fp8_block128", d_nope=256, d_v=256),
    "256+32": replace(BASE, kv="fp8_block32", d_nope=256, d_rope=32, d_v=256),
    "128+32": replace(BASE, kv="fp8_token", d_nope=128, d_rope=32, d_v=128),
}
BATCHES: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 128, "topk": 1001, "values": "peaky", "q_lens": (8,)},
    {"heads": 1, "topk": 1, "index_kind": "distinct"},
    {"heads": 96, "topk": 64, "index_kind": "invalid"},
    {"heads": 65, "topk": 700, "q_lens": (20,), "seed": 1},
)

Q8 = replace(BASE, kv="plain", dtype="e4m3", q_scale=True)
Q8_PAGES = replace(
    Q8,
    form="latent",
    topk=0,
    kv="fp8_token",
    q_lens=(3, 0, 70),
    k_lens=(900, 3, 70),
    spare=2,
    sink="normal",
)
FP8_QUERIES: dict[str, tuple[Case, ...]] = {
    "e4m3": tuple(replace(Q8, q_scale=False, **batch) for batch in BATCHES),
    "e4m3 scales": tuple(replace(Q8, k_scale=True, **batch) for batch in BATCHES),
    "512+0": tuple(replace(Q8, d_rope=0, rope="none", **batch) for batch in BATCHES),
    "lengths, sink, max logits": (
        replace(Q8, topk_lengths="wild", sink="mixed", return_max_logits=True, scale=-0.05),
        replace(Q8, topk_lengths="ragged", heads=128, q_lens=(300,), values="rising"),
    ),
    "fp8_token": tuple(replace(Q8, kv="fp8_token", **batch) for batch in BATCHES),
    "pages": tuple(
        replace(Q8_PAGES, causal=causal, heads=heads)
        for causal, heads in ((True, 20), (False, 128), (True, 5))
    ),
}


def attend_by(built: BuiltCase, mode: str) -> Outcome:
    """With FP8 rows dequantized in one way."""
    op = built.operands
    assert isinstance(op, SparseOperands)
    return attend(
        built, "hopper", lambda c: replace(c, cache_read=c.cache_read.by(mode, op.rows, op.rows))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_right_repeatable_and_deaf_to_poison(name: str):
    cases = [replace(FORMATS[name], **batch) for batch in BATCHES]
    assert [p for case in cases for p in problems(case, "hopper")] == []


@pytest.mark.parametrize("name", FP8_QUERIES)
def test_fp8_queries_are_right_repeatable_and_deaf_to_poison(name: str):
    assert [p for case in FP8_QUERIES[name] for p in problems(case, "hopper")] == []


def test_a_thousand_launches_with_fp8_queries_give_the_same_bits():
    built = on(replace(Q8, heads=128, q_lens=(300,), k_lens=(4096,), topk=400))
    assert different(lambda: attend(built, "hopper").out, 1000) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_all_ways_give_the_same_bits(name: str):
    for batch in BATCHES:
        case = replace(FORMATS[name], **batch)
        want = attend_by(on(case), "in_kernel")
        for mode in MODES:
            assert differences(attend_by(on(case, "nan"), mode), want) == [], (mode, case)


@pytest.mark.parametrize("name", ["fp8_656", "fp8_block64", "256+32"])
@pytest.mark.parametrize("rows", [40, 2500])
def test_a_workspace_that_is_too_small_is_not_used(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    built = on(FORMATS[name])
    want = attend_by(built, "in_kernel")
    monkeypatch.setattr(dequantize, "LISTED_CAP", rows * 2 * built.operands.q.shape[2])
    assert differences(attend_by(built, "named"), want) == []


def test_a_thousand_launches_of_every_way_give_the_same_bits():
    built = on(replace(BASE, heads=64, q_lens=(300,), k_lens=(4096,), topk=400))
    want = attend_by(built, "in_kernel")
    for mode in MODES:
        assert different(lambda mode=mode: attend_by(built, mode).out, 1000) == 0
        assert differences(attend_by(built, mode), want) == []


def test_a_pool_of_more_than_2_to_the_31_bytes():
    """Lists that name rows anywhere in it: the bits of the same rows, gathered into bf16."""
    cache = LatentCache.allocate(num_pages=60_000, page_size=64, format="fp8_656", device=DEVICE)
    assert cache.data.numel() > 2**31
    cache.data.fill_(255)  # rows that nobody names are NaN
    rows = torch.randperm(cache.rows, device=DEVICE)[:8192].sort().values
    rows[-1] = cache.rows - 1
    cache.append(torch.randn(8192, 512, device=DEVICE), torch.randn(8192, 64, device=DEVICE), rows)
    lists = torch.randint(0, 8192, (64, 300), device=DEVICE)
    built = on(replace(BASE, heads=16, q_lens=(64,), topk=300))
    op = built.operands
    assert isinstance(op, SparseOperands)
    far = replace(built, operands=replace(op, cache=cache, indices=rows[lists].int()))
    near = replace(built, operands=replace(op, cache=cache.gather(rows), indices=lists.int()))
    want = attend(near, "hopper")
    assert bool(want.out.isfinite().all())
    for mode in MODES:
        assert differences(attend_by(far, mode), want) == [], mode
