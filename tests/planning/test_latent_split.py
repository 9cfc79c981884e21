"""When the keys of a request are split in latent form, and what room that takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from gluon_sim import simulate
from kernels.hopper.latent.ranges_kernel import ranges_kernel
from openmla.arithmetic import ceildiv
from openmla.errors import Unsupported
from openmla.planning import plan
from openmla.planning.latent_split import (
    FP32,
    MIN_RANGE,
    MOST_PART_ROWS,
    PARTIAL_CAP,
    STATE,
    STEP,
    FixedSplit,
    LatentSplit,
    most_ranges,
    range_space,
    suggested_range_keys,
)
from openmla.problem import Problem

LENGTHS = (0, 1, 513, 4096, 4097, 4500, 8192, 8193, 16000, 32767, 32768, 65537, 2**17, 2**20, 2**30)


@pytest.mark.parametrize("rows", [1, 16, 20, 128, 1024, 4096 * 128])
def test_ranges_are_whole_steps_that_cover_every_key_once(rows: int) -> None:
    rule = LatentSplit(heads=16, d_v=512)
    for keys in LENGTHS:
        each, count = rule.keys_of_range(rows, keys), rule.ranges(rows, keys)
        assert each % STEP == 0 and (count == 1 or each >= MIN_RANGE)
        assert (count - 1) * each < max(keys, 1) <= count * each


def test_the_device_has_the_same_rule() -> None:
    rule, got = LatentSplit(heads=16, d_v=512), torch.zeros(2, dtype=torch.int32)
    for rows in (1, 2, 3, 16, 17, 64, 130, 1024, 2000, 2049, 4096 * 128, 2**22):
        for keys in (*LENGTHS, 2**23, 2**23 + 1, 2**24 + 1, 2**25, 2**31 - 1):
            assert simulate(ranges_kernel, 1, (got, rows, keys)).ok
            parts, bits = got.tolist()
            assert parts == rule.ranges(rows, keys), (rows, keys)
            assert parts == 1 or 1 << bits == rule.keys_of_range(rows, keys), (rows, keys)


def test_full_chunks_and_short_requests_are_not_split() -> None:
    rule = LatentSplit(heads=128, d_v=512)
    assert rule.ranges(rows=4096 * 128, keys=131072) == 1
    assert not rule.can_split(8192) and rule.can_split(8193)
    few = LatentSplit(heads=16, d_v=512)
    assert not few.can_split(4096) and few.can_split(4097)


def test_long_ranges_from_four_of_them_on() -> None:
    rule = LatentSplit(heads=128, d_v=512)
    assert (rule.keys_of_range(128, 32767), rule.keys_of_range(128, 32768)) == (4096, 8192)
    assert rule.keys_of_range(16, 4097) == 1024  # whose SHORT is four long ranges
    assert rule.keys_of_range(1, 2**20) == 512 and rule.keys_of_range(1, 2**21) == 1024


def test_the_workspace_holds_every_batch() -> None:
    """Drawn batches of requests, few queries and many, against the bound that is allocated."""
    draw = random.Random(1)
    for _ in range(2000):
        heads, most = draw.choice((1, 16, 20, 128)), draw.choice((3000, 9000, 40000, 200000))
        rule = LatentSplit(heads, 512)
        queries = [draw.choice((1, 1, 2, 8, 60, 500)) for _ in range(draw.randint(1, 40))]
        keys = [draw.choice((most, draw.randint(0, most))) for _ in queries]
        pairs = [(q * heads, k) for q, k in zip(queries, keys, strict=True)]
        split = [(rows, rule.ranges(rows, k)) for rows, k in pairs if rule.ranges(rows, k) > 1]
        total = sum(rows for rows, _ in pairs)
        assert sum(rows * count for rows, count in split) <= rule.part_rows(len(pairs), most)
        for tile in (16, 64):
            slots = [count * -(-rows // tile) for rows, count in split]
            assert max(slots, default=0) <= rule.slots(most, tile)
            tiles = [-(-rows // tile) for rows, _ in split]
            assert max(tiles, default=0) <= -(-rule.split_rows(1, 1024, most) // tile)
        assert sum(rows for rows, _ in split) <= rule.split_rows(len(pairs), total, most)
        for rows, count in split:
            assert rows * count <= rule.part_rows(1, most)
            assert rows <= rule.split_rows(1, total, most)
            assert count <= most_ranges(heads, most)
        assert not split or rule.can_split(most)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_a_slot_of_a_request_is_to_spare(heads: int, tile: int) -> None:
    """Every number of queries, at the lengths where another range begins."""
    rule, edges = LatentSplit(heads, 512), [2**n + step for n in range(12, 21) for step in (0, 1)]
    for most in (4097, 5000, 8192, 8193, 32768, 32769, 2**20):
        keys = {k for k in (most - 1, most, *edges) if k <= most}
        used = [
            ceildiv(rows, tile) * rule.ranges(rows, k)
            for rows in range(heads, 2 * MOST_PART_ROWS, heads)
            for k in keys
            if rule.ranges(rows, k) > 1
        ]
        assert max(used, default=0) < rule.slots(most, tile)


def test_groups_keep_the_workspace_bounded() -> None:
    rule = LatentSplit(heads=128, d_v=512)
    for requests in (1, 30, 256, 5000):
        group = rule.group(requests, 131072)
        rows = rule.part_rows(group, 131072)
        assert 1 <= group <= requests
        assert group == 1 or rows * FP32 * (512 + STATE) <= PARTIAL_CAP


def test_the_plan_says_how_requests_are_split() -> None:
    problem = Problem(
        form="latent",
        heads=16,
        d_nope=512,
        d_rope=64,
        d_v=512,
        page_size=64,
        batch=4,
        total_q=4,
        total_k=4 * 32768,
    )
    text = plan(problem, "h200", "hopper").explain()
    assert "16 rows x 32768 keys: 32 ranges of 1024 keys" in text


FIXED = Problem(
    form="latent",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    page_size=64,
    batch=128,
    total_q=128,
    total_k=128 * 131072,
    table_keys=131072,
    invariant=True,
)


@pytest.mark.parametrize("range_keys", [0, 128, 256, 1024, 8192, 2**20])
@pytest.mark.parametrize("queries", [1, 128, 5000])
def test_ranges_of_a_named_length_have_a_bounded_workspace(range_keys: int, queries: int) -> None:
    """128 requests of 131072 keys and 128 heads, of one query and prompts of thousands of tokens:
    as many tokens a launch as fit, one at least."""
    problem = replace(FIXED, range_keys=range_keys, total_q=128 * queries)
    rule = FixedSplit(128, 512, range_keys)
    space = range_space(rule, problem)
    if range_keys >= 131072:
        assert (space.rows, space.ranges) == (0, 1)
        return
    assert space.ranges * rule.keys_of_range >= 131072 and space.fixed_keys == rule.keys_of_range
    together = space.tokens or problem.total_q
    assert 1 <= together <= problem.total_q and space.rows == together * 128
    one = FP32 * (512 + STATE) * 128 * space.ranges
    assert space.part_rows * FP32 * (512 + STATE) == one * together <= PARTIAL_CAP
    assert together == problem.total_q or one * (together + 1) > PARTIAL_CAP


@pytest.mark.parametrize(("target", "backend"), [("h200", "hopper"), ("a100", "portable")])
def test_ranges_whose_partial_results_do_not_fit_are_refused(target: str, backend: str) -> None:
    """Of one token of 128 heads 2040 ranges fit. Longer ranges are served whatever the table, as
    those of invariant calls are that name none."""
    wide = replace(FIXED, range_keys=128, table_keys=2**20)
    with pytest.raises(Unsupported, match=r"2155872256 bytes > 536870912; ranges of 1024 keys fit"):
        plan(wide, target, backend)
    for fits in (replace(wide, range_keys=1024), replace(wide, table_keys=2040 * 128)):
        assert plan(fits, target).backend == backend
    assert plan(replace(wide, range_keys=0, table_keys=2**23), target).backend == backend
    assert plan(wide, "cpu").backend == "cpu"  # where no partial results are kept


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256, 4096 * 128])
@pytest.mark.parametrize("requests", [1, 4, 32, 128])
@pytest.mark.parametrize("sm_count", [132, 148, 256])
def test_suggested_ranges_make_work_for_half_of_the_chip(
    rows: int, requests: int, sm_count: int
) -> None:
    """Or are the shortest that are suggested; none where the rule for batches is enough. Each is a
    length that a call takes."""
    for keys in (0, 1, 300, 2048, 4096, 8192, 32768, 131072, 2**20 + 1):
        tiles, own = requests * ceildiv(rows, 64), LatentSplit(rows, 512).ranges(rows, keys)
        found = suggested_range_keys(rows, requests, keys, sm_count)
        if found is None:
            shortest = max(256, 4 * rows)
            assert 2 * tiles * own >= sm_count or keys <= 2 * shortest
            continue
        replace(FIXED, range_keys=found)
        made = tiles * ceildiv(keys, found)
        assert made > tiles * own and 2 * tiles * own < sm_count
        assert 2 * made >= sm_count or found in (256, 4 * (1 << (rows - 1).bit_length()))
        assert 2 * tiles * ceildiv(keys, 2 * found) < sm_count


def test_the_plan_says_how_many_work_items_there_are() -> None:
    one = replace(FIXED, batch=1, total_q=1, total_k=32768, table_keys=32768, invariant=False)
    assert "x 4 range(s) = 8, for 132 SMs; range_keys=512 would make 128" in explained(one)
    asked = replace(one, invariant=True, range_keys=512)
    assert "64 ranges; 31 tokens a launch, 1 launch(es)" in explained(asked)
    assert "x 64 range(s) = 128, for 132 SMs" in explained(asked)
    full = replace(one, batch=128, total_q=128, total_k=128 * 32768)
    assert "= 1024, for 132 SMs" in explained(full) and "range_keys" not in explained(full)


def explained(problem: Problem) -> str:
    return plan(problem, "h200", "hopper").explain()
