"""Formats of a cache row: which bytes of it hold which columns. The one place that says so.

A row is a token's latent (K without rope, and V) and its rope: latent + rope columns, stored as

    e4m3 columns | their scales, if these lie in the row | bf16 columns

Scales that do not lie in the row have a tensor of their own, `scales` beside `data`.
`ue8m0` is a power of two as its fp32 exponent, one byte: 127 is 1.0, 0 is 2^-127, 255 is NaN.

>>> print(V32.layout(512, 64))
fp8_656, 512 + 64 columns, 656 bytes
  data      0 …  511  512 e4m3
  data    512 …  527    4 fp32
  data    528 …  655   64 bf16
>>> print(V4.layout(512, 0))
fp8_584, 512 + 0 columns, 584 bytes
  data      0 …  447  448 e4m3
  data    448 …  575   64 bf16
  scales    0 …    6    7 ue8m0
  scales    7 …    7    1 byte
>>> {name: f.layout(512, 64).row_bytes for name, f in FORMATS.items() if not f.widths}
{'bf16': 1152, 'fp8_block32': 648, 'fp8_block64': 612, 'fp8_block128': 596, 'fp8_token': 580}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ELEMENT_BYTES = {"e4m3": 1, "bf16": 2, "fp32": 4, "ue8m0": 1, "byte": 1}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row is stored, whatever its widths."""

    name: str
    scale: str = ""
    """Type of the scales; empty: there are none, and all columns are bf16."""
    block: int = 0
    """Columns that share a scale; 0: all e4m3 columns of a row do."""
    bf16_columns: int = 0
    """How many of the last columns are bf16 beside e4m3."""
    scales_in_row: bool = False
    unused: int = 0
    """Bytes after the scales that hold nothing."""
    widths: tuple[tuple[int, int], ...] = ()
    """The (latent, rope) that the format exists in; empty: any."""

    def takes(self, latent: int, rope: int) -> bool:
        """Whether the format exists at these widths."""
        return not self.widths or (latent, rope) in self.widths

    def layout(self, latent: int, rope: int) -> RowLayout:
        """Where everything lies at these widths."""
        return RowLayout(self, latent, rope)


@dataclass(frozen=True, slots=True)
class Field:
    """Elements of one type, side by side in a row of the tensor `data` or `scales`."""

    tensor: str
    dtype: str
    offset: int
    """Bytes from the beginning of the row in that tensor."""
    count: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.count * ELEMENT_BYTES[self.dtype]

    def __str__(self) -> str:
        place = f"{self.tensor:<6} {self.offset:>4} … {self.end - 1:>4}"
        return f"{place} {self.count:>4} {self.dtype}"


class RowLayout(NamedTuple):
    """A format at given widths."""

    format: RowFormat
    latent: int
    rope: int

    @property
    def width(self) -> int:
        """Columns."""
        return self.latent + self.rope

    @property
    def quantized(self) -> int:
        """Columns that are e4m3, the first of the row; the others are bf16."""
        return self.width - self.format.bf16_columns if self.format.scale else 0

    @property
    def block(self) -> int:
        """Columns that share a scale; 0 without scales."""
        return self.format.block or self.quantized

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return -(-self.quantized // self.block) if self.quantized else 0

    @property
    def fields(self) -> tuple[Field, ...]:
        """All that a row has, byte after byte, those of `data` first."""
        format, ends = self.format, {"data": 0, "scales": 0}
        beside = "data" if format.scales_in_row else "scales"
        found = []
        for tensor, dtype, count in (
            ("data", "e4m3", self.quantized),
            (beside, format.scale, self.blocks),
            (beside, "byte", format.unused),
            ("data", "bf16", self.width - self.quantized),
        ):
            if count:
                found.append(Field(tensor, dtype, ends[tensor], count))
                ends[tensor] = found[-1].end
        return tuple(sorted(found, key=lambda field: field.tensor))

    def field(self, name: str) -> Field | None:
        """The field "e4m3", "bf16" or "scales", if there is one."""
        dtype = self.format.scale if name == "scales" else name
        return next((field for field in self.fields if field.dtype == dtype), None)

    @property
    def data(self) -> tuple[str, int]:
        """Type and number of elements in a row of `data`: bytes where it holds several types."""
        format = self.format
        if format.scales_in_row or format.bf16_columns:
            scales = self.blocks * ELEMENT_BYTES[format.scale] + format.unused
            scales = scales if format.scales_in_row else 0
            return "byte", self.width + format.bf16_columns + scales  # bf16 columns count twice
        return ("e4m3" if format.scale else "bf16"), self.width

    @property
    def scale_columns(self) -> int:
        """Elements in a row of `scales`, unused ones included; 0 if there is no such tensor."""
        return 0 if self.format.scales_in_row else self.blocks + self.format.unused

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, scales included."""
        return sum(field.end - field.offset for field in self.fields)

    def __str__(self) -> str:
        title = f"{self.format.name}, {self.latent} + {self.rope} columns, {self.row_bytes} bytes"
        return "\n  ".join([title, *map(str, self.fields)])


BF16 = RowFormat("bf16")
V32 = RowFormat(
    "fp8_656", "fp32", block=128, bf16_columns=64, scales_in_row=True, widths=((512, 64),)
)
"""DeepSeek-V3.2's row."""
V4 = RowFormat(
    "fp8_584", "ue8m0", block=64, bf16_columns=64, unused=1, widths=((512, 0), (448, 64))
)
"""DeepSeek-V4's row. Its last 64 columns are rope and belong to V as well: 512 + 0, unless V is to
end before them. Engines keep a page's scales behind its rows; both tensors are views of it then."""
FormatName = Literal[
    "bf16", "fp8_656", "fp8_block32", "fp8_block64", "fp8_block128", "fp8_token", "fp8_584"
]
FORMATS = {
    format.name: format
    for format in (
        BF16,
        V32,
        RowFormat("fp8_block32", "fp32", block=32),
        RowFormat("fp8_block64", "fp32", block=64),
        RowFormat("fp8_block128", "fp32", block=128),
        RowFormat("fp8_token", "fp32"),
        V4,
    )
}
