"""`LatentCache`: the paged key/value cache of MLA, one latent row per token.

P pages of S rows each; `openmla.formats` says what a row is, byte by byte, and which formats there
are. `data` is [P, S, elements of a row]; `scales`, if they do not lie in the row, [P, S, scales].

The value of an FP8 element is bf16(fp32(e4m3) * scale): the product is rounded once, to bf16, and
every kernel, the reference and `gather` use that same value. A block's scale is amax/448, so its
largest element becomes the largest e4m3 number, or the next power of two; a block of zeros has
scale 1.

A slot (`slot_mapping`, `rows`) is a physical row: page * page_size + offset.

>>> cache = LatentCache.allocate(num_pages=2, page_size=4, latent=8, rope=4, format="fp8_token")
>>> cache.append(torch.ones(1, 8), torch.full((1, 4), 2.0), torch.tensor([5]))
>>> cache.gather(torch.tensor([5]))[0].tolist()
[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import FORMATS, FormatName, RowLayout

E4M3_MAX = 448.0
APPEND_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "ue8m0": torch.uint8,
    "byte": torch.uint8,
}
"""Element types by the short names used everywhere in openmla."""


@dataclass(frozen=True, eq=False)
class LatentCache:
    """Paged latent rows. Build one with `allocate`, or wrap tensors you already have."""

    data: Tensor
    scales: Tensor | None
    latent: int
    rope: int
    format: str

    def __post_init__(self) -> None:
        require_operators("openmla.ops")
        _check_layout(self)

    def __repr__(self) -> str:
        """One line, without the rows.

        >>> LatentCache.allocate(num_pages=4, page_size=64, format="fp8_656")
        LatentCache(fp8_656, 512 + 64, 4 pages of 64 rows, cpu)
        """
        where = f"{self.num_pages} pages of {self.page_size} rows, {self.device}"
        return f"LatentCache({self.format}, {self.latent} + {self.rope}, {where})"

    @staticmethod
    def allocate(
        *,
        num_pages: int,
        page_size: int,
        latent: int = 512,
        rope: int = 64,
        format: FormatName = "bf16",
        device: torch.device | str = "cpu",
    ) -> LatentCache:
        """A zeroed cache of num_pages * page_size rows.

        Args:
            num_pages: pages in the pool.
            page_size: rows per page.
            latent: columns of a row without rope: K without rope, and V.
            rope: columns of rope, 0 if there are none.
            format: what a row is, byte by byte: one of openmla.formats.FORMATS.
            device: where the rows live.

        Raises:
            InvalidArgument: there is no such format, it has no such widths, or a number is wrong.
        """
        _check_count("num_pages", num_pages, least=0)
        _check_count("page_size", page_size, least=1)
        _check_format_and_widths(format, latent, rope)
        device = _check_device(device)
        layout = FORMATS[format].layout(latent, rope)
        shape, scales = (num_pages, page_size), None
        dtype, columns = layout.data
        data = torch.zeros(*shape, columns, dtype=DTYPES[dtype], device=device)
        if layout.scale_columns:
            scales = torch.ones(
                *shape, layout.scale_columns, dtype=DTYPES[layout.format.scale], device=device
            )
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
    def layout(self) -> RowLayout:
        """Where the columns of a row lie."""
        return FORMATS[self.format].layout(self.latent, self.rope)

    def field(self, name: str) -> Tensor | None:
        """Field "e4m3", "bf16" or "scales" of all rows, [pages, page_size, count], if it is there.

        A view: in rows of several types, its elements must be aligned.
        """
        field = self.layout.field(name)
        tensor = None if field is None else self.data if field.tensor == "data" else self.scales
        if field is None or tensor is None:
            return None
        if tensor.dtype == DTYPES[field.dtype]:
            return tensor[..., : field.count]
        return tensor.view(torch.uint8)[..., field.offset : field.end].view(DTYPES[field.dtype])

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

        Args:
            latent: [tokens, latent], bf16, fp16, fp32 or fp64.
            rope: [tokens, rope], or None where rows have none.
            slot_mapping: int64 or int32 [tokens], physical rows: page * page_size + offset.

        Raises:
            InvalidArgument: a width, a dtype, or on the CPU a slot is wrong; nothing is written.
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
        row = torch.cat([latent, rope], dim=-1) if self.rope else latent.resolve_neg()
        layout = self.layout
        plain = row[:, layout.quantized :].to(torch.bfloat16)
        if not layout.quantized:
            self.data[page, offset] = plain
            return
        exponents = layout.format.scale == "ue8m0"
        values, scales = quantize(row[:, : layout.quantized], layout.block, exponents)
        if exponents:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        parts = [values, plain]
        if self.scales is None:
            parts.insert(1, scales)
        else:
            self.scales[page, offset, : layout.blocks] = scales
        # Plain bytes: indexed writes of float8 tensors are not implemented everywhere.
        stored = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
        self.data.view(torch.uint8)[page, offset] = stored

    def gather(self, rows: Tensor) -> Tensor:
        """The bf16 values of physical rows: [len(rows), latent+rope].

        A row outside the pool raises on the CPU and reads as zeros on a GPU.

        Args:
            rows: int64 or int32 [n], physical rows: page * page_size + offset.

        Raises:
            InvalidArgument: no such tensor, another device, or on the CPU a row that is not there.
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
        layout = self.layout
        if not layout.quantized:
            return pick_rows(self.data, rows)[:, columns]
        raw = pick_rows(self.data.view(torch.uint8), rows)
        parts = {  # copied, because a view as another type must be aligned
            field.dtype: raw[:, field.offset : field.end].contiguous().view(DTYPES[field.dtype])
            for field in layout.fields
            if field.tensor == "data"
        }
        if self.scales is not None:
            parts[layout.format.scale] = pick_rows(self.scales, rows)
        scales = parts[layout.format.scale]
        if layout.format.scale == "ue8m0":
            scales = scales.view(torch.float8_e8m0fnu).float()
        values = dequantize(parts["e4m3"], scales, layout.block)
        if "bf16" in parts:
            values = torch.cat([values, parts["bf16"]], dim=-1)
        return values[:, columns]


