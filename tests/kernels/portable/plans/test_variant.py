"""A plan says which launches run; the launcher only lists them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmla.kernels.portable.plan import PortableVariant, SplitSpace
from openmla.planning import plan
from openmla.planning.split import FP32, PARTIAL_CAP
from openmla.problem import Problem

CHUNK = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, batch=1, total_q=64, total_k=131072
)
PAGES = Problem(
    form="latent",
    heads=16,
    d_nope=512,
    d_rope=64,
    d_v=512,
    batch=4,
    total_q=4,
    total_k=1 << 20,
    page_size=64,
    table_keys=32768,
)
LISTS = replace(PAGES, form="sparse", topk=2048)


def variant_of(problem: Problem) -> PortableVariant:
    variant: PortableVariant = plan(problem, "h200", "portable").variant
    return variant


def test_a_chunk_is_split_into_two_ranges_per_sm() -> None:
    """132 SMs: 264 ranges at most, of requests with at most 66 tiles."""
    assert variant_of(CHUNK).split == SplitSpace(slots=264, tiles=66, group=1)


@pytest.mark.parametrize(
    "change",
    [
        {"total_k": 4095},  # a range has 2048 keys or more
        {"heads": 67},  # each head is a tile, and more than half of the SMs have one
        {"batch": 0},
        {"total_k": 0},
    ],
    ids=str,
)
def test_a_chunk_that_is_not_split(change: dict[str, int]) -> None:
    assert variant_of(replace(CHUNK, total_k=4096)).split is not None
    assert variant_of(replace(CHUNK, heads=66)).split is not None
    assert variant_of(replace(CHUNK, **change)).split is None


def test_many_requests_go_in_groups_that_fit_the_workspace() -> None:
    many = replace(CHUNK, batch=200, total_q=12800)
    config, space = plan(many, "h200", "portable").config, variant_of(many).split
    assert space is not None and 1 <= space.group < many.batch
    one = space.slots * config.BM * (config.out_cols + 2) * FP32
    assert space.group * one <= PARTIAL_CAP < (space.group + 1) * one


def test_sequences_are_split_by_the_keys_of_their_table() -> None:
    config, space = plan(PAGES, "h200", "portable").config, variant_of(PAGES).split
    assert space is not None and space.slots == config.split.slots(32768, config.BM)
    assert variant_of(replace(PAGES, table_keys=4096)).split is None


def test_lists_are_never_split() -> None:
    assert variant_of(LISTS) == PortableVariant(dequantizes=False, split=None)


def test_fp8_rows_that_are_visited_often_are_dequantized_first() -> None:
    often = replace(LISTS, heads=128, total_q=4096, total_k=32768, kv_dtype="fp8_656")
    assert variant_of(often).dequantizes
    assert not variant_of(replace(often, total_q=1)).dequantizes
