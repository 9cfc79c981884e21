"""Where rows lie in LDS: slots of latent rows, and address maps as bases. Pure integers.

Bases are the form in which a compiler takes a shared-memory layout. A map that is linear in bits is
fixed by its values at powers of two. Compilers want it from the memory's side: for each bit of the
(unpadded) element offset, the tensor coordinate it stands for, plus how many elements of padding
follow every so many elements. The numbers are computed from the same closed forms that the proofs
use; nothing is written down twice.

>>> bases = v227_bases()
>>> bases.interval_padding_pairs                      # 16 bytes after every 1024: stride 1040
[[1024, 16]]
>>> bases.offset_bases[6:9], bases.offset_bases[10:]  # column 64, key 1, key 16; then by chunk
([[0, 64], [1, 0], [16, 0]], [[4, 0], [2, 0], [8, 0], [64, 0]])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from openmla.errors import InvalidArgument
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE, Dma, check_index
from openmla.modular.cdna4.layout.k import K_SUB_ROWS, KSlot
from openmla.modular.cdna4.layout.v import VMap
from openmla.modular.cdna4.layout.v227 import V227

DEEPSEEK_V3 = KSlot()
ROW_BYTES = WAVE * DMA_BYTES
ROW_PAD = 16
ROW_STRIDE = ROW_BYTES + ROW_PAD


@dataclass(frozen=True)
class LatentSlot:
    """One slot of latent rows: where (row, column) lives, and what each lane copies.

    A row of 512 16-bit columns takes 1040 bytes. A wave copies one row at a time: 64 lanes × 16
    bytes = 1024 bytes. Rows exactly 1024 bytes apart would start in the same bank; 16 bytes of
    padding move each row four banks on, so that 16 lanes that read one column piece of 16 rows
    cover all 64 banks.

        row 0: bytes 0 … 1023      banks 0 … 63
        row 1: bytes 1040 … 2063   starts in bank 4
        …
        row 16: bytes 16640 …      starts in bank 0 again

    Both products read the same rows: K along the columns, V (the same values) along the keys. Of
    256 columns a copy takes two rows, of which one is in the lower half of the slot's rows and one
    in the upper, so that neighboring rows still begin four banks on.

    >>> slot = LatentSlot()
    >>> slot.byte(2, 5), slot.slot_bytes
    (2090, 66560)
    >>> slot.write(warp=3, lane=2, step=1)          # wave 3 copies rows 3, 11, 19, …
    Dma(key=11, column=16, lds=11472)
    >>> LatentSlot(columns=256).write(warp=3, lane=34, step=1)   # rows 11 and 43
    Dma(key=43, column=16, lds=11984)
    """

    rows: int = 64
    num_warps: int = 8
    columns: int = ROW_BYTES // 2

    element_bytes: ClassVar[int] = 2
    widths: ClassVar[tuple[int, ...]] = (ROW_BYTES // 4, ROW_BYTES // 2)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row without padding."""
        return self.columns * self.element_bytes

    @cached_property
    def copies(self) -> int:
        """Copies of 1024 bytes that fill the slot."""
        return self.rows * self.row_bytes // ROW_BYTES

    @cached_property
    def slot_bytes(self) -> int:
        """Padding included."""
        return self.copies * ROW_STRIDE

    @cached_property
    def passes(self) -> int:
        """Copies of each wave."""
        return self.copies // self.num_warps

    def byte(self, row: int, column: int) -> int:
        """LDS byte of (row, column)."""
        check_index("row", row, self.rows)
        check_index("column", column, self.columns)
        beside, copy = divmod(row, self.copies)
        return copy * ROW_STRIDE + beside * self.row_bytes + column * self.element_bytes

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """What a lane copies: neighboring waves take neighboring rows."""
        check_index("warp", warp, self.num_warps)
        check_index("lane", lane, WAVE)
        check_index("step", step, self.passes)
        beside, place = divmod(lane * DMA_BYTES, self.row_bytes)
        row = step * self.num_warps + warp + beside * self.copies
        column = place // self.element_bytes
        return Dma(key=row, column=column, lds=self.byte(row, column))


