"""V in LDS on CDNA4, default layout: sub-blocks of 8 keys × 64 bytes, no swizzle.

    kv_block 128, depth 128, fp8                        sub-block = 8 keys × 64 columns = 512 B
                 columns 0..63   64..127
    keys 0..7          sub 0      sub 1
    keys 8..15         sub 2      sub 3
    ...                                                 slot = 32 × 512 = 16384 B

The second product needs V with keys along the fragment, but rows in memory run along depth. The
8-byte transposing read closes the gap: 16 lanes hand in 8 bytes each (8 keys × 16 columns) and the
hardware deals the bytes out again with keys and columns exchanged. A fragment of 32 values is four
such reads, 16 keys apart.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from openmla.errors import InvalidArgument
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE, Dma, check_index
from openmla.modular.cdna4.layout.k import SUB_ROW_BYTES

V_SUB_ROWS = 8
V_SUB_BYTES = V_SUB_ROWS * SUB_ROW_BYTES

#: Keys and columns of one fp8 V fragment (the 32×32×64 product), and the reads that fetch it.
STRIP_KEYS = 64
TILE_COLUMNS = 32
READS = 4
READ_BYTES = 8
KEYS_PER_READ = STRIP_KEYS // READS


class VMap(Protocol):
    """A V slot and the two sides that must agree on it: producer writes, fragment reads."""

    @property
    def kv_block(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def padding(self) -> tuple[int, int]: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def passes(self) -> int: ...

    def __hash__(self) -> int: ...

    def byte(self, key: int, column: int) -> int:
        """LDS byte of (key, column): the closed form of `write`."""

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """What a lane copies in pass `step`."""

    def lane_base(self, lane: int) -> int:
        """The lane's share of every read address, computed once per slot."""

    def cell(self, i_strip: int, j_depth: int, r: int) -> int:
        """The constant share of read r of fragment (i_strip, j_depth)."""


def fragment_reads(v: VMap, lane: int, i_strip: int, j_depth: int) -> tuple[int, ...]:
    """Addresses of the four 8-byte reads of one lane's fragment."""
    base = v.lane_base(lane)
    return tuple(base + v.cell(i_strip, j_depth, r) for r in range(READS))


def v_lane_addresses(v: VMap, i_strip: int, j_depth: int, r: int) -> tuple[int, ...]:
    """Addresses of all 64 lanes in one transposing read."""
    cell = v.cell(i_strip, j_depth, r)
    return tuple(v.lane_base(lane) + cell for lane in range(WAVE))


