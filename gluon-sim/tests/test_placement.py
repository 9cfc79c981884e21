"""Shared-memory layouts given by bases: views that disagree about a byte read the wrong element."""

from __future__ import annotations

import numpy as np
import pytest

from gluon_sim.memory import placement
from gluon_sim.memory.views import MemoryView, allocate
from gluon_sim.values import dtypes
from gluon_sim.values.layouts import PaddedSharedLayout, SharedLinearLayout

FP8 = dtypes.BY_NAME["fp8e4nv"]
COLUMNS = [[0, 1 << n] for n in range(7)]
# Rows 16 apart share a chunk of 1024 bytes, and 16 bytes of padding follow every chunk.
CHUNKED = PaddedSharedLayout(
    [[1024, 16]], COLUMNS + [[n, 0] for n in (16, 32, 64)] + [[n, 0] for n in (1, 2, 4, 8)]
)
ROW_MAJOR = SharedLinearLayout(COLUMNS + [[1 << n, 0] for n in range(7)])


def byte(row: int, column: int) -> int:
    return row % 16 * 1040 + row // 16 * 128 + column


def ring() -> MemoryView:
    return allocate("v", "shared", FP8, [3, 128, 128], CHUNKED)


def bits() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, (128, 128)).astype(np.uint8)


def test_bytes_lie_where_the_map_says():
    view, wanted = ring(), bits()
    view.index(1).write_bits(wanted)
    for row, column in ((0, 0), (3, 4), (64, 33), (127, 127)):
        assert view.alloc.bytes[16640 + byte(row, column)] == wanted[row, column]
    assert view.index(1).fully_written and not view.fully_written
    assert bin(view.index(1).cells()).count("1") == 128 * 128
    assert len(view.alloc.bytes) == 3 * 16640


def test_parts_of_a_tile():
    slot, wanted = ring().index(2), bits()
    slot.write_bits(wanted)
    part = slot.slice(64, 64, 0).slice(32, 32, 1)
    assert np.array_equal(part.array(), wanted[64:, 32:64])
    assert np.array_equal(slot.permute((1, 0)).array(), wanted.T)
    assert part.end <= len(part.alloc.bytes)
    with pytest.raises(ValueError, match="read-only"):
        slot.array()[0, 0] = 1


def test_another_layout_reads_other_elements():
    slot, wanted = ring().index(0), bits()
    slot.write_bits(wanted)
    same = slot.reinterpret(FP8, [128, 128], CHUNKED)
    other = slot.reinterpret(FP8, [128, 128], ROW_MAJOR)
    assert np.array_equal(same.array(), wanted)
    assert not np.array_equal(other.array(), wanted)
    assert not other.fully_written  # it also looks into the gaps


def test_views_that_are_not_modeled_are_refused():
    slot = ring().index(0)
    with pytest.raises(ValueError, match="cuts a tile"):
        slot.index(0)
    with pytest.raises(ValueError, match="pick a stage"):
        ring().permute((0, 2, 1))
    with pytest.raises(ValueError, match="whole tile"):
        slot.slice(64, 64, 0).reinterpret(FP8, [64, 128], SharedLinearLayout([]))
    with pytest.raises(ValueError, match="14 bases do not describe"):
        slot.reinterpret(FP8, [64, 128], CHUNKED)
    with pytest.raises(ValueError, match="larger than the buffer"):
        ring().index(2).reinterpret(FP8, [2, 128, 128], ROW_MAJOR)
    with pytest.raises(ValueError, match="do not reach"):
        placement.placement(SharedLinearLayout([[0, 1], [0, 1]]), [2, 2])


@pytest.mark.parametrize("layout", [CHUNKED, None], ids=["placed", "strided"])
def test_masked_elements_keep_what_they_had(layout):
    view = allocate("v", "shared", FP8, [128, 128], layout)
    where = np.arange(128)[:, None] < 64
    view.write_bits(7, where)
    assert not view.fully_written and view.slice(0, 64, 0).fully_written
    view.write_bits(bits(), ~where)
    assert view.fully_written and (view.array()[:64] == 7).all()
    assert np.array_equal(view.array()[64:], bits()[64:])
