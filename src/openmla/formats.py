"""Formats of a cache row: which bytes of it hold which columns. The one place that says so.

A row is a token's latent (K without rope, and V) and its rope: latent + rope columns, stored as

    quantized columns | their scales, if these lie in the row | the tail, columns without scales

or with the scales after the tail. Scales that do not lie in the row have a tensor of their own,
`scales` beside `data`; where engines keep them behind the rows of a page, both are views of it.

    e4m3    8 bits, at most 448; `S.1111.111` is NaN
    e2m1    4 bits, 0 0.5 1 1.5 2 3 4 6 and a sign; column 2i is the low half of byte i
    ue8m0   a power of two as its fp32 exponent, one byte: 127 is 1.0, 0 is 2^-127, 255 is NaN

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
>>> print(NVFP4.layout(512, 64))
nvfp4_352, 512 + 64 columns, 352 bytes
  data      0 …  255  512 e2m1
  data    256 …  319   64 e4m3
  data    320 …  351   32 e4m3
>>> {name: f.layout(512, 64).row_bytes for name, f in FORMATS.items() if not f.widths}
{'bf16': 1152, 'fp8_block32': 648, 'fp8_block64': 612, 'fp8_block128': 596, 'fp8_token': 580}
>>> [V4.layout(512, 0).page_bytes(rows) for rows in (2, 64, 256)]
[1728, 37440, 149760]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Element = Literal["bf16", "e4m3", "e2m1"]
ScaleType = Literal["fp32", "ue8m0", "e4m3"]
ScalePlace = Literal["row", "page", "tensor"]
"""Scales lie in the row, behind the rows of a page, or in a tensor that only openmla knows."""
Writer = Literal["openmla", "flash_mla", "vllm"]
"""Whose bytes `LatentCache.append` writes, where writers choose scales differently."""
FormatName = Literal[
    "bf16",
    "fp8_656",
    "fp8_block32",
    "fp8_block64",
    "fp8_block128",
    "fp8_token",
    "fp8_584",
    "fp8_528_v32",
    "fp8_528_v41",
    "fp8_528_v41_split",
    "fp4_288",
    "fp4_288_split",
    "nvfp4_352",
]
Role = Literal["columns", "scales", "unused", "tail"]

WRITERS: tuple[Writer, ...] = get_args(Writer)
ELEMENT_BITS = {"e2m1": 4, "e4m3": 8, "bf16": 16, "fp32": 32, "ue8m0": 8, "byte": 8}
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
"""What the largest number of a block becomes, before it is rounded."""
FP32_TINY = 2.0**-126
E4M3_TINY = 2.0**-9


class ScaleRule(NamedTuple):
    """How a writer makes the scale of a block from its largest magnitude, amax.

    scale = max(amax, least_amax) / largest element, then within least … most, then rounded: up to a
    power of two, or to the nearest number of the scales' type.
    """

    least: float
    most: float = float("inf")
    least_amax: float = 0.0
    zero_is_one: bool = False
    """A block of zeros has scale 1."""
    powers_of_two: bool = False


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row is stored, whatever its widths."""

    name: str
    element: Element
    """Type of the columns before the tail."""
    scale: ScaleType | Literal[""] = ""
    """Type of their scales; empty: there are none."""
    block: int = 0
    """Columns that share a scale; 0: all those of a row do."""
    scales_lie: ScalePlace = "tensor"
    scale_lanes: int = 0
    """Scales are transposed: those of blocks b, b + lanes, b + 2 lanes … lie side by side."""
    unused: int = 0
    """Bytes after the scales that hold nothing."""
    tail: Element = "bf16"
    """Type of the last columns, which have no scales."""
    tail_columns: int = 0
    scales_last: bool = False
    """Scales in the row lie after the tail, rather than before it."""
    page_multiple: int = 1
    """Bytes that engines round pages up to a multiple of."""
    widths: tuple[tuple[int, int], ...] = ()
    """The (latent, rope) that the format exists in; empty: any."""

    @property
    def scales_in_row(self) -> bool:
        """Whether scales are bytes of the row itself."""
        return self.scales_lie == "row"

    @property
    def bf16_columns(self) -> int:
        """How many of the last columns are bf16 beside quantized ones."""
        return self.tail_columns if self.tail == "bf16" else 0

    def takes(self, latent: int, rope: int) -> bool:
        """Whether the format exists at these widths."""
        return not self.widths or (latent, rope) in self.widths

    def layout(self, latent: int, rope: int) -> RowLayout:
        """Where everything lies at these widths."""
        return RowLayout(self, latent, rope)

    def scale_rule(self, writer: Writer = "openmla") -> ScaleRule:
        """How scales are chosen. Writers differ for small blocks, and FlashMLA's has fp32 scales
        that are powers of two, as its Blackwell kernels demand; e4m3 scales have one rule.

        >>> V32.scale_rule().powers_of_two, V32.scale_rule("flash_mla").powers_of_two
        (False, True)
        >>> V41_FP4.scale_rule("vllm") == V41_FP4.scale_rule()
        True
        """
        exponents = self.scale == "ue8m0"
        if self.scale == "e4m3":
            return ScaleRule(least=E4M3_TINY, most=LARGEST["e4m3"])
        if writer == "flash_mla":
            return ScaleRule(least=1e-4, powers_of_two=True)
        if writer == "vllm":
            least_amax = 1e-4 if exponents else 0.0
            return ScaleRule(FP32_TINY, least_amax=least_amax, powers_of_two=exponents)
        return ScaleRule(FP32_TINY, zero_is_one=True, powers_of_two=exponents)