def check_cell(v: VMap, i_strip: int, j_depth: int, r: int) -> None:
    """Raise unless (i_strip, j_depth, r) names a read of this slot."""
    check_index("i_strip", i_strip, v.kv_block // STRIP_KEYS)
    check_index("j_depth", j_depth, v.depth // TILE_COLUMNS)
    check_index("r", r, READS)


@dataclass(frozen=True)
class DefaultV:
    """The default V slot.

    >>> v = DefaultV()
    >>> v.slot_bytes, v.byte(9, 70)                     # sub-block 3, row 1, column 6
    (16384, 1606)
    >>> v.lane_base(35), v.cell(i_strip=1, j_depth=2, r=3)
    (328, 14848)
    """

    kv_block: int = 128
    depth: int = 128
    element_bytes: int = 1
    num_threads: int = 512

    padding: ClassVar[tuple[int, int]] = (0, 0)

    def __post_init__(self) -> None:
        for name, unit in (("kv_block", V_SUB_ROWS), ("depth", self.sub_cols)):
            value = getattr(self, name)
            if value < unit or value % unit:
                raise InvalidArgument(name, f"a positive multiple of {unit}", value)
        if self.num_threads < WAVE or self.num_threads % WAVE:
            raise InvalidArgument("num_threads", f"a multiple of {WAVE}", self.num_threads)

    @cached_property
    def sub_cols(self) -> int:
        """Columns of one sub-block: 64 bytes' worth."""
        return SUB_ROW_BYTES // self.element_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return self.kv_block * self.depth * self.element_bytes

    @cached_property
    def num_warps(self) -> int:
        """Waves that fill a slot together."""
        return self.num_threads // WAVE

    @property
    def passes(self) -> int:
        """16-byte copies per thread; whole passes only."""
        per_pass = self.num_threads * DMA_BYTES
        if self.slot_bytes % per_pass:
            expected = f"a multiple of {per_pass} bytes ({self.num_threads} threads × {DMA_BYTES})"
            raise InvalidArgument("kv_block·depth", expected, f"{self.slot_bytes} bytes")
        return self.slot_bytes // per_pass

    def byte(self, key: int, column: int) -> int:
        """LDS byte of (key, column): sub-blocks row by row, rows of 64 bytes inside."""
        check_index("key", key, self.kv_block)
        check_index("column", column, self.depth)
        sub = key // V_SUB_ROWS * (self.depth // self.sub_cols) + column // self.sub_cols
        inside = key % V_SUB_ROWS * SUB_ROW_BYTES + column % self.sub_cols * self.element_bytes
        return sub * V_SUB_BYTES + inside

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """Thread t fills LDS byte 16·t of each pass, so the source follows from `byte` backwards.

        >>> DefaultV().write(warp=0, lane=36, step=1)   # LDS 8768 = sub-block 17, byte 64
        Dma(key=65, column=64, lds=8768)
        """
        check_index("warp", warp, self.num_warps)
        check_index("lane", lane, WAVE)
        check_index("step", step, self.passes)
        lds = (warp * WAVE + lane + step * self.num_threads) * DMA_BYTES
        sub, inside = divmod(lds, V_SUB_BYTES)
        row_block, col_block = divmod(sub, self.depth // self.sub_cols)
        row, byte_in_row = divmod(inside, SUB_ROW_BYTES)
        return Dma(
            key=row_block * V_SUB_ROWS + row,
            column=col_block * self.sub_cols + byte_in_row // self.element_bytes,
            lds=lds,
        )

    def lane_base(self, lane: int) -> int:
        """Byte of the lane's (key, column) in the first read of fragment (0, 0)."""
        self._check_fp8()
        return self.byte(*read_cell(lane))

    def cell(self, i_strip: int, j_depth: int, r: int) -> int:
        """Byte of the read's first (key, column).

        Adding it to `lane_base` is exact because neither share carries into the other: lanes span
        keys 0..15 and columns 0..31, cells start at multiples of 16 keys and 32 columns.
        """
        self._check_fp8()
        check_cell(self, i_strip, j_depth, r)
        return self.byte(i_strip * STRIP_KEYS + r * KEYS_PER_READ, j_depth * TILE_COLUMNS)

    def _check_fp8(self) -> None:
        if self.element_bytes != 1:
            expected = "1: fragment reads transpose bytes (fp8)"
            raise InvalidArgument("element_bytes", expected, self.element_bytes)


def read_cell(lane: int) -> tuple[int, int]:
    """(key, column) of the first of the 8 bytes that a lane hands in, in read (0, 0, 0).

    Pairs of lanes share a key and take 8 columns each. The eight keys of a 16-lane group are those
    whose scores one lane holds after the first product (see ACC_ROW_OFFSETS_32x32), so the
    probabilities feed the second product without moving between lanes.

    >>> [read_cell(lane)[0] for lane in range(0, 16, 2)]
    [0, 1, 2, 3, 8, 9, 10, 11]
    >>> read_cell(63)
    (15, 24)
    """
    check_index("lane", lane, WAVE)
    pair = lane % 16 // 2
    key = pair % 4 + 8 * (pair // 4) + 4 * (lane // 32)
    return key, 16 * (lane // 16 % 2) + 8 * (lane % 2)
