"""Gathered rows are the batch's rows, bit for bit, in a tensor or in the pages of a cache."""

from __future__ import annotations

import pytest
import torch

from distributed import on_ranks
from distributed.ranks import Ranks
from openmla import InvalidArgument
from openmla.distributed import gather_latent, send_latent, split
from openmla.problem import CACHE_FORMATS


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "wave by wave"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "bytes", "negative bit"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_rank_has_every_row(ranks: Ranks, layout: str, kind: str, wait: bool):
    found = ranks.run(on_ranks.gathered, layout, kind, wait)
    rows = on_ranks.Batch().rows()
    want = {
        "bf16": rows.view(torch.uint8),
        "negative bit": rows.view(torch.uint8),
        "e4m3": rows.to(torch.float8_e4m3fn).view(torch.uint8),
        "bytes": rows.view(torch.uint8)[:, :656],
    }[kind]
    assert [got.equal(want) for got in found] == [True] * ranks.world


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_pages_hold_what_one_process_would_have_put_there(ranks: Ranks, format: str):
    batch = on_ranks.batch_for(format)
    cache, table = batch.cache(format)
    batch.append(cache, table, batch.new())
    for found in ranks.run(on_ranks.gathered_to_pages, format):
        assert found["data"].equal(cache.data.view(torch.uint8))
        assert found["values"].equal(cache.gather(batch.slots(table)[batch.new()]))
        if cache.scales is not None:
            assert found["scales"].equal(cache.scales)


def test_one_rank_needs_no_group():
    rows = torch.randn(7, 576)
    assert gather_latent(rows, split([4, 3], 1, 0)).equal(rows)


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (5, 0, 8)], ids=str)
def test_one_collective_or_none_carries_what_was_predicted(ranks: Ranks, lengths: tuple[int, ...]):
    received = ranks.run(on_ranks.received_bytes, lengths)
    most = max(split(lengths, ranks.world, 0).counts)
    assert received == [[1152 * most * (ranks.world - 1)] if most else []] * ranks.world


def test_what_is_wrong_with_rows_and_pages_is_said():
    shard, rows = split([4], 1, 0), torch.zeros(4, 576)
    cached = split([4], 1, 0, cached=[2])
    cache, table = on_ranks.Batch(lengths=(4,), cached=(0,)).cache("bf16")
    wrong = {
        "local": lambda: gather_latent(rows[:3], shard),
        "shard": lambda: gather_latent(rows, None),  # type: ignore[arg-type]
        "group": lambda: gather_latent(rows[:2], split([4], 2, 0)),
        "verify": lambda: gather_latent(rows, shard, verify=1),  # type: ignore[arg-type]
        "rope": lambda: send_latent(rows[:, :512], rows[:, 512:].half(), shard),
        "cache": lambda: send_latent(rows[:, :512], rows[:, 512:], cached),
        "block_table": lambda: send_latent(
            rows[:, :512], rows[:, 512:], shard, cache=cache, block_table=table[:, :0]
        ),
    }
    for name, call in wrong.items():
        with pytest.raises(InvalidArgument) as raised:
            call()
        assert raised.value.name == name
