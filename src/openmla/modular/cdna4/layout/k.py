"""K in LDS on CDNA4: sub-blocks of 32 rows × 64 bytes, each swizzled.

A K slot holds one tile of `kv_block` keys. The nope columns come first, then the rope columns, each
segment cut into sub-blocks of 32 keys × 64 bytes, numbered row block by row block:

    kv_block 128, depth 128, d_rope 64, fp8             sub-block = 32 keys × 64 columns = 2048 B
                 columns 0..63   64..127   rope 0..63
    keys  0..31        sub 0      sub 1      sub 8
    keys 32..63        sub 2      sub 3      sub 9
    keys 64..95        sub 4      sub 5      sub 10
    keys 96..127       sub 6      sub 7      sub 11     slot = 12 × 2048 = 24576 B

Rows are 64 bytes, so four rows fill the 64 banks and lanes reading one column of 16 rows would meet
four deep. The swizzle moves 16-byte pieces sideways by two row bits, which spreads those 16 reads
over all banks.
"""

from dataclasses import dataclass
from functools import cached_property

from openmla.errors import InvalidArgument
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE, Dma, check_index

#: Every row of a K or V sub-block is 64 bytes, whatever the element: 64 fp8 or 32 bf16.
SUB_ROW_BYTES = 64
K_SUB_ROWS = 32
K_SUB_BYTES = K_SUB_ROWS * SUB_ROW_BYTES


def swizzle_K_sub(r: int, c: int, *, element_bytes: int = 1) -> int:
    """Byte offset of element (r, c) inside one K sub-block.

    Bits 8 and 9 of the plain offset (row bits 2 and 3) flip bits 4 and 5 (which 16 bytes of the
    row). The bits that decide are not among those that change, so the map is its own inverse.

    >>> swizzle_K_sub(4, 0)          # plain 256 = 1 << 8, so bit 4 flips
    272
    >>> swizzle_K_sub(12, 16)        # plain 784 = 0b11_0001_0000: bits 4 and 5 flip
    800
    """
    plain = element_bytes * c + SUB_ROW_BYTES * r
    return swizzle_bytes(plain)


def swizzle_bytes(offset: int) -> int:
    """The K swizzle on a byte offset; whole sub-blocks (2048 B) map onto themselves."""
    return offset ^ (((offset >> 8) & 3) << 4)


def swizzle_parameters(element_bytes: int = 1) -> tuple[int, int, int]:
    """This swizzle as (vec, per_phase, max_phase): elements that move together, rows that
    share a phase, number of phases.

    >>> swizzle_parameters(1), swizzle_parameters(2)
    ((16, 4, 4), (8, 4, 4))
    """
    return 16 // element_bytes, 4, 4


