"""Where work items of the latent kernel come from."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_sim import intercept
from openmla.kernels.hopper.latent.records import FULL, Sequences, Source
from openmla.kernels.hopper.latent.source import find_work, first_work, longest_first, work_item
from openmla.planning.latent_split import LatentSplit


@gluon.jit
def order_kernel(lengths_ptr, order_ptr, tokens):
    for turn in range(0, tokens):
        gl.store(order_ptr + turn, longest_first(turn, tokens, lengths_ptr))


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 150])
def test_the_last_64_lists_are_drawn_longest_first(tokens: int):
    """Lengths may be equal, negative, or beyond the list: every token has one turn."""
    lengths = torch.randint(-3, 40, (tokens,), generator=torch.Generator().manual_seed(0)).int()
    order = torch.empty(tokens, dtype=torch.int32)
    with intercept() as reports:
        order_kernel[(1,)](lengths, order, tokens)
    assert all(report.ok for report in reports)
    first = max(tokens - 64, 0)
    last = sorted(range(first, tokens), key=lambda token: -int(lengths[token]))
    assert order.tolist() == [*range(first), *last]


@gluon.jit
def numbering_kernel(
    items_ptr,
    cu_ptr,
    lengths_ptr,
    batch,
    total_q,
    most_keys,
    heads,
    part_rows,
    mean_tiles,
    room,
    counter_ptr,
    CHUNK: gl.constexpr,
):
    """Write (sequence's first token, first row, first key, steps, slot) of every work item, those
    of a program one after another, `room` for each program."""
    sequences = Sequences(
        cu_seqlens_q=cu_ptr,
        batch=batch,
        total_q=total_q,
        heads=heads,
        pages=None,
        mean_tiles=mean_tiles,
        mask=FULL,
        rest_q=total_q,
    )
    source = Source(
        table=None,
        lengths=lengths_ptr,
        most_keys=most_keys,
        table_stride=1,
        pool_rows=0,
        sequences=sequences,
        counter=counter_ptr,
        part_rows=part_rows,
    )
    found = first_work(source)
    item, steps = work_item(found, source, None, True)
    order = 0
    if steps == 0:
        found = find_work(found, source, True, CHUNK)
        item, steps = work_item(found, source, None)
    while steps > 0:
        at = items_ptr + (gl.program_id(0) * room + order) * 5
        order += 1
        gl.store(at, item.tile.first_token)
        gl.store(at + 1, item.tile.first_row)
        gl.store(at + 2, item.skipped)
        gl.store(at + 3, steps)
        gl.store(at + 4, item.tile.slot)
        found = find_work(found, source, True, CHUNK)
        item, steps = work_item(found, source, None)


def numbered(
    lengths: list[int],
    heads: int,
    spare: int,
    chunk: int = 128,
    programs: int = 1,
    mean_tiles: int = 0,
    draws: bool = True,
) -> list[list[tuple[int, ...]]]:
    """The work items of requests with one query each, in the order in which each program has
    them."""
    batch, tiles = len(lengths), -(-heads // 64)
    rule = LatentSplit(heads, 512)
    count = sum(tiles * rule.ranges(heads, keys) for keys in lengths) + -(-spare * heads // 64)
    counter = torch.zeros(1, dtype=torch.int32) if draws else None
    items = torch.full((programs, count + 1, 5), -9, dtype=torch.int32)
    cu = torch.arange(batch + 1).int()
    with intercept() as reports:
        numbering_kernel[(programs,)](
            items,
            cu,
            torch.tensor(lengths).int(),
            batch,
            batch + spare,
            max(lengths),
            heads,
            rule.part_rows(1, max(lengths)),
            mean_tiles or tiles,
            count + 1,
            counter,
            chunk,
        )
    assert all(report.ok for report in reports)
    assert (items[:, -1] == -9).all(), "more work items than there are"
    assert counter is None or int(counter) == 0, "the next launch would not begin with number 0"
    return [[tuple(row) for row in own if row[0] != -9] for own in items.tolist()]


HEADS = (16, 70, 128)
BATCHES = ((32, 1), (32, 3), (32, 32), (128, 128), (128, 150))
PROGRAMS = ((1, 1, False), (7, 1, False), (1, 1, True), (7, 3, True), (33, 2, True))


def numberings() -> Iterator[Any]:
    """All combinations. `make test` runs a third, where every two of their parts meet."""
    for i, heads in enumerate(HEADS):
        for j, (chunk, batch) in enumerate(BATCHES):
            for k, programs in enumerate(PROGRAMS):
                marks = [] if i == (j + k) % len(HEADS) else [pytest.mark.long]
                yield pytest.param(chunk, batch, heads, *programs, marks=marks)


@pytest.mark.parametrize("chunk, batch, heads, programs, mean_tiles, draws", [*numberings()])
def test_every_work_item_is_one_programs(
    chunk: int, batch: int, heads: int, programs: int, mean_tiles: int, draws: bool
):
    """The last tokens belong to no request; requests may have no keys; each range of a request that
    is split has rows of the workspace that no other has."""
    draw = random.Random(batch)
    lengths = [draw.choice((0, 1, 4096, 5000, 9000, draw.randint(1, 40000))) for _ in range(batch)]
    rule, spare = LatentSplit(heads, 512), 2
    part_rows = rule.part_rows(1, max(lengths))
    want = set()
    for request, keys in enumerate(lengths):
        each, ranges = rule.keys_of_range(heads, keys), rule.ranges(heads, keys)
        for part in range(ranges):
            steps = max(-(-min(each, keys - part * each) // 128), 1)
            for row in range(0, heads, 64):
                slot = request * part_rows + part * heads + row if ranges > 1 else -1
                want.add((request, row, part * each, steps, slot))
    want |= {(batch, row, 0, 1, -1) for row in range(0, spare * heads, 64)}
    found = numbered(lengths, heads, spare, chunk, programs, mean_tiles, draws)
    got = [item for own in found for item in own]
    assert len(got) == len(want) and set(got) == want


def test_long_work_items_have_low_numbers():
    """Among 128 requests: by steps, in units of a thirty-second of the longest."""
    draw = random.Random(1)
    lengths = [draw.randint(1, 8192) for _ in range(127)]
    steps = [item[3] for item in numbered(lengths, 128, 0, draws=False)[0]]
    ranks = [step * 31 // max(steps) for step in steps]
    assert ranks == sorted(ranks, reverse=True) and len(set(ranks)) > 20


def test_programs_begin_with_the_first_ranges_of_requests():
    """Without looking at other requests: of 3 requests with 2 tiles of rows, 6 programs begin with
    range 0 of each, and one with what it finds."""
    lengths = [40000, 100, 20000]
    begun = [own[0][:3] for own in numbered(lengths, 128, 0, programs=7)]
    assert begun[:6] == [(request, row, 0) for request in range(3) for row in (64, 0)]
    assert begun[6] not in begun[:6]
