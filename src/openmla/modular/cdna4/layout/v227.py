"""V in LDS on CDNA4, the v227 layout: the same fragments without bank conflicts.

A 16-lane group of a transposing read touches 8 keys × 16 bytes. In the default slot keys 0..3 are
64 bytes apart (16 banks in all), and keys 8..11 follow 1024 bytes later: a multiple of 256, so they
want the same 16 banks again. v227 keeps rows of 128 bytes whole and spreads keys that are read
together over chunks whose distance is *not* a multiple of 256 bytes:

    slot = 16 chunks of 1024 data bytes, 1040 (0x410) bytes apart; 8 keys × 128 columns each
    key bit      0    1    2    3    4    5    6
    moves by    128  2 ch  1 ch  4 ch 256  512  8 ch        (bytes, or chunks of 1040)

Everything is linear in the bits of key, column and lane, so each map is a table of strides. The
bit spelling below computes them by hand; the layout spelling (`v227_layout=True`) states the same
tables as layouts, shapes (2, 2, …) with strides, and leaves the arithmetic to `crd2idx`. Producer,
lane base and cell have to be switched together: one side alone scrambles V.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE, Dma, check_index
from openmla.modular.cdna4.layout.v import check_cell

CHUNK_BYTES = WAVE * DMA_BYTES
CHUNK_PAD = DMA_BYTES
CHUNK_STRIDE = CHUNK_BYTES + CHUNK_PAD
CHUNKS = 16

#: Bytes between key 0 and key 1: whole rows of 128 fp8.
ROW_BYTES = 128


class Layout(NamedTuple):
    """A layout in CuTe's sense: the extents of a coordinate, and what a step along each adds."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def crd2idx(number: int, layout: Layout) -> int:
    """The index of a coordinate that is given as one number, the first extent fastest.

    >>> crd2idx(5, Layout((2, 2, 2), (1, 10, 100)))     # bits 0 and 2 are set
    101
    """
    index = 0
    for extent, stride in zip(layout.shape, layout.stride, strict=True):
        number, step = divmod(number, extent)
        index += step * stride
    return index


# The read base by lane bit: 8 columns, key +1, key +2, key +8, 16 columns, key +4.
_BASE = Layout(
    (2,) * 6, (8, ROW_BYTES, 2 * CHUNK_STRIDE, 4 * CHUNK_STRIDE, DMA_BYTES, CHUNK_STRIDE)
)
# The cell by i_strip, j_depth, r: 64 keys, 32 columns, 16 keys.
_CELL = Layout((2, 4, 4), (8 * CHUNK_STRIDE, 32, 2 * ROW_BYTES))
# The producer's source and target by bits of the chunk, then of the lane. Lane bits 0..2 choose
# columns, the others keys.
_CHUNK_AND_LANE = (2,) * 10
_KEY = Layout(_CHUNK_AND_LANE, (4, 2, 8, 64, 0, 0, 0, 1, 16, 32))
_COLUMN = Layout(_CHUNK_AND_LANE, (0, 0, 0, 0, 16, 32, 64, 0, 0, 0))
_LDS = Layout((CHUNKS, WAVE), (CHUNK_STRIDE, DMA_BYTES))


def _bit(value: int, n: int) -> int:
    return value >> n & 1


@dataclass(frozen=True)
class V227:
    """The v227 slot: fp8, 128 keys × 128 columns, filled by 8 waves in 2 passes.

    >>> v = V227()
    >>> v.slot_bytes, v.byte(127, 127)                  # the last chunk's padding is never touched
    (16640, 16623)
    >>> v.lane_base(35), v.cell(i_strip=1, j_depth=2, r=3)
    (1176, 9152)
    >>> v.byte(69, 16) == v.write(warp=4, lane=9, step=1).lds
    True
    """

    v227_layout: bool = False

    kv_block: ClassVar[int] = 128
    depth: ClassVar[int] = 128
    element_bytes: ClassVar[int] = 1
    num_warps: ClassVar[int] = 8
    passes: ClassVar[int] = 2
    slot_bytes: ClassVar[int] = CHUNKS * CHUNK_STRIDE
    padding: ClassVar[tuple[int, int]] = (CHUNK_BYTES, CHUNK_PAD)  # so many bytes, then so many

    def byte(self, key: int, column: int) -> int:
        """LDS byte of (key, column), in closed form."""
        check_index("key", key, self.kv_block)
        check_index("column", column, self.depth)
        chunk = _bit(key, 2) + 2 * _bit(key, 1) + 4 * _bit(key, 3) + 8 * _bit(key, 6)
        row = _bit(key, 0) + 2 * _bit(key, 4) + 4 * _bit(key, 5)
        return chunk * CHUNK_STRIDE + row * ROW_BYTES + column

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """What a lane copies: a wave's pass fills one chunk, so only the source is permuted.

        >>> V227().write(warp=0, lane=8, step=1)        # chunk 1 holds keys 4, 5, 20, 21, 36, …
        Dma(key=5, column=0, lds=1168)
        """
        check_index("warp", warp, self.num_warps)
        check_index("lane", lane, WAVE)
        check_index("step", step, self.passes)
        chunk = warp * self.passes + step
        if self.v227_layout:
            at = chunk + CHUNKS * lane
            return Dma(key=crd2idx(at, _KEY), column=crd2idx(at, _COLUMN), lds=crd2idx(at, _LDS))
        row, piece = divmod(lane, ROW_BYTES // DMA_BYTES)
        key_of_chunk = (
            4 * _bit(chunk, 0) + 2 * _bit(chunk, 1) + 8 * _bit(chunk, 2) + 64 * _bit(chunk, 3)
        )
        key_of_row = _bit(row, 0) + 16 * _bit(row, 1) + 32 * _bit(row, 2)
        return Dma(
            key=key_of_chunk + key_of_row,
            column=piece * DMA_BYTES,
            lds=chunk * CHUNK_STRIDE + lane * DMA_BYTES,
        )

    def lane_base(self, lane: int) -> int:
        """The lane's share of every read address.

        >>> [V227().lane_base(lane) for lane in (1, 2, 4, 8, 16, 32)] == [
        ...     8, 0x80, 0x820, 0x1040, 16, 0x410]
        True
        """
        check_index("lane", lane, WAVE)
        if self.v227_layout:
            return crd2idx(lane, _BASE)
        chunk = _bit(lane, 5) + 2 * _bit(lane, 2) + 4 * _bit(lane, 3)
        return (
            chunk * CHUNK_STRIDE
            + _bit(lane, 1) * ROW_BYTES
            + _bit(lane, 4) * DMA_BYTES
            + _bit(lane, 0) * 8
        )

    def cell(self, i_strip: int, j_depth: int, r: int) -> int:
        """The constant share: 64 keys are 8 chunks, 16 keys are two rows of a chunk."""
        check_cell(self, i_strip, j_depth, r)
        if self.v227_layout:
            return crd2idx(i_strip + 2 * j_depth + 8 * r, _CELL)
        return i_strip * 8 * CHUNK_STRIDE + j_depth * 32 + r * 2 * ROW_BYTES