def require_operators(module: str) -> None:
    """Register the operators that a cache's methods call, whatever else of openmla was imported."""
    if module not in sys.modules and not torch.compiler.is_compiling():
        import_module(module)


def pick_rows(pages: Tensor, rows: Tensor) -> Tensor:
    """pages [P, page_size, width] -> [len(rows), width], copying just the rows asked for."""
    if pages.is_contiguous():
        return pages.view(-1, pages.shape[-1]).index_select(0, rows)
    return pages[rows // pages.shape[1], rows % pages.shape[1]]


def quantize(values: Tensor, block: int, powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
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
    if powers_of_two:  # up to the next one: the mantissa carries into the exponent
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
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


def plain_memory(name: str, value: Tensor) -> None:
    """What is written to, or read as bytes, must hold its numbers, not their negatives."""
    # Dynamo cannot trace the question; while it traces, torch itself refuses to write there.
    if not torch.compiler.is_compiling() and value.is_neg():
        got = "a view with torch's negative bit (is_neg)"
        raise InvalidArgument(name, "memory that holds the numbers themselves", got)


def refuse_derivatives(name: str, value: Tensor, why: str) -> None:
    """Saying so beats silently losing a gradient, or a tangent of forward-mode differentiation."""
    if value.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient, and {why}",
            "the same call under torch.no_grad(), or with detached tensors",
        )
    refuse_tangent(name, value, why)


def refuse_tangent(name: str, value: Tensor, why: str) -> None:
    """Refuse a tangent of forward mode: openmla computes none."""
    tangent = _tangent(value)
    if tangent:
        raise Unsupported(
            f"{name} {tangent}, and {why}",
            "the same call under torch.inference_mode(), or with primals of forward_ad.unpack_dual",
        )


def _tangent(value: Tensor) -> str:
    """What there is of a tangent, in words; torch.func.jvp is a level of forward_ad too."""
    if forward_ad._current_level < 0:
        return ""
    if torch.compiler.is_compiling():
        return "may have a tangent of forward-mode differentiation, which torch.compile hides"
    if not torch._C._is_fwd_grad_enabled():
        return ""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(value) and functorch.maybe_current_level() != 1:
        return "may have a tangent of forward-mode differentiation, of an outer transform"
    if forward_ad.unpack_dual(value).tangent is None:  # type: ignore[no-untyped-call]
        return ""
    return "has a tangent of forward-mode differentiation"


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
        refuse_derivatives(name, value, "a cache does not carry one")
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
    data, layout = cache.data, cache.layout
    dtype, width = layout.data
    row_dtype = DTYPES[dtype]
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
    plain_memory("data", data)
    if not layout.scale_columns:
        if cache.scales is not None:
            raise InvalidArgument("scales", f"None for {cache.format}", "a tensor")
        return
    shape, scales = (data.shape[0], data.shape[1], layout.scale_columns), cache.scales
    scale_dtype = DTYPES[layout.format.scale]
    if not isinstance(scales, Tensor):
        raise InvalidArgument("scales", f"{scale_dtype} {list(shape)}", type(scales).__name__)
    if scales.dtype != scale_dtype or tuple(scales.shape) != shape:
        got = f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise InvalidArgument("scales", f"{scale_dtype} {list(shape)}", got)
    if scales.device != data.device:
        raise InvalidArgument("scales", f"a tensor on {data.device}", f"one on {scales.device}")
    plain_memory("scales", scales)
    if shape[2] > 1 and scales.stride(2) != 1:
        got = f"stride {scales.stride(2)}"
        raise InvalidArgument("scales", "a contiguous last dimension", got)


def _check_format_and_widths(format: object, latent: object, rope: object) -> None:
    found = FORMATS.get(format) if isinstance(format, str) else None
    if found is None:
        raise InvalidArgument("format", "one of " + ", ".join(FORMATS), repr(format))
    _check_count("latent", latent, least=1)
    _check_count("rope", rope, least=0)
    if found.widths and (latent, rope) not in found.widths:
        which = " or ".join(f"latent {a}, rope {b}" for a, b in found.widths)
        expected = f"{which} for {format}"
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