@dataclass(frozen=True, slots=True)
class Field:
    """Elements of one type, side by side in a row of the tensor `data` or `scales`."""

    role: Role
    tensor: str
    dtype: str
    offset: int
    """Bytes from the beginning of the row in that tensor."""
    count: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.count * ELEMENT_BITS[self.dtype] // 8

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
        """Columns that have scales, the first of the row."""
        return self.width - self.format.tail_columns if self.format.scale else 0

    @property
    def block(self) -> int:
        """Columns that share a scale; 0 without scales."""
        return self.format.block or self.quantized

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return -(-self.quantized // self.block) if self.quantized else 0

    @property
    def scale_places(self) -> tuple[int, ...]:
        """Where the scale of each block lies, counted in scales.

        >>> NVFP4.layout(512, 64).scale_places[:6]
        (0, 8, 16, 24, 1, 9)
        """
        lanes = self.format.scale_lanes or 1
        return tuple(b % lanes * (self.blocks // lanes) + b // lanes for b in range(self.blocks))

    @property
    def fields(self) -> tuple[Field, ...]:
        """All that a row has, byte after byte, those of `data` first."""
        format, ends = self.format, {"data": 0, "scales": 0}
        beside = "data" if format.scales_in_row else "scales"
        tail = format.tail_columns
        columns = ("columns", "data", format.element, self.width - tail)
        scales = [
            ("scales", beside, format.scale, self.blocks),
            ("unused", beside, "byte", format.unused),
        ]
        last = [("tail", "data", format.tail, tail)]
        found = []
        order = [*last, *scales] if format.scales_last else [*scales, *last]
        for role, tensor, dtype, count in (columns, *order):
            if count:
                found.append(Field(role, tensor, dtype, ends[tensor], count))  # type: ignore[arg-type]
                ends[tensor] = found[-1].end
        return tuple(sorted(found, key=lambda field: field.tensor))

    def field(self, name: str) -> Field | None:
        """The field of a role, or of a type that columns have: "scales", "tail", "e4m3" …"""
        return next(
            (f for f in self.fields if f.role == name or (f.dtype == name and f.role != "scales")),
            None,
        )

    @property
    def data(self) -> tuple[str, int]:
        """Type and number of elements in a row of `data`: bytes where it holds several types, or
        two columns in one."""
        first, *more = (field for field in self.fields if field.tensor == "data")
        if more or ELEMENT_BITS[first.dtype] < 8:
            return "byte", (more or [first])[-1].end
        return first.dtype, first.count

    @property
    def scale_columns(self) -> int:
        """Elements in a row of `scales`, unused ones included; 0 if there is no such tensor."""
        return 0 if self.format.scales_in_row else self.blocks + self.format.unused

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, scales included."""
        return sum(field.end - field.offset for field in self.fields)

    def page_bytes(self, page_size: int) -> int:
        """Bytes from page to page where engines keep rows, and scales behind them."""
        multiple = self.format.page_multiple
        return -(-page_size * self.row_bytes // multiple) * multiple

    def __str__(self) -> str:
        title = f"{self.format.name}, {self.latent} + {self.rope} columns, {self.row_bytes} bytes"
        return "\n  ".join([title, *map(str, self.fields)])


BF16 = RowFormat("bf16", "bf16")
V32 = RowFormat(
    "fp8_656", "e4m3", "fp32", block=128, scales_lie="row", tail_columns=64, widths=((512, 64),)
)
"""DeepSeek-V3.2's row."""
V4 = RowFormat(
    "fp8_584",
    "e4m3",
    "ue8m0",
    block=64,
    scales_lie="page",
    unused=1,
    tail_columns=64,
    page_multiple=576,
    widths=((512, 0), (448, 64)),
)
"""DeepSeek-V4's row. Its last 64 columns are rope and belong to V as well: 512 + 0, unless V is to
end before them. Engines keep a page's scales behind its rows; both tensors are views of it then."""
WITHOUT_ROPE = ((512, 0),)
V32_NO_ROPE = RowFormat(
    "fp8_528_v32", "e4m3", "fp32", block=128, scales_lie="row", widths=WITHOUT_ROPE
)
"""DeepSeek-V3.2's row without its rope: GLM-5.3-Flash."""
V41 = RowFormat("fp8_528_v41", "e4m3", "ue8m0", block=32, scales_lie="row", widths=WITHOUT_ROPE)
"""DeepSeek-V4.1's window row: all columns are quantized, the rotated ones too, and belong to V."""
V41_SPLIT = RowFormat(
    "fp8_528_v41_split",
    "e4m3",
    "ue8m0",
    block=32,
    scales_lie="page",
    page_multiple=512,
    widths=WITHOUT_ROPE,
)
V41_FP4 = RowFormat("fp4_288", "e2m1", "e4m3", block=16, scales_lie="row", widths=WITHOUT_ROPE)
"""DeepSeek-V4.1's compressed row."""
V41_FP4_SPLIT = RowFormat(
    "fp4_288_split",
    "e2m1",
    "e4m3",
    block=16,
    scales_lie="page",
    page_multiple=256,
    widths=WITHOUT_ROPE,
)
NVFP4 = RowFormat(
    "nvfp4_352",
    "e2m1",
    "e4m3",
    block=16,
    scales_lie="row",
    scale_lanes=4,
    tail="e4m3",
    tail_columns=64,
    scales_last=True,
    widths=((512, 64),),
)
"""`nvfp4_ds_mla` of vLLM. Rope is e4m3 without a scale."""
FORMATS = {
    format.name: format
    for format in (
        BF16,
        V32,
        RowFormat("fp8_block32", "e4m3", "fp32", block=32),
        RowFormat("fp8_block64", "e4m3", "fp32", block=64),
        RowFormat("fp8_block128", "e4m3", "fp32", block=128),
        RowFormat("fp8_token", "e4m3", "fp32"),
        V4,
        V32_NO_ROPE,
        V41,
        V41_SPLIT,
        V41_FP4,
        V41_FP4_SPLIT,
        NVFP4,
    )
}
