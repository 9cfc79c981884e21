"""The dense Hopper kernel on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gluon_sim import Report, simulate
from kernels.hopper.dense.ranges_kernel import groups_kernel, ranges_kernel
from kernels.hopper.simulated import plan_of, run
from kernels.judging import (
    assert_every_schedule_is_clean,
    assert_right_clean_and_deaf_to_poison,
    on,
)
from kernels.shared_keys import with_shared_keys
from openmla.aot.ahead import compiling_for
from openmla.kernels.hopper.dense import launch
from openmla.kernels.hopper.dense.plan import HopperDenseConfig
from openmla.kernels.launch import calls
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import new_results
from openmla.operands import DenseOperands
from openmla.planning.split import SplitRule

V3 = Case("dense", 2, 128, 64, 128, q_lens=(70, 33, 5), k_lens=(70, 300, 2), spare=3)
PAGED = replace(V3, rope="cache", kv="bf16")
SPLIT = Case("dense", 2, 64, 32, 64, q_lens=(50, 20), k_lens=(4500, 300), spare=3, sink="normal")
# Block edges: one key into a block, one query into a tile (of 64 and of 128 rows), and a first row
# that sees one key less than a block (3 queries, 129 keys: 127).
EDGES = replace(V3, heads=1, q_lens=(3, 65, 129), k_lens=(129, 65, 257), spare=0)
# The first block has few keys: the second raises the maximum by much, and the others do not.
PEAKY = replace(V3, values="peaky", q_lens=(20,), k_lens=(410,))
# One bit into a word, one word into four, and 257 keys: a word of its own in the third block.
MASKED = replace(V3, heads=1, q_lens=(70, 129), k_lens=(300, 257), key_mask="half")
# One request with keys for one block, in a kernel of its own.
ONE_BLOCK = replace(V3, q_lens=(70,), k_lens=(100,), spare=7)
# Nothing follows the entries of the last request, the longest.
FULL_TABLE = replace(PAGED, q_lens=(33, 5), k_lens=(70, 300), spare=0)
# 70 queries of 300 keys: the first sees keys 131 to 230, the last 200 to 299. All keys of the third
# request are in its window.
WINDOW = replace(V3, q_lens=(70, 3, 5), k_lens=(300, 260, 9), window=100)
# Four tiles of 64 rows or two of 128: a window of one block, in the middle of which blocks begin.
BLOCKS = replace(WINDOW, heads=1, q_lens=(250,), k_lens=(700,), window=128, spare=0)
# Some queries see all keys before them: windows of others begin anywhere in two blocks.
WITHIN_BLOCKS = replace(BLOCKS, k_lens=(300,), window=100)
CASES = {
    "causal": V3,
    "edges": EDGES,
    "edges, full": replace(EDGES, causal=False, sink="normal"),
    "edges, 192+64": replace(EDGES, d_nope=192, d_v=256, q_lens=(3, 129), k_lens=(65, 66)),
    "full table, pages of 16": FULL_TABLE,
    "full table, pages of 64": replace(FULL_TABLE, page_size=64),
    "full": replace(V3, causal=False),
    "sink": replace(V3, sink="mixed"),
    "fp16, no lse": replace(V3, dtype="fp16", return_lse=False),
    "rope per head": replace(V3, rope="per_head"),
    "more queries than keys": replace(V3, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64)),
    "no sequences": replace(V3, q_lens=(), k_lens=(), spare=4),
    "negative scale": replace(V3, scale=-0.1),
    "scale 0": replace(V3, scale=0.0),
    "rising": replace(V3, values="rising", q_lens=(140,), k_lens=(520,)),
    # Blocks are walked from the last key to the first: with this sign every one raises the maximum.
    "falling": replace(V3, values="rising", q_lens=(140,), k_lens=(520,), scale=-0.07),
    "peaky": PEAKY,
    "exact": replace(V3, values="exact", scale=0.125),
    "pages of 64": replace(PAGED, page_size=64),
    "pages of 16": replace(PAGED, page_size=16),
    "pages of 48": replace(PAGED, page_size=48),
    "pages of 256": replace(PAGED, page_size=256),
    "192+64": replace(V3, d_nope=192, d_v=256),
    "64+64": replace(V3, d_nope=64),
    "128+0": replace(V3, d_rope=0, rope="none"),
    "256+0": replace(V3, d_nope=256, d_rope=0, d_v=256, rope="none"),
    "64+32, 5 heads": replace(V3, d_nope=64, d_rope=32, d_v=64, heads=5),
    "40 requests": replace(V3, heads=1, q_lens=(1,) * 40, k_lens=(3,) * 40),
    "one block": ONE_BLOCK,
    "one block, full, sink, rope per head": replace(
        ONE_BLOCK, causal=False, sink="mixed", rope="per_head"
    ),
    "one block, 192+64, more queries than keys": replace(
        ONE_BLOCK, d_nope=192, d_v=256, q_lens=(70,), k_lens=(50,), return_lse=False
    ),
    "one block, pages of 16, negative scale": replace(
        ONE_BLOCK, rope="cache", kv="bf16", page_size=16, scale=-0.1
    ),
    "one block, no keys": replace(ONE_BLOCK, k_lens=(0,)),
    "one block, 128+0": replace(ONE_BLOCK, d_rope=0, rope="none"),
    "split": SPLIT,
    # Ranges of the 4449 keys from the first that a query of the first request sees.
    "split, window": replace(SPLIT, q_lens=(50, 20), k_lens=(4500, 300), window=4400),
    "split, no lse": replace(SPLIT, heads=1, q_lens=(5,), k_lens=(4500,), return_lse=False),
    # More requests than are looked at together; the one that is split comes after the first 32.
    "split, 40 requests": replace(
        SPLIT, heads=1, q_lens=(1,) * 40, k_lens=(3,) * 37 + (4500, 7, 0), sink="mixed"
    ),
    "window": WINDOW,
    "window of a key": replace(WINDOW, heads=1, q_lens=(70, 129), k_lens=(71, 300), window=1),
    "window, blocks": BLOCKS,
    "window, within blocks": WITHIN_BLOCKS,
    # With blocks that all rows see whole between those in which windows begin and end.
    "window of blocks": replace(BLOCKS, q_lens=(130,), k_lens=(900,), window=513, sink="mixed"),
    "window as wide as the keys": replace(WINDOW, window=300),
    "window and more queries than keys": replace(
        WINDOW, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64), window=17
    ),
    "window, rope per head, fp16": replace(WINDOW, rope="per_head", dtype="fp16", scale=-0.1),
    "window, 192+64": replace(BLOCKS, d_nope=192, d_v=256, q_lens=(130,), window=65),
    "window, 128+0": replace(WINDOW, d_rope=0, rope="none", return_lse=False),
    "window, rising": replace(BLOCKS, values="rising", window=200),
    "window in one block": replace(ONE_BLOCK, window=20),
    "mask": MASKED,
    "mask of few": replace(MASKED, key_mask="few", sink="normal"),
    "mask, full": replace(MASKED, causal=False),
    "mask, pages": replace(MASKED, rope="cache", kv="bf16"),
    "mask, split": replace(SPLIT, key_mask="half"),
    "split, pages": replace(
        SPLIT, q_lens=(20, 50), k_lens=(300, 4500), rope="cache", kv="bf16", page_size=64
    ),
}

# Also with keys that begin anywhere. Of "split" every request sees all keys, and all are split.
SHARED = ["causal", "full", "pages of 16", "192+64", "40 requests", "mask", "one block", "split"]


def chip(case: Case) -> int:
    return 6 if "4500" in str(case) else 2


@pytest.mark.parametrize("num_qo", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str, num_qo: int) -> None:
    case = CASES[name]

    def planned(built: BuiltCase, **options: Any) -> tuple[Outcome, list[Report]]:
        return run(built, plan_of(built, chip(case), num_qo), **options)

    assert_right_clean_and_deaf_to_poison(case, planned, seed=num_qo)


@pytest.mark.parametrize(
    "name",
    ["causal", "pages of 16", "192+64", "split", "window, blocks", "window, 192+64"],
)
def test_one_and_two_query_tiles_give_the_same_bits(name: str) -> None:
    case = CASES[name]
    built = on(case)
    one, two = (run(built, plan_of(built, chip(case), n))[0] for n in (1, 2))
    assert not differences(one, two)


@pytest.mark.parametrize("case", [V3, SPLIT], ids=["whole", "split"])
def test_a_request_does_not_see_its_neighbors(case: Case) -> None:
    built = on(case)
    chosen = plan_of(built, chip(case), 2)
    together = run(built, chosen)[0]
    op = built.operands
    assert isinstance(op, DenseOperands)
    q_first = k_first = 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        rows, keys = slice(q_first, q_first + q_len), slice(k_first, k_first + k_len)
        assert op.k_rope is not None
        alone = replace(
            op,
            q=op.q[rows],
            k_nope=op.k_nope[keys],
            v=op.v[keys],
            k_rope=op.k_rope[keys],
            cu_seqlens_q=torch.tensor([0, q_len]).int(),
            cu_seqlens_k=torch.tensor([0, k_len]).int(),
        )
        single = replace(
            built, operands=alone, case=replace(case, q_lens=(q_len,), k_lens=(k_len,))
        )
        out = run(single, plan_of(single, chip(case), 1))[0].out
        assert torch.equal(out, together.out[rows])
        q_first, k_first = q_first + q_len, k_first + k_len


def test_a_mask_of_all_keys_is_no_mask() -> None:
    case = replace(MASKED, key_mask="all")
    built = on(case)
    plain = replace(built, operands=replace(built.operands, key_mask=None))
    assert not differences(run(built)[0], run(plain)[0])


@pytest.mark.parametrize("num_qo", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", SHARED)
def test_requests_may_share_keys(name: str, num_qo: int) -> None:
    case = CASES[name]

    def planned(built: BuiltCase, **options: Any) -> tuple[Outcome, list[Report]]:
        return run(built, plan_of(built, chip(case), num_qo), **options)

    all_keys = name == "split"  # then nothing is drawn: a second seed gives the same case
    for seed in (num_qo,) if all_keys else (num_qo, num_qo + 2):
        change = partial(with_shared_keys, seed=seed, all_keys=all_keys)
        assert_right_clean_and_deaf_to_poison(case, planned, seed, change)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_with_windows_may_share_keys(seed: int) -> None:
    """What one does not address, another may: all keys hold numbers."""

    def windowed(built: BuiltCase) -> BuiltCase:
        shared = with_shared_keys(built, seed)
        operands = replace(shared.operands, window=100)
        return replace(shared, operands=operands, case=replace(shared.case, window=100))

    whole = replace(WINDOW, window=0)
    assert_right_clean_and_deaf_to_poison(whole, run, seed, windowed)


@pytest.mark.parametrize("num_qo", [1, 2])
def test_blocks_before_the_window_of_a_tile_are_not_read(num_qo: int) -> None:
    """A value that the first query sees and no other: rows of other tiles, which share its key's
    request, multiply it by no weight, not even 0."""
    built = on(BLOCKS)
    op = built.operands
    assert isinstance(op, DenseOperands)
    spoiled = replace(built, operands=replace(op, v=op.v.clone()))
    spoiled.operands.v[700 - 250 + 1 - 128] = torch.nan
    want, got = (run(x, plan_of(x, 2, num_qo))[0].out for x in (built, spoiled))
    assert torch.isnan(got[0]).all()
    assert torch.equal(got[128:], want[128:]) and torch.isfinite(got[128:]).all()


def test_keys_where_they_are_by_themselves_change_no_bit() -> None:
    built = on(V3)
    op = built.operands
    assert isinstance(op, DenseOperands)
    named = replace(built, operands=replace(op, k_start=op.cu_seqlens_k[:-1].clone()))
    assert not differences(run(named)[0], run(built)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_clean(name: str) -> None:
    case = CASES[name]

    def planned(built: BuiltCase, **options: Any) -> tuple[Outcome, list[Report]]:
        return run(built, plan_of(built, chip(case)), **options)

    assert_every_schedule_is_clean(case, planned)


def test_the_device_splits_as_the_plan_says() -> None:
    """tiles.keys_of_range and SplitRule.keys_per_split are the same function. A query of 66 heads
    leaves half of 132 SMs idle, of 67 less."""
    got = torch.zeros(1, dtype=torch.int32)
    for heads, q_len in ((16, 1), (16, 64), (16, 65), (16, 256), (16, 300), (66, 1), (67, 1)):
        rule = SplitRule(
            heads_tiles=heads, tokens_per_tile=64, min_keys=2048, sm_count=132, d_v=128
        )
        for k_len in (0, 1, 2047, 4096, 5000, 131072, 131073):
            report = simulate(ranges_kernel, 1, (got, q_len, k_len, heads, 132, 2048))
            assert report.ok and int(got) == rule.keys_per_split(q_len, k_len)


def test_groups_of_heads_divide_them_and_grow_as_keys_are_few() -> None:
    got = torch.zeros(1, dtype=torch.int32)
    keys = HopperDenseConfig(heads=128, d_nope=128, d_rope=64, d_v=128).group_keys
    for heads in (1, 5, 6, 16, 20, 128):
        for k_len in (0, 1, 1024, 1025, 4096, 8192, 1 << 25):
            assert simulate(groups_kernel, 1, (got, k_len, heads, keys)).ok
            group = int(got)
            assert heads % group == 0 and (group <= 4 or group * k_len <= keys)
            assert heads % (2 * group) or (2 * group > 4 and 2 * group * k_len > keys)
    for k_len, expected in ((1024, 16), (2048, 8), (16384, 4)):
        assert simulate(groups_kernel, 1, (got, k_len, 128, keys)).ok and int(got) == expected


def test_an_empty_tensor_of_keys_needs_no_kernel() -> None:
    built = on(replace(V3, q_lens=(3,), k_lens=(0,), spare=0))
    outcome, reports = run(built)
    assert not reports and judge(built, outcome).ok


def test_results_without_rows() -> None:
    built = on(replace(V3, q_lens=(0,), k_lens=(4,), spare=0))
    outcome, reports = run(built)
    assert not reports and outcome.out.shape[0] == 0


@pytest.mark.parametrize("requests", [3, 40])
def test_the_work_counter_is_put_back(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some programs might know that nobody needs to draw, and others not."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch, "launch_counter", lambda device: counter)
    lens = {"q_lens": (1,) * requests, "k_lens": (3,) * requests}
    built = on(replace(V3, heads=1, spare=0, **lens))
    for sm_count in (2, 64):
        outcome, reports = run(built, plan_of(built, sm_count))
        assert judge(built, outcome).ok and all(report.ok for report in reports)
        assert int(counter) == 0


@pytest.mark.parametrize("d_v", [16, 32])
def test_narrow_values_rescale_fewer_registers_than_the_text_takes(d_v: int) -> None:
    """A thread holds d_v / 2 registers of O; the text that rescales them takes 64."""
    case = Case("dense", 1, 48, 32, d_v, q_lens=(70,), k_lens=(300,), values="rising")
    assert_right_clean_and_deaf_to_poison(case, run)


@pytest.mark.compile
def test_a_scale_that_vanishes_compiles() -> None:
    """The kernel then has scores of zeros, in the layout that the products have."""
    built = on(Case("dense", 1, 64, 0, 64, q_lens=(5,), k_lens=(5,), rope="none", scale=0.0))
    with compiling_for("sm_90"):
        (call,) = calls(plan_of(built), built.operands, new_results(built))
        assert call.arguments["SIGN"] == 0 and call.compile().metadata.shared > 0


def test_one_query_and_one_key_of_several_heads() -> None:
    """Tensors of one row have the stride of their heads all the same."""
    built = on(Case("dense", 3, 64, 0, 64, q_lens=(1,), k_lens=(1,), rope="none"))
    outcome, reports = run(built, seed=1)
    assert [str(found) for report in reports for found in report.findings] == []
    assert judge(built, outcome).ok
