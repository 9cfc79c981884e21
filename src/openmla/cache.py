"""`LatentCache`: the paged key/value cache of MLA, one latent row per token, in six formats.

A row is the token's latent (which is K without rope, and V) followed by its rope part. P pages of
S rows each:

| format | data | scales | bytes per token at 512 + 64 |
|---|---|---|---|
| bf16 | bf16 [P, S, latent+rope] | - | 1152 |
| fp8_656 | uint8 [P, S, 656]: 512 e4m3, 4 fp32 scales, 64 bf16 rope | in the row | 656 |
| fp8_block32 | e4m3 [P, S, latent+rope] | fp32 [P, S, ceil(width/32)] | 648 |
| fp8_block64 | likewise | one per 64 columns | 612 |
| fp8_block128 | likewise | one per 128 columns | 596 |
| fp8_token | likewise | one per token | 580 |

The value of an FP8 element is bf16(fp32(e4m3) * scale): the product is rounded once, to bf16, and
every kernel, the reference and `gather` use that same value. A block's scale is amax/448, so its
largest element becomes the largest e4m3 number; a block of zeros has scale 1.

A slot (`slot_mapping`, `rows`) is a physical row: page * page_size + offset.

>>> cache = LatentCache.allocate(num_pages=2, page_size=4, latent=8, rope=4, format="fp8_token")
>>> cache.append(torch.ones(1, 8), torch.full((1, 4), 2.0), torch.tensor([5]))
>>> cache.gather(torch.tensor([5]))[0].tolist()
[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.errors import InvalidArgument, Unsupported
from openmla.problem import CACHE_FORMATS

E4M3_MAX = 448.0
APPEND_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# The DeepSeek-V3.2 row: 512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16 rope.
V32_LATENT, V32_ROPE, V32_BLOCK, V32_BYTES = 512, 64, 128, 656
_V32_SCALES = slice(V32_LATENT, V32_LATENT + 4 * (V32_LATENT // V32_BLOCK))
_V32_ROPE_BYTES = slice(_V32_SCALES.stop, V32_BYTES)


@dataclass(frozen=True, eq=False)
class LatentCache:
    """Paged latent rows. Build one with `allocate`, or wrap tensors you already have."""

    data: Tensor
    scales: Tensor | None
    latent: int
    rope: int
    format: str

    def __post_init__(self) -> None:
        _check_layout(self)

    @staticmethod
    def allocate(
        *,
        num_pages: int,
        page_size: int,
        latent: int = 512,
        rope: int = 64,
        format: str = "bf16",
        device: torch.device | str = "cpu",
    ) -> LatentCache:
        """A zeroed cache of num_pages * page_size rows."""
        _check_count("num_pages", num_pages, least=0)
        _check_count("page_size", page_size, least=1)
        _check_format_and_widths(format, latent, rope)
        device = _check_device(device)
        pages = (num_pages, page_size)
        scales = None
        if format == "bf16":
            data = torch.zeros(*pages, latent + rope, dtype=torch.bfloat16, device=device)
        elif format == "fp8_656":
            data = torch.zeros(*pages, V32_BYTES, dtype=torch.uint8, device=device)
        else:
            data = torch.zeros(*pages, latent + rope, dtype=torch.float8_e4m3fn, device=device)
            blocks = -(-(latent + rope) // block_width(format, latent + rope))
            scales = torch.ones(*pages, blocks, dtype=torch.float32, device=device)
        return LatentCache(data, scales, latent, rope, format)

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.data.shape[1]

    @property
    def rows(self) -> int:
        """Rows in the pool: num_pages * page_size."""
        return self.num_pages * self.page_size

    @property
    def width(self) -> int:
        """Values per row: latent + rope."""
        return self.latent + self.rope

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, scales included."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return int(self.data.nbytes + scales)

    def append(self, latent: Tensor, rope: Tensor | None, slot_mapping: Tensor) -> None:
        """Write token i's latent[i] and rope[i] to row slot_mapping[i]; quantizes as needed.

        A wrong width, dtype or (on the CPU) a slot outside the pool raises and writes nothing. On a
        GPU a token with such a slot is skipped, because looking would mean waiting for the GPU.
        Slots must differ: which of two tokens a repeated slot keeps is not defined.
        """
        rope = _check_append(self, latent, rope, slot_mapping)
        slots = slot_mapping.to(self.device)
        if self.device.type == "cuda":
            # Registered by openmla.ops, which knows the kernels; this module must not.
            torch.ops.openmla.cache_append(
                self.data, self.scales, self.format, self.latent, latent, rope, slots
            )
        else:
            self.write(latent, rope, slots)

    def write(self, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        """`append` without checks, in torch."""
        page, offset = slots // self.page_size, slots % self.page_size
        if self.format == "bf16":
            row = torch.cat([latent, rope], dim=-1) if self.rope else latent
            self.data[page, offset] = row.to(torch.bfloat16)
        elif self.format == "fp8_656":
            values, scales = quantize(latent, V32_BLOCK)
            parts = [values, scales, rope.to(torch.bfloat16).contiguous()]
            self.data[page, offset] = torch.cat([p.view(torch.uint8) for p in parts], dim=-1)
        else:
            row = torch.cat([latent, rope], dim=-1) if self.rope else latent
            values, scales = quantize(row, block_width(self.format, self.width))
            # Plain bytes: indexed writes of float8 tensors are not implemented everywhere.
            self.data.view(torch.uint8)[page, offset] = values.view(torch.uint8)
            assert self.scales is not None
            self.scales[page, offset] = scales

    def gather(self, rows: Tensor) -> Tensor:
        """The bf16 values of physical rows: [len(rows), latent+rope].

        A row outside the pool raises on the CPU and reads as zeros on a GPU.
        """
        check_rows("rows", rows, self.rows)
        if rows.device != self.device:
            raise InvalidArgument("rows", f"a tensor on {self.device}", f"one on {rows.device}")
        if self.device.type != "cuda":
            return self.read(rows)
        out = torch.empty(rows.shape[0], self.width, dtype=torch.bfloat16, device=self.device)
        torch.ops.openmla.cache_gather(self.data, self.scales, self.format, self.latent, rows, out)
        return out

    def read(self, rows: Tensor, columns: slice = slice(None)) -> Tensor:
        """`gather` without checks, for kernels; `columns` picks a part of each row."""
        if self.format == "bf16":
            return pick_rows(self.data, rows)[:, columns]
        if self.format == "fp8_656":
            raw = pick_rows(self.data, rows)
            scales = raw[:, _V32_SCALES].contiguous().view(torch.float32)
            latent = dequantize(
                raw[:, :V32_LATENT].contiguous().view(torch.float8_e4m3fn), scales, V32_BLOCK
            )
            rope = raw[:, _V32_ROPE_BYTES].contiguous().view(torch.bfloat16)
            return torch.cat([latent, rope], dim=-1)[:, columns]
        values = pick_rows(self.data.view(torch.uint8), rows).view(torch.float8_e4m3fn)
        assert self.scales is not None
        block = block_width(self.format, self.width)
        return dequantize(values, pick_rows(self.scales, rows), block)[:, columns]


def pick_rows(pages: Tensor, rows: Tensor) -> Tensor:
    """pages [P, page_size, width] -> [len(rows), width], copying just the rows asked for."""
    if pages.is_contiguous():
        return pages.view(-1, pages.shape[-1]).index_select(0, rows)
    return pages[rows // pages.shape[1], rows % pages.shape[1]]


def block_width(format: str, width: int) -> int:
    """Columns that share one scale: 32, 64, 128, or the whole row for fp8_token."""
    return width if format == "fp8_token" else int(format.removeprefix("fp8_block"))


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[n, width] -> e4m3 [n, width] and fp32 scales [n, ceil(width/block)].

    >>> q, s = quantize(torch.tensor([[448.0, 1.0, 0.0, 0.0]]), block=2)
    >>> q.float().tolist(), s.tolist()
    ([[448.0, 1.0, 0.0, 0.0]], [[1.0, 1.0]])
    """
    n, width = values.shape
    blocks = -(-width // block)
    padded = torch.nn.functional.pad(values.float(), (0, blocks * block - width))
    grouped = padded.view(n, blocks, block)
    amax = grouped.abs().amax(dim=-1)
    # amax/448 of a tiny block would round to 0 and turn its zeros into 0/0: keep scales normal.
    tiny = torch.finfo(torch.float32).tiny
    scales = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(tiny), torch.ones_like(amax))
    # Dividing by a scale rounded down could land just above 448, which e4m3 turns into NaN.
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    flat = scaled.view(n, blocks * block)[:, :width]
    return flat.to(torch.float8_e4m3fn).contiguous(), scales


