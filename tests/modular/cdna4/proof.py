"""Proofs by enumeration that the CDNA4 maps do what they claim.

A slot has 16384 bytes and a tile is read with 2048 transposing reads: small enough to try them all.

>>> proof = prove_v227()
>>> proof.holds
True
>>> proof.default_banks, proof.v227_banks
(BankCount(distinct=16, ways=2), BankCount(distinct=32, ways=1))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from openmla.errors import OpenMLAError
from openmla.explain.banks import group_uses
from openmla.modular.cdna4.layout import accumulator_rows
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.modular.cdna4.layout.k import K_SUB_BYTES, KSlot, load_K_frag_addr
from openmla.modular.cdna4.layout.v import (
    KEYS_PER_READ,
    READ_BYTES,
    READS,
    STRIP_KEYS,
    TILE_COLUMNS,
    DefaultV,
    VMap,
    v_lane_addresses,
)
from openmla.modular.cdna4.layout.v227 import V227

Cell = tuple[int, int]


@dataclass(frozen=True)
class BankCount:
    """Banks that a 16-lane group touches, and how often the busiest is asked."""

    distinct: int
    ways: int


@dataclass(frozen=True)
class V227Proof:
    """What `prove_v227` found. Every field is counted; `holds` says whether the claims are met."""

    reads: int
    """8-byte reads compared: lanes × strips × depth tiles × 4."""
    reads_that_differ: int
    """Reads where the v227 pair fetches other (key, column) cells than the default pair."""
    reads_off_the_accumulator: int
    """Reads that hand in a key whose score sits in another half of the wave."""
    bytes_written: int
    """Distinct LDS bytes that the v227 producer fills: all of the tile, if one-to-one."""
    cells_written: int
    """Distinct (key, column) cells among them."""
    closed_form_errors: int
    """Bytes where the producer and the closed form disagree."""
    spelling_errors: int
    """Values where bit arithmetic and layout algebra disagree."""
    slot_bytes: int
    highest_byte: int
    default_banks: BankCount
    v227_banks: BankCount
    v227_half_wave_banks: int
    """Distinct banks of 32 consecutive lanes under v227."""

    @property
    def gap_bytes(self) -> int:
        """Bytes below the highest one that hold nothing."""
        return self.highest_byte + 1 - self.bytes_written

    @property
    def holds(self) -> bool:
        """Same cells, one-to-one, no conflict where the default has two-way ones."""
        tile = V227.kv_block * V227.depth
        errors = (
            self.reads_that_differ
            + self.reads_off_the_accumulator
            + self.closed_form_errors
            + self.spelling_errors
        )
        return (
            errors == 0
            and self.bytes_written == self.cells_written == tile
            and self.highest_byte < self.slot_bytes
            and self.default_banks.ways == 2
            and self.v227_banks.ways == 1
        )

    def explain(self) -> list[str]:
        """The result in sentences, one per claim."""
        return [
            f"{self.reads} reads compared with the default pair, {self.reads_that_differ} differ",
            f"{self.bytes_written} LDS bytes hold {self.cells_written} cells, one each, in a slot "
            f"of {self.slot_bytes} (highest {self.highest_byte}, {self.gap_bytes} bytes of gaps)",
            f"default: a 16-lane group touches {self.default_banks.distinct} banks, "
            f"{self.default_banks.ways}-way conflict",
            f"v227: a 16-lane group touches {self.v227_banks.distinct} banks, "
            f"{self.v227_banks.ways}-way; 32 lanes touch {self.v227_half_wave_banks}",
        ]


def written_cells(v: VMap) -> dict[int, Cell]:
    """LDS byte -> (key, column), by running the producer of an fp8 slot."""
    cells: dict[int, Cell] = {}
    for warp, lane, step in product(range(v.num_warps), range(WAVE), range(v.passes)):
        copy = v.write(warp, lane, step)
        for n in range(DMA_BYTES):
            cells[copy.lds + n] = (copy.key, copy.column + n)
    return cells


def read_cells(v: VMap) -> Iterator[tuple[int, int, int]]:
    """Every (i_strip, j_depth, r) of a slot."""
    return product(range(v.kv_block // STRIP_KEYS), range(v.depth // TILE_COLUMNS), range(READS))


def prove_v227(v227: V227 | None = None) -> V227Proof:
    """Try everything: see V227Proof for what is counted. Takes another map only to doubt it."""
    default, v227, spelled = DefaultV(), v227 or V227(), V227(v227_layout=True)
    held_by_default, held = written_cells(default), written_cells(v227)
    differ = off = reads = 0
    for lane, cell in product(range(WAVE), read_cells(v227)):
        reads += 1
        want = _fetched(default, held_by_default, lane, cell)
        differ += _fetched(v227, held, lane, cell) != want
        off += not _keys_are_the_lanes_own(lane, cell, want)
    return V227Proof(
        reads=reads,
        reads_that_differ=differ,
        reads_off_the_accumulator=off,
        bytes_written=len(held),
        cells_written=len(set(held.values())),
        closed_form_errors=sum(v227.byte(*cell) != byte for byte, cell in held.items()),
        spelling_errors=_spelling_errors(v227, spelled),
        slot_bytes=v227.slot_bytes,
        highest_byte=max(held),
        default_banks=v_bank_count(default),
        v227_banks=v_bank_count(v227),
        v227_half_wave_banks=min(
            sum(1 for words in zip(*pair, strict=True) if any(words)) for pair in _half_waves(v227)
        ),
    )


def v_bank_count(v: VMap) -> BankCount:
    """The bank count of V fragment reads; raises if reads of one slot differ among themselves."""
    return _the_only(
        BankCount(use.distinct, use.ways)
        for cell in read_cells(v)
        for use in group_uses(v_lane_addresses(v, *cell), READ_BYTES)
    )


def k_bank_count() -> BankCount:
    """The bank count of K fragment reads (16 bytes per lane).

    >>> k_bank_count()
    BankCount(distinct=64, ways=1)
    """
    sub_blocks = KSlot().slot_bytes // K_SUB_BYTES
    return _the_only(
        BankCount(use.distinct, use.ways)
        for sub_id, half in product(range(sub_blocks), range(2))
        for use in group_uses([load_K_frag_addr(lane, sub_id)[half] for lane in range(WAVE)], 16)
    )


def _fetched(
    v: VMap, held: dict[int, Cell], lane: int, cell: tuple[int, int, int]
) -> list[Cell | None]:
    """The cells a lane hands to one transposing read; None for a byte nobody wrote."""
    first = v.lane_base(lane) + v.cell(*cell)
    return [held.get(first + n) for n in range(READ_BYTES)]


def _keys_are_the_lanes_own(
    lane: int, cell: tuple[int, int, int], fetched: list[Cell | None]
) -> bool:
    """Whether every key fetched is one whose scores this half of the wave holds.

    Then P is already where the second product wants it. A 32-key score tile covers two reads.
    """
    i_strip, _, r = cell
    tile = i_strip * STRIP_KEYS + r * KEYS_PER_READ // 32 * 32
    own = {tile + row for row in accumulator_rows(lane)}
    return all(at is not None and at[0] in own for at in fetched)


def _spelling_errors(bits: V227, algebra: V227) -> int:
    lanes = range(WAVE)
    return (
        sum(bits.lane_base(lane) != algebra.lane_base(lane) for lane in lanes)
        + sum(bits.cell(*cell) != algebra.cell(*cell) for cell in read_cells(bits))
        + sum(
            bits.write(*at) != algebra.write(*at)
            for at in product(range(bits.num_warps), lanes, range(bits.passes))
        )
    )


def _half_waves(v: VMap) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Bank loads of groups (0, 1) and (2, 3) of every read."""
    for cell in read_cells(v):
        uses = [use.words for use in group_uses(v_lane_addresses(v, *cell), READ_BYTES)]
        yield uses[0], uses[1]
        yield uses[2], uses[3]


def _the_only(counts: Iterator[BankCount]) -> BankCount:
    """The one value that all counts share: a claim "every read" must not hide a mixture."""
    seen = set(counts)
    if len(seen) != 1:
        raise OpenMLAError(f"reads differ in their bank counts: {sorted(map(str, seen))}")
    return seen.pop()