@dataclass(frozen=True)
class SharedBases:
    """A two-dimensional tensor in padded shared memory.

    With padding, the fields are arguments of Gluon's `PaddedSharedLayout(interval_padding_pairs,
    offset_bases, [], shape)`; without, `offset_bases` alone is that of `SharedLinearLayout`. Plain
    lists, since that is what the compiler takes. Offsets count elements.
    """

    interval_padding_pairs: list[list[int]]
    offset_bases: list[list[int]]
    shape: list[int]

    def coordinate(self, offset: int) -> tuple[int, int]:
        """(row, column) at an unpadded element offset: the bases of its set bits, XORed."""
        row = column = 0
        for n, (row_base, column_base) in enumerate(self.offset_bases):
            if offset >> n & 1:
                row ^= row_base
                column ^= column_base
        return row, column

    def padded(self, offset: int) -> int:
        """The offset in memory: padding follows every full interval."""
        return offset + sum(offset // every * pad for every, pad in self.interval_padding_pairs)

    def unpadded(self, padded: int) -> int:
        """The way back from `padded`, for one interval at most.

        >>> v227_bases().unpadded(1040 + 5)
        1029
        """
        for every, pad in self.interval_padding_pairs:
            chunk, inside = divmod(padded, every + pad)
            padded = chunk * every + inside
        return padded

    @property
    def plain(self) -> SharedBases:
        """This memory without swizzle: every offset bit moves along one dimension only.

        >>> k_nope_bases().plain.offset_bases[8:10]
        [[4, 0], [8, 0]]
        """
        bases = [[row, 0 if row else column] for row, column in self.offset_bases]
        return SharedBases(self.interval_padding_pairs, bases, self.shape)


@dataclass(frozen=True)
class CopyBases:
    """Which element of a tile each lane of the copying waves holds, as a compiler's register
    layout: bases of the register number, the lane and the wave."""

    registers: list[list[int]]
    lanes: list[list[int]]
    warps: list[list[int]]
    shape: list[int]


def copy_bases(
    memory: SharedBases, write: Callable[[int, int, int], Dma], passes: int, warps: int, size: int
) -> CopyBases:
    """The distribution under which `write(warp, lane, pass)` is a copy to `memory`, unswizzled.

    A lane's copy is 16 bytes; more passes are more registers. `size` is that of an element.

    >>> slot = V227()
    >>> made = copy_bases(v227_bases(), slot.write, slot.passes, slot.num_warps, 1)
    >>> made.lanes, made.warps                       # eight lanes along a key; 2 chunks per wave
    ([[0, 16], [0, 32], [0, 64], [1, 0], [16, 0], [32, 0]], [[2, 0], [8, 0], [64, 0]])
    """
    first = memory.unpadded(write(0, 0, 0).lds // size)

    def at(warp: int, lane: int, step: int) -> list[int]:
        offset = memory.unpadded(write(warp, lane, step).lds // size) - first
        return list(memory.plain.coordinate(offset))

    def powers(stop: int) -> list[int]:
        return [1 << n for n in range(stop.bit_length() - 1)]

    inside = [list(memory.plain.coordinate(n)) for n in powers(DMA_BYTES // size)]
    return CopyBases(
        registers=inside + [at(0, 0, n) for n in powers(passes)],
        lanes=[at(0, n, 0) for n in powers(WAVE)],
        warps=[at(n, 0, 0) for n in powers(warps)],
        shape=memory.shape,
    )


def bases_of(place: Callable[[int, int], int], rows: int, columns: int) -> list[list[int]]:
    """Bases of `place`, a map (row, column) -> unpadded element offset that is linear in bits.

    >>> bases_of(lambda row, column: 4 * row + (column ^ row), 4, 4)
    [[0, 1], [0, 2], [1, 1], [2, 2]]
    """
    for name, extent in (("rows", rows), ("columns", columns)):
        if extent < 1 or extent & (extent - 1):
            raise InvalidArgument(name, "a power of two", extent)
    at = {place(row, column): [row, column] for row in range(rows) for column in range(columns)}
    bits = (rows * columns).bit_length() - 1
    bases = [at[1 << n] for n in range(bits) if 1 << n in at]
    linear = SharedBases([], bases, [rows, columns])
    if len(bases) != bits or any(linear.coordinate(o) != tuple(rc) for o, rc in at.items()):
        raise InvalidArgument("place", "a one-to-one map that is linear in bits", place)
    return bases


def v_bases(slot: VMap) -> SharedBases:
    """A V slot of either kind, without its padding if it has any.

    >>> from openmla.modular.cdna4.layout.v import DefaultV
    >>> v_bases(DefaultV()).offset_bases[6:]
    [[1, 0], [2, 0], [4, 0], [0, 64], [8, 0], [16, 0], [32, 0], [64, 0]]
    """
    every, pad = slot.padding
    padded = SharedBases([[every, pad]] if pad else [], [], [slot.kv_block, slot.depth])

    def place(key: int, column: int) -> int:
        return padded.unpadded(slot.byte(key, column)) // slot.element_bytes

    return replace(padded, offset_bases=bases_of(place, *padded.shape))


def v227_bases() -> SharedBases:
    """V with the v227 layout: 128 keys × 128 columns of fp8."""
    return v_bases(V227())


def k_nope_bases(slot: KSlot = DEEPSEEK_V3) -> SharedBases:
    """The nope part of a K slot; rows 4 and 8 carry the swizzle.

    >>> k_nope_bases().offset_bases[4:]
    [[0, 16], [0, 32], [1, 0], [2, 0], [4, 16], [8, 32], [16, 0], [0, 64], [32, 0], [64, 0]]
    """
    return _k_bases(slot, first=0, columns=slot.depth)


def k_rope_bases(slot: KSlot = DEEPSEEK_V3) -> SharedBases:
    """The rope part of a K slot, counted from the start of the rope sub-blocks."""
    return _k_bases(slot, first=slot.depth, columns=slot.d_rope)


def k_sub_bases(slot: KSlot = DEEPSEEK_V3) -> SharedBases:
    """One K sub-block, swizzled: what a fragment of K is read from.

    >>> k_sub_bases().shape, k_sub_bases().offset_bases[8:]
    ([32, 64], [[4, 16], [8, 32], [16, 0]])
    """
    shape = [K_SUB_ROWS, slot.sub_cols]
    size = slot.element_bytes
    return SharedBases([], bases_of(lambda k, c: slot.byte(k, c) // size, *shape), shape)


def latent_bases(slot: LatentSlot) -> SharedBases:
    """Latent rows of 16 bits, padded after every 1024 bytes.

    >>> bases = latent_bases(LatentSlot())
    >>> bases.interval_padding_pairs, bases.offset_bases[8:11]
    ([[512, 8]], [[0, 256], [1, 0], [2, 0]])
    >>> latent_bases(LatentSlot(columns=256)).offset_bases[7:10]
    [[0, 128], [32, 0], [1, 0]]
    """
    size, shape = slot.element_bytes, [slot.rows, slot.columns]
    padded = SharedBases([[ROW_BYTES // size, ROW_PAD // size]], [], shape)

    def place(row: int, column: int) -> int:
        return padded.unpadded(slot.byte(row, column) // size)

    return replace(padded, offset_bases=bases_of(place, *shape))


def _k_bases(slot: KSlot, first: int, columns: int) -> SharedBases:
    start, size = slot.byte(0, first), slot.element_bytes
    shape = [slot.kv_block, columns]
    place = bases_of(lambda k, c: (slot.byte(k, first + c) - start) // size, *shape)
    return SharedBases([], place, shape)
