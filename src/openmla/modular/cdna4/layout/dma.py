"""Words shared by the LDS maps: a wave, a copy, a range check. A leaf of the layout package."""

from dataclasses import dataclass

from openmla.errors import InvalidArgument

#: Lanes of one CDNA4 wave.
WAVE = 64

#: Bytes one lane copies from global memory to LDS with one instruction. The instruction writes the
#: wave's 64 pieces back to back: lane l lands at base + 16·l, and only the base can be chosen.
DMA_BYTES = 16


@dataclass(frozen=True)
class Dma:
    """One lane's copy: 16 bytes of row `key`, from element `column` on, to LDS byte `lds`."""

    key: int
    column: int
    lds: int

    def gmem(self, row_stride: int, element_bytes: int = 1) -> int:
        """Source byte in a tile whose rows are `row_stride` elements apart.

        >>> Dma(key=4, column=16, lds=0).gmem(576)       # rows of the 576-wide latent cache
        2320
        """
        return (self.key * row_stride + self.column) * element_bytes


def check_index(name: str, value: int, end: int | None = None) -> None:
    """Raise unless 0 <= value (< end, where there is one)."""
    if value < 0 or (end is not None and value >= end):
        expected = "0 or more" if end is None else f"0 to {end - 1}"
        raise InvalidArgument(name, expected, value)