def dequantize(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """e4m3 [n, width] and fp32 scales [n, blocks] -> bf16 [n, width], rounded once."""
    spread = scales.repeat_interleave(block, dim=-1)[:, : values.shape[-1]]
    return (values.float() * spread).to(torch.bfloat16)


def check_rows(name: str, rows: Tensor, limit: int) -> None:
    """Row numbers must be a 1-d integer tensor; on the CPU their values are checked too."""
    if not isinstance(rows, Tensor):
        raise InvalidArgument(name, "a tensor of row numbers", type(rows).__name__)
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise InvalidArgument(name, "int64 [tokens], physical rows", got)
    if rows.device.type == "cpu" and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise InvalidArgument(
                name, f"rows 0 to {limit - 1} (the pool has {limit})", f"row {bad}"
            )


def _check_append(
    cache: LatentCache, latent: Tensor, rope: Tensor | None, slot_mapping: Tensor
) -> Tensor:
    if rope is None and cache.rope == 0 and isinstance(latent, Tensor):
        rope = latent.new_empty(*latent.shape[:1], 0)
    for name, value, width in (("latent", latent, cache.latent), ("rope", rope, cache.rope)):
        if not isinstance(value, Tensor):
            raise InvalidArgument(name, f"a tensor [tokens, {width}]", type(value).__name__)
        if value.dim() != 2 or value.shape[1] != width:
            raise InvalidArgument(name, f"[tokens, {width}]", f"shape {tuple(value.shape)}")
        if value.dtype not in APPEND_DTYPES:
            expected = "one of " + ", ".join(str(dtype) for dtype in APPEND_DTYPES)
            raise InvalidArgument(name, expected, value.dtype)
        if value.device != cache.device:
            raise InvalidArgument(name, f"a tensor on {cache.device}", f"one on {value.device}")
        if value.requires_grad and torch.is_grad_enabled():
            raise Unsupported(
                f"{name} requires a gradient, and a cache does not carry one",
                nearest="the same call under torch.no_grad(), or with detached tensors",
            )
    assert rope is not None
    check_rows("slot_mapping", slot_mapping, cache.rows)
    tokens = latent.shape[0]
    if rope.shape[0] != tokens:
        raise InvalidArgument("rope", f"{tokens} tokens, as latent has", f"{rope.shape[0]}")
    if slot_mapping.shape[0] != tokens:
        raise InvalidArgument(
            "slot_mapping", f"{tokens} slots, one per token of latent", f"{slot_mapping.shape[0]}"
        )
    return rope


def _check_layout(cache: LatentCache) -> None:
    """The tensors must be what the format says."""
    _check_format_and_widths(cache.format, cache.latent, cache.rope)
    data, width, row_dtype = cache.data, cache.latent + cache.rope, torch.float8_e4m3fn
    if cache.format == "fp8_656":
        width, row_dtype = V32_BYTES, torch.uint8
    elif cache.format == "bf16":
        row_dtype = torch.bfloat16
    if not isinstance(data, Tensor):
        expected = f"a tensor, {row_dtype} [pages, page_size, {width}]"
        raise InvalidArgument("data", expected, type(data).__name__)
    if data.dim() != 3 or data.shape[2] != width or data.dtype != row_dtype:
        got = f"{data.dtype} of shape {tuple(data.shape)}"
        raise InvalidArgument("data", f"{row_dtype} [pages, page_size, {width}]", got)
    if data.shape[2] > 1 and data.stride(2) != 1:
        raise InvalidArgument("data", "a contiguous last dimension", f"stride {data.stride(2)}")
    if data.shape[1] == 0:
        raise InvalidArgument("data", "at least 1 row per page", f"shape {tuple(data.shape)}")
    if cache.format in ("bf16", "fp8_656"):
        if cache.scales is not None:
            raise InvalidArgument("scales", f"None for {cache.format}", "a tensor")
        return
    blocks = -(-width // block_width(cache.format, width))
    expected = (data.shape[0], data.shape[1], blocks)
    scales = cache.scales
    if not isinstance(scales, Tensor):
        raise InvalidArgument("scales", f"float32 {list(expected)}", type(scales).__name__)
    if scales.dtype != torch.float32 or tuple(scales.shape) != expected:
        got = f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise InvalidArgument("scales", f"float32 {list(expected)}", got)
    if scales.device != data.device:
        raise InvalidArgument("scales", f"a tensor on {data.device}", f"one on {scales.device}")
    if blocks > 1 and scales.stride(2) != 1:
        got = f"stride {scales.stride(2)}"
        raise InvalidArgument("scales", "a contiguous last dimension", got)


def _check_format_and_widths(format: object, latent: object, rope: object) -> None:
    if format not in CACHE_FORMATS:
        raise InvalidArgument("format", "one of " + ", ".join(CACHE_FORMATS), repr(format))
    _check_count("latent", latent, least=1)
    _check_count("rope", rope, least=0)
    if format == "fp8_656" and (latent, rope) != (V32_LATENT, V32_ROPE):
        expected = f"latent {V32_LATENT}, rope {V32_ROPE} for fp8_656"
        raise InvalidArgument("format", expected, f"latent {latent}, rope {rope}")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(name, f"an int of at least {least}", repr(value))


def _check_device(value: object) -> torch.device:
    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]
        torch.empty(0, device=device)  # "cuda" is a device everywhere, but not one that is here
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        expected = "a torch device of this machine, such as 'cpu'"
        raise InvalidArgument("device", expected, repr(value)) from None
    return device
