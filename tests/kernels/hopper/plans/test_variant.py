"""A plan says which launches run; launchers and kept launches read it there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmla.kernels.hopper.latent.plan import RowsLaunch
from openmla.planning import Plan, plan
from openmla.problem import Problem

DENSE = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
LISTS = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, total_q=4096, total_k=65536, topk=2048
)
PAGES = Problem(
    form="latent",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    batch=32,
    total_q=32,
    total_k=1 << 20,
    page_size=64,
    table_keys=32768,
)
ROWS, FP8_ROWS = RowsLaunch(False, False, False, 0), RowsLaunch(True, False, False, 0)


def on_h200(problem: Problem) -> Plan:
    return plan(problem, "h200")


def test_keys_of_a_short_chunk_may_be_split() -> None:
    chunk = replace(DENSE, total_q=64, total_k=131072)
    split = on_h200(chunk).variant.split
    assert split is not None and split.is_one_launch and split.requests == 1
    # In self-attention a request with so many keys has as many queries; shared keys never ran.
    assert on_h200(replace(chunk, self_attention=True)).variant.split is None
    assert on_h200(replace(chunk, has_k_start=True)).variant.split is None


def test_a_short_window_leaves_nothing_to_split() -> None:
    """A request with few queries has as many keys as these see; a window has no one block."""
    chunk = replace(DENSE, total_q=64, total_k=131072)
    rule = on_h200(chunk).config.split
    longest, least = rule.longest_split_chunk, 2 * rule.min_keys
    assert on_h200(replace(chunk, window=least - longest)).variant.split is None
    assert on_h200(replace(chunk, window=least - longest + 1)).variant.split is not None
    assert not on_h200(replace(DENSE, total_q=128, total_k=128, window=8)).variant.one_block


def test_many_requests_go_in_groups() -> None:
    chunk = replace(DENSE, total_q=64, total_k=131072)
    many = on_h200(replace(chunk, batch=200, total_q=200, total_k=200 * 8192)).variant.split
    assert many is not None and not many.is_one_launch


@pytest.mark.parametrize(("keys", "one"), [(128, True), (129, False)])
def test_one_block_of_keys(keys: int, one: bool) -> None:
    variant = on_h200(replace(DENSE, total_q=128, total_k=keys)).variant
    assert variant.one_block == one


def test_few_lists_are_three_launches() -> None:
    few, many = on_h200(replace(LISTS, total_q=1)).variant, on_h200(LISTS).variant
    assert few.few is not None and few.suits_few
    assert many.few is None and not many.suits_few and many.rows == (ROWS,)


def test_lists_with_lengths_are_drawn_if_programs_have_more_than_one() -> None:
    lists = replace(LISTS, has_topk_lengths=True)
    assert on_h200(lists).variant.rows == (replace(ROWS, dynamic=True),)
    some = on_h200(replace(lists, total_q=40))
    assert some.variant.rows == (ROWS,) and some.config.dynamic


def test_fp8_rows_that_may_not_fit_have_two_launches() -> None:
    rows = replace(LISTS, kv_dtype="fp8_656", page_size=64, total_k=4_000_000)
    variant = on_h200(rows).variant
    assert variant.workspace.names and variant.workspace.may_overflow
    assert variant.rows == (ROWS, FP8_ROWS)
    small = on_h200(replace(rows, total_k=8192)).variant
    assert not small.workspace.names and small.rows == (ROWS,)


@pytest.mark.parametrize(("page_size", "boxes"), [(64, True), (48, False)])
def test_pages_of_whole_blocks_come_as_boxes(page_size: int, boxes: bool) -> None:
    [rows] = on_h200(replace(PAGES, page_size=page_size)).variant.rows
    assert rows.boxes == boxes and rows.dynamic


def test_of_sequences_work_is_drawn_however_little_there_is() -> None:
    """Programs that begin with nothing find what is left before the others do."""
    [rows] = on_h200(replace(PAGES, batch=1, total_q=1)).variant.rows
    assert rows.dynamic


@pytest.mark.parametrize(("batch", "chunk"), [(32, 32), (33, 128)])
def test_many_requests_are_numbered_together(batch: int, chunk: int) -> None:
    [rows] = on_h200(replace(PAGES, batch=batch, total_q=batch)).variant.rows
    assert rows.chunk == chunk


def test_sequences_are_split_by_what_their_table_can_name() -> None:
    long, short = on_h200(PAGES).variant, on_h200(replace(PAGES, table_keys=2048)).variant
    assert long.ranges.rows > 0 and long.ranges.ranges > 1
    assert short.ranges.rows == 0
