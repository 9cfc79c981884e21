"""Bits of a key mask in the order of both passes, against the mask itself, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from gluon_sim import intercept
from kernels.gradients import NARROW, on
from openmla.kernels.gluon.gradients.seen_bits import SeenBits
from openmla.lab.testing.gradients import GradientCase

TILE, WORD = 128, 32  # rows that a pass owns, bits of a word
LENGTHS = {
    "one": ((70,), (300,)),
    "several": ((70, 129, 0, 5), (300, 40, 64, 128)),
    "more queries": ((300,), (33,)),
    "no keys": ((5, 3), (0, 0)),
}


def bit(x: Tensor, line: int, word: int, place: int) -> int:
    return int(x[line, word]) >> place & 1


@pytest.mark.parametrize("step", [64, 32])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_bit_is_where_a_pass_looks_for_it(name: str, step: int) -> None:
    q_lens, k_lens = LENGTHS[name]
    case = replace(NARROW, q_lens=q_lens, k_lens=k_lens, key_mask="half", spare=2, causal=False)
    op = on(GradientCase(case)).operands
    assert op.key_mask is not None
    total_q, batch = op.q.shape[0], len(q_lens)
    rows = (total_q // TILE + batch + 1) * TILE
    bits = SeenBits.allocate(op.key_mask, rows, step)
    with intercept(seed=1) as reports:
        bits.transposed(op).run()
    assert all(report.ok for report in reports)
    first = 0
    for sequence, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        place = (first // TILE + sequence) * TILE  # of the sequence, in rows of statistics
        tiles = -(-k_len // TILE)
        for query in range(q_len):
            for key in range(k_len):
                want = bit(op.key_mask, first + query, key // WORD, key % WORD)
                column = step // WORD * (place + query) + key % step // WORD
                assert bit(bits.by_query, key // step, column, key % WORD) == want
                line = (place + query) // WORD
                column = (tiles - 1 - key // TILE) * TILE + key % TILE
                assert bit(bits.by_key, line, column, query % WORD) == want
        first += q_len


def test_queries_past_a_sequence_have_no_bits() -> None:
    case = replace(NARROW, q_lens=(3, 5), k_lens=(40, 40), key_mask="all", spare=0)
    op = on(GradientCase(case)).operands
    assert op.key_mask is not None
    bits = SeenBits.allocate(op.key_mask, 4 * TILE, 64)
    with intercept():
        bits.transposed(op).run()
    assert set(bits.by_key[0, :40].tolist()) == {0b111}
    assert set(bits.by_key[TILE // WORD, :40].tolist()) == {0b11111}
    assert not bits.by_key[1 : TILE // WORD].any()
    assert not bits.by_query[0, 6 : 2 * TILE].any()
