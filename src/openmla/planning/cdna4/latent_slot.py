"""Latent rows in LDS on CDNA4: a row of 512 16-bit columns per 1040 bytes.

A wave copies one row at a time: 64 lanes × 16 bytes = 1024 bytes = 512 columns. Rows exactly 1024
bytes apart would start in the same bank; 16 bytes of padding move each row four banks on, so that
16 lanes that read one column piece of 16 rows cover all 64 banks.

    row 0: bytes 0 … 1023      banks 0 … 63
    row 1: bytes 1040 … 2063   starts in bank 4
    …
    row 16: bytes 16640 …      starts in bank 0 again

Both products read the same rows: K along the columns, V (the same values) along the keys.

>>> slot = LatentSlot()
>>> slot.byte(2, 5), slot.slot_bytes
(2090, 66560)
>>> slot.write(warp=3, lane=2, step=1)          # wave 3 copies rows 3, 11, 19, …
Dma(key=11, column=16, lds=11472)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE, Dma, check_index

ROW_BYTES = WAVE * DMA_BYTES
ROW_PAD = 16
ROW_STRIDE = ROW_BYTES + ROW_PAD


@dataclass(frozen=True)
class LatentSlot:
    """One slot of latent rows: where (row, column) lives, and what each lane copies."""

    rows: int = 64
    num_warps: int = 8

    element_bytes: ClassVar[int] = 2
    columns: ClassVar[int] = ROW_BYTES // 2

    @cached_property
    def slot_bytes(self) -> int:
        """Padding included."""
        return self.rows * ROW_STRIDE

    @cached_property
    def passes(self) -> int:
        """Rows that each wave copies."""
        return self.rows // self.num_warps

    def byte(self, row: int, column: int) -> int:
        """LDS byte of (row, column)."""
        check_index("row", row, self.rows)
        check_index("column", column, self.columns)
        return row * ROW_STRIDE + column * self.element_bytes

    def write(self, warp: int, lane: int, step: int) -> Dma:
        """What a lane copies: neighboring waves take neighboring rows."""
        check_index("warp", warp, self.num_warps)
        check_index("lane", lane, WAVE)
        check_index("step", step, self.passes)
        row, column = step * self.num_warps + warp, lane * DMA_BYTES // self.element_bytes
        return Dma(key=row, column=column, lds=self.byte(row, column))
