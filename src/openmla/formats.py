"""Formats of a cache row: which bytes of it hold which columns. The one place that says so.

A row is a token's latent (K without rope, and V) and its rope: latent + rope columns, stored as

    e4m3 columns | their scales, if these lie in the row | bf16 columns

Scales that do not lie in the row have a tensor of their own, `scales` beside `data`.

>>> print(V32.layout(512, 64))
fp8_656, 512 + 64 columns, 656 bytes
  data      0 …  511  512 e4m3
  data    512 …  527    4 fp32
  data    528 …  655   64 bf16
>>> {name: f.layout(512, 64).row_bytes for name, f in FORMATS.items() if not f.widths}
{'bf16': 1152, 'fp8_block32': 648, 'fp8_block64': 612, 'fp8_block128': 596, 'fp8_token': 580}
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

ELEMENT_BYTES = {"e4m3": 1, "bf16": 2, "fp32": 4, "byte": 1}


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
        return _fields(self)

    def field(self, name: str) -> Field | None:
        """The field "e4m3", "bf16" or "scales", if there is one."""
        dtype = self.format.scale if name == "scales" else name
        return next((field for field in self.fields if field.dtype == dtype), None)

    @property
    def data(self) -> tuple[str, int]:
        """Type and number of elements in a row of `data`: bytes where it holds several types."""
        fields = [field for field in self.fields if field.tensor == "data"]
        return (fields[0].dtype, fields[0].count) if len(fields) == 1 else ("byte", fields[-1].end)

    @property
    def scale_columns(self) -> int:
        """Elements in a row of `scales`; 0 if there is no such tensor."""
        return sum(field.count for field in self.fields if field.tensor == "scales")

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, scales included."""
        return sum(field.end - field.offset for field in self.fields)

    def __str__(self) -> str:
        title = f"{self.format.name}, {self.latent} + {self.rope} columns, {self.row_bytes} bytes"
        return "\n  ".join([title, *map(str, self.fields)])


@lru_cache(maxsize=256)
def _fields(layout: RowLayout) -> tuple[Field, ...]:
    format, ends = layout.format, {"data": 0, "scales": 0}
    beside = "data" if format.scales_in_row else "scales"
    found = []
    for tensor, dtype, count in (
        ("data", "e4m3", layout.quantized),
        (beside, format.scale, layout.blocks),
        ("data", "bf16", layout.width - layout.quantized),
    ):
        if count:
            found.append(Field(tensor, dtype, ends[tensor], count))
            ends[tensor] = found[-1].end
    return tuple(sorted(found, key=lambda field: field.tensor))


BF16 = RowFormat("bf16")
V32 = RowFormat(
    "fp8_656", "fp32", block=128, bf16_columns=64, scales_in_row=True, widths=((512, 64),)
)
"""DeepSeek-V3.2's row."""
FORMATS = {
    format.name: format
    for format in (
        BF16,
        V32,
        RowFormat("fp8_block32", "fp32", block=32),
        RowFormat("fp8_block64", "fp32", block=64),
        RowFormat("fp8_block128", "fp32", block=128),
        RowFormat("fp8_token", "fp32"),
    )
}
