"""The dense FP8 kernel on a Hopper GPU: right, repeatable, deaf to poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from gpu.on_device import (
    DEVICE,
    different,
    drawn_problems,
    normal,
    offsets,
    on,
    on_hopper,
    problems,
)
from gpu.test_hopper_dense import BATCHES, PAGES
from openmla.lab.testing.case import Case

pytestmark = on_hopper

MIXED = Case("dense", 1, 128, 64, 128, dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3")
SCALES: dict[str, Any] = {"q_scale": True, "k_scale": True}
# What is compiled in, with the number of query tiles; one kernel each.
PROFILES: dict[str, tuple[Case, int]] = {
    "mixed": (MIXED, 2),
    "mixed scales": (replace(MIXED, **SCALES), 2),
    "mixed q_scale": (replace(MIXED, q_scale=True, return_lse=False), 1),
    "mixed k_scale full fp16": (replace(MIXED, k_scale=True, causal=False, side_dtype="fp16"), 1),
    "mixed rope bf16 sink": (replace(MIXED, rope_dtype="bf16", sink="mixed", **SCALES), 2),
    "mixed rope per head": (replace(MIXED, rope="per_head", scale=-0.1), 2),
    "mixed pages of 64": (replace(MIXED, **PAGES, page_size=64), 2),
    "mixed pages of 16": (replace(MIXED, **PAGES, page_size=16, **SCALES), 1),
    "mixed 192+64-256": (replace(MIXED, d_nope=192, d_v=256, **SCALES), 2),
    "mixed 64+32-64": (replace(MIXED, d_nope=64, d_rope=32, d_v=64), 2),
    "mixed 256+0-256": (
        replace(MIXED, d_nope=256, d_rope=0, d_v=256, rope="none", rope_dtype=""),
        2,
    ),
}
FP8 = replace(MIXED, side_dtype="")
PROFILES |= {
    "fp8": (FP8, 2),
    "fp8 scales": (replace(FP8, **SCALES), 2),
    "fp8 full": (replace(FP8, causal=False, scale=-0.1), 1),
    "fp8 rope bf16": (replace(FP8, rope_dtype="bf16", sink="mixed"), 2),
    "fp8 pages of 64": (replace(FP8, **PAGES, page_size=64), 1),
    "fp8 192+64-128": (replace(FP8, d_nope=192), 2),
    "fp8 64+32-64": (replace(FP8, d_nope=64, d_rope=32, d_v=64), 2),
}
SPLIT = replace(MIXED, heads=2, q_lens=(200, 64, 300), k_lens=(8200, 300, 300), spare=3)


@pytest.mark.parametrize("name", PROFILES)
def test_right_repeatable_and_deaf_to_poison(name: str):
    case, num_qo = PROFILES[name]
    found = [
        problem
        for batch in BATCHES
        for problem in problems(replace(case, **batch), "hopper", lambda c: c.with_num_qo(num_qo))
    ]
    assert found == []


@pytest.mark.parametrize(
    "case", [SPLIT, replace(SPLIT, **SCALES), replace(SPLIT, side_dtype="")], ids=str
)
def test_split_requests(case: Case):
    assert problems(case, "hopper") == []


@pytest.mark.parametrize("side", ["bf16", ""])
def test_drawn_cases(side: str):
    fixed = {"layout": "aligned", "out": "aligned", "q_scale": True, "k_scale": True}
    dims = {"d_nope": 128, "d_rope": 64, "d_v": 128, "rope": "shared", "kv": "plain"}
    types = {"dtype": "e4m3", "side_dtype": side, "rope_dtype": "e4m3"}
    assert drawn_problems("dense", "hopper", 12, **dims, **types, **fixed) == []


@pytest.mark.parametrize("v_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_negative_scale_is_that_of_negated_queries(v_dtype: torch.dtype):
    q, k, rope = (normal(300, *w).to(torch.float8_e4m3fn) for w in ((8, 192), (8, 128), (64,)))
    scale = torch.rand(300, device=DEVICE)
    sign = torch.where(torch.arange(300, device=DEVICE) % 3 == 0, -1.0, 1.0)
    turned = (q.float() * sign[:, None, None]).to(q.dtype)
    v = normal(300, 8, 128).to(v_dtype)
    outs = [
        openmla.mla_prefill(
            given, k, rope, v, cu_seqlens_q=offsets(200, 100), q_scale=by, backend="hopper"
        )
        for given, by in ((q, scale * sign), (turned, scale))
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("v_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_request_alone_has_the_bits_it_has_in_a_batch(v_dtype: torch.dtype):
    lens = [64, 300, 1, 700, 128, 41]
    q, k, rope = (
        normal(sum(lens), *w).to(torch.float8_e4m3fn) for w in ((8, 192), (8, 128), (64,))
    )
    v = normal(sum(lens), 8, 128).to(v_dtype)
    whole = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=offsets(*lens), backend="hopper")
    for i, length in enumerate(lens):
        rows = slice(sum(lens[:i]), sum(lens[: i + 1]))
        alone = [x[rows].clone() for x in (q, k, rope, v)]
        out = openmla.mla_prefill(*alone, cu_seqlens_q=offsets(length), backend="hopper")
        assert torch.equal(out, whole[rows]), length


@pytest.mark.parametrize("side", ["bf16", ""])
def test_a_thousand_launches_give_the_same_bits(side: str):
    built = on(replace(MIXED, heads=16, side_dtype=side, q_lens=(512,) * 3, k_lens=(512,) * 3))
    assert different(lambda: built.run("hopper").out, 1000) == 0
