"""Bank counting, against patterns whose answer is known and against the layout algebra."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_layouts import Layout
from tensor_layouts.analysis import bank_conflicts

from openmla.errors import InvalidArgument
from openmla.explain.banks import CDNA4_LDS, Banks, bank_use, group_uses, words_of

# How fast examples are drawn says something about the machine only, which may be busy.
at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("stride", "distinct", "ways"), [(8, 32, 1), (256, 2, 16), (128, 4, 8), (264, 32, 1)]
)
def test_known_strides(stride: int, distinct: int, ways: int) -> None:
    use = bank_use([stride * lane for lane in range(16)], 8)
    assert (use.distinct, use.ways) == (distinct, ways)


def test_one_word_read_by_all_is_a_broadcast() -> None:
    use = bank_use([512] * 16, 4)
    assert (use.distinct, use.ways) == (1, 1)


def test_unaligned_reads_touch_every_word_they_cross() -> None:
    assert list(words_of(2, 4)) == [0, 1]
    assert list(words_of(4, 4)) == [1]
    assert list(words_of(255, 2)) == [63, 64]
    assert bank_use([254], 4).words[0] == bank_use([254], 4).words[63] == 1


@at_leisure
@given(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=64), st.sampled_from([1, 4, 8, 16]))
def test_counts_are_those_of_the_definition(addresses: list[int], size: int) -> None:
    """Byte by byte: the words of bank b are the distinct byte addresses // 4 that are b mod 64."""
    bytes_read = {address + n for address in addresses for n in range(size)}
    words = {byte // 4 for byte in bytes_read}
    use = bank_use(addresses, size)
    assert sum(use.words) == len(words)
    assert all(use.words[b] == sum(1 for w in words if w % 64 == b) for b in range(64))


@at_leisure
@given(st.lists(st.integers(0, 512), min_size=4, max_size=4))
def test_agrees_with_the_layout_algebra(strides: list[int]) -> None:
    aligned = [4 * stride for stride in strides]
    layout = Layout(((2,) * 4, 8), (tuple(aligned), 1))
    theirs = bank_conflicts(layout, element_bytes=1, num_banks=64, group_size=16)
    ours = bank_use([int(layout(lane, 0)) for lane in range(16)], 8)
    assert ours.ways == theirs["max_ways"]
    assert ours.distinct == len(theirs["bank_to_threads"])


def test_groups_are_consecutive_lanes() -> None:
    free, crowded = [8 * n for n in range(16)], [256 * n for n in range(16)]
    assert [use.ways for use in group_uses(free + crowded, 8)] == [1, 16]
    other = Banks(count=32, width=4, group=32)
    assert [use.ways for use in group_uses(free + crowded, 8, other)] == [16]  # word 0 is shared


@pytest.mark.parametrize("lanes", [0, 15, 17])
def test_partial_groups_are_refused(lanes: int) -> None:
    with pytest.raises(InvalidArgument, match="multiple of 16 lanes"):
        group_uses([0] * lanes, 8)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgument, match="address"):
        bank_use([-1], 8)
    with pytest.raises(InvalidArgument, match="access_bytes"):
        bank_use([0], 0)
    with pytest.raises(InvalidArgument, match="count"):
        Banks(count=0, width=4, group=16)
    assert CDNA4_LDS.count * CDNA4_LDS.width == CDNA4_LDS.group * 16