def load_K_frag_addr(lane: int, sub_id: int) -> tuple[int, int]:
    """The two 16-byte reads of one fp8 K fragment: bytes (lo, hi) from the start of the slot.

    Lane l takes row l % 32, columns 32·(l // 32) and the 31 after it. `sub_id` is a plain multiple
    of the sub-block size, so a kernel keeps two base registers and puts it in the immediate offset.

    >>> load_K_frag_addr(37, 2)      # row 5, columns 32..63 of sub-block 2 (bytes 4096..6143)
    (4464, 4448)
    """
    check_index("lane", lane, WAVE)
    check_index("sub_id", sub_id)
    row, column = lane % K_SUB_ROWS, 32 * (lane // K_SUB_ROWS)
    first = sub_id * K_SUB_BYTES
    return first + swizzle_K_sub(row, column), first + swizzle_K_sub(row, column + 16)


@dataclass(frozen=True)
class KSlot:
    """One K slot: where (key, column) lives, and what each lane of the producer copies.

    Columns count through Q's order: nope 0..depth-1, then rope depth..depth+d_rope-1.

    >>> slot = KSlot()
    >>> slot.slot_bytes, slot.rope_sub_id
    (24576, 8)
    >>> slot.byte(33, 130)           # rope column 2 of key 33: row 1 of sub-block 9
    18498
    """

    kv_block: int = 128
    depth: int = 128
    d_rope: int = 64
    element_bytes: int = 1
    num_warps: int = 8

    def __post_init__(self) -> None:
        cols = self.sub_cols
        for name, unit in (("kv_block", K_SUB_ROWS), ("depth", cols), ("d_rope", cols)):
            value = getattr(self, name)
            if value < unit or value % unit:
                raise InvalidArgument(name, f"a positive multiple of {unit}", value)
        for name, columns in (("depth", self.depth), ("d_rope", self.d_rope)):
            if self._pieces(columns) % self.num_warps:
                what = f"pieces of 16 rows × 64 bytes that {self.num_warps} warps can share evenly"
                raise InvalidArgument(name, what, f"{columns}: {self._pieces(columns)} pieces")

    @cached_property
    def sub_cols(self) -> int:
        """Columns of one sub-block: 64 bytes' worth."""
        return SUB_ROW_BYTES // self.element_bytes

    @cached_property
    def rope_sub_id(self) -> int:
        """Number of the first rope sub-block: they start behind all nope ones."""
        return self.kv_block // K_SUB_ROWS * (self.depth // self.sub_cols)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot: every key's nope and rope."""
        return self.kv_block * (self.depth + self.d_rope) * self.element_bytes

    @cached_property
    def passes(self) -> int:
        """Copies each lane issues per tile: three at the DeepSeek-V3 shape (two nope, one rope)."""
        return self.slot_bytes // (self.num_warps * WAVE * DMA_BYTES)

    def sub_id(self, key: int, column: int) -> int:
        """Number of the sub-block that holds (key, column)."""
        row_block = key // K_SUB_ROWS
        if column < self.depth:
            return row_block * (self.depth // self.sub_cols) + column // self.sub_cols
        rope = column - self.depth
        per_row = self.d_rope // self.sub_cols
        return self.rope_sub_id + row_block * per_row + rope // self.sub_cols

    def byte(self, key: int, column: int) -> int:
        """LDS byte of (key, column), from the start of the slot."""
        check_index("key", key, self.kv_block)
        check_index("column", column, self.depth + self.d_rope)
        inside = swizzle_K_sub(
            key % K_SUB_ROWS, column % self.sub_cols, element_bytes=self.element_bytes
        )
        return self.sub_id(key, column) * K_SUB_BYTES + inside

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """What lane `lane` of warp `warp` copies in pass `step`.

        The copy engine writes LDS in lane order (16 bytes each, 1024 per wave), so the swizzle has
        to be applied to the *source*: LDS piece u gets the piece that belongs there. A wave's pass
        fills 16 rows of a sub-block; each segment's passes are dealt in equal consecutive runs, at
        the DeepSeek-V3 shape one nope sub-block per warp and half a rope sub-block.

        >>> KSlot().write(warp=3, lane=17, step=2)     # rope sub-block 9, row 20: pieces 0, 1 swap
        Dma(key=52, column=128, lds=19728)
        """
        check_index("warp", warp, self.num_warps)
        check_index("lane", lane, WAVE)
        check_index("step", step, self.passes)
        nope_steps = self._pieces(self.depth) // self.num_warps
        if step < nope_steps:
            width, first_column, first_sub = self.depth, 0, 0
            piece = warp * nope_steps + step
        else:
            width, first_column, first_sub = self.d_rope, self.depth, self.rope_sub_id
            piece = warp * (self.passes - nope_steps) + step - nope_steps
        lds = first_sub * K_SUB_BYTES + piece * WAVE * DMA_BYTES + lane * DMA_BYTES
        sub, plain = divmod(swizzle_bytes(lds), K_SUB_BYTES)
        row_block, col_block = divmod(sub - first_sub, width // self.sub_cols)
        row, byte_in_row = divmod(plain, SUB_ROW_BYTES)
        return Dma(
            key=row_block * K_SUB_ROWS + row,
            column=first_column + col_block * self.sub_cols + byte_in_row // self.element_bytes,
            lds=lds,
        )

    def _pieces(self, columns: int) -> int:
        """Wave-sized pieces (16 rows × 64 bytes) in `columns` columns of the tile."""
        return self.kv_block * columns * self.element_bytes // (WAVE * DMA_BYTES)
