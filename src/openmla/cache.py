"""`LatentCache`: the paged key/value cache of MLA, one latent row per token.

P pages of S rows each; `openmla.formats` says what a row is, byte by byte, and which formats there
are. `data` is [P, S, elements of a row]; `scales`, if they do not lie in the row, [P, S, scales].

The value of a quantized element is bf16(fp32(element) * scale): the product is rounded once, to
bf16, and every kernel, the reference and `gather` use that same value. A block's scale is amax/448
(amax/6 for e2m1), so its largest element becomes the largest there is; fp32 scales of zeros are 1.
Other writers have other rules for small blocks: `append` takes their names.

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

from openmla.block_scaling import (
    dequantize,
    e4m3_values,
    exponents_of,
    pack,
    quantize,
    to_e4m3,
    unpack,
)
from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import ELEMENT_BITS, FORMATS, WRITERS, FormatName, RowLayout, Writer

APPEND_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e2m1": torch.uint8,
    "ue8m0": torch.uint8,
    "byte": torch.uint8,
}
"""Element types by the short names used everywhere in openmla; of e2m1, a byte holds two."""
NO_TRANSFORMS = "gradients of a call inside a transform of torch.func, such as torch.func.grad"
AUTOGRAD = "torch.autograd.grad"


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
            kind = DTYPES[layout.format.scale]
            scales = torch.ones(*shape, layout.scale_columns, dtype=kind, device=device)
        return LatentCache(data, scales, latent, rope, format)

    @staticmethod
    def from_pages(
        pages: Tensor, *, page_size: int, format: str, latent: int = 512, rope: int | None = None
    ) -> LatentCache:
        """An engine's pool where it is: bytes [pages, bytes], a page its rows and, for formats that
        keep them there, the scales of all rows behind them.

        `rope`: the format's own unless given. A page may be longer than its rows; engines round it
        up (`RowLayout.page_bytes`), or keep other layers' pages between.

        >>> pool = torch.zeros(3, 37440, dtype=torch.uint8)
        >>> cache = LatentCache.from_pages(pool, page_size=64, format="fp8_584")
        >>> cache.data.shape, cache.scales.shape, cache.scales.storage_offset()
        (torch.Size([3, 64, 576]), torch.Size([3, 64, 8]), 36864)
        """
        _check_count("page_size", page_size, least=1)
        if rope is None:
            known = FORMATS[format].widths if isinstance(format, str) and format in FORMATS else ()
            rope = next((b for a, b in known if a == latent), 64)
        _check_format_and_widths(format, latent, rope)
        layout = FORMATS[format].layout(latent, rope)
        if layout.scale_columns and layout.format.scales_lie == "tensor":
            expected = "a format whose scales lie in the row or behind the rows of a page"
            raise InvalidArgument("format", expected, format)
        return _views(_check_pages(pages, page_size * layout.row_bytes), page_size, layout)

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
        """Field "e4m3", "bf16", "scales" … of all rows, [pages, page_size, count], if it is there.

        A view: in rows of several types, its elements must be aligned. Of e2m1, bytes of two.
        """
        field = self.layout.field(name)
        tensor = None if field is None else self.data if field.tensor == "data" else self.scales
        if field is None or tensor is None:
            return None
        dtype = DTYPES[field.dtype]
        if tensor.dtype == dtype:
            return tensor[..., field.offset // dtype.itemsize : field.end // dtype.itemsize]
        return tensor.view(torch.uint8)[..., field.offset : field.end].view(dtype)

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, scales included."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return int(self.data.nbytes + scales)

    def append(
        self,
        latent: Tensor,
        rope: Tensor | None,
        slot_mapping: Tensor,
        *,
        writer: Writer = "openmla",
    ) -> None:
        """Write token i's latent[i] and rope[i] to row slot_mapping[i]; quantizes as needed.

        A wrong width, dtype or (on the CPU) a slot outside the pool raises and writes nothing. On a
        GPU a token with such a slot is skipped, because looking would mean waiting for the GPU.
        Slots must differ: which of two tokens a repeated slot keeps is not defined.

        Args:
            latent: [tokens, latent], bf16, fp16, fp32 or fp64.
            rope: [tokens, rope], or None where rows have none.
            slot_mapping: int64 or int32 [tokens], physical rows: page * page_size + offset.
            writer: whose rule chooses the scales (`RowFormat.scale_rule`), for bytes equal to those
                of FlashMLA's tests, SGLang and FlashInfer ("flash_mla") or of vLLM. They differ for
                blocks of small numbers; every reader reads all of them. FlashMLA's kernels for
                Blackwell, though, take fp32 scales to be powers of two, as its own rule makes them.

        Raises:
            InvalidArgument: a width, a dtype, or on the CPU a slot is wrong; nothing is written.
        """
        rope = _check_append(self, latent, rope, slot_mapping)
        if writer not in WRITERS:
            raise InvalidArgument("writer", "one of " + ", ".join(WRITERS), repr(writer))
        slots = slot_mapping.to(self.device)
        if self.device.type == "cuda":
            # Registered by openmla.ops, which knows the kernels; this module must not.
            torch.ops.openmla.cache_append(
                self.data, self.scales, self.format, self.latent, latent, rope, slots, writer
            )
        else:
            self.write(latent, rope, slots, writer)

    def write(
        self, latent: Tensor, rope: Tensor, slots: Tensor, writer: Writer = "openmla"
    ) -> None:
        """`append` without checks, in torch."""
        page, offset = slots // self.page_size, slots % self.page_size
        row = torch.cat([latent, rope], dim=-1) if self.rope else latent.resolve_neg()
        layout = self.layout
        if not layout.quantized:
            self.data[page, offset] = row.to(torch.bfloat16)
            return
        parts = _parts(row, layout, writer)
        # Plain bytes: indexed writes of float8 tensors are not implemented everywhere.
        if self.scales is not None:
            self.scales.view(torch.uint8)[page, offset, : parts["scales"].shape[1]] = parts[
                "scales"
            ]
        stored = [parts[field.role] for field in layout.fields if field.tensor == "data"]
        self.data.view(torch.uint8)[page, offset] = torch.cat(stored, dim=-1)

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
        raw = {"data": pick_rows(self.data.view(torch.uint8), rows)}
        if self.scales is not None:
            raw["scales"] = pick_rows(self.scales.view(torch.uint8), rows)
        parts = {
            field.role: _view_as(raw[field.tensor][:, field.offset : field.end], field.dtype)
            for field in layout.fields
        }
        scales, elements = _scale_values(parts["scales"], layout), parts["columns"]
        if layout.format.element == "e2m1":
            elements = unpack(elements)
        values = dequantize(elements, scales, layout.block)
        if "tail" in parts:
            tail = parts["tail"]
            tail = e4m3_values(tail) if tail.dtype == torch.float8_e4m3fn else tail
            values = torch.cat([values, tail.to(torch.bfloat16)], dim=-1)
        return values[:, columns]


def _parts(row: Tensor, layout: RowLayout, writer: Writer) -> dict[str, Tensor]:
    """The bytes of a row's fields by their role, [n, bytes]."""
    format = layout.format
    assert format.scale and not (format.unused and format.scales_in_row)
    columns, tail = row[:, : layout.quantized], row[:, layout.quantized :]
    rule = format.scale_rule(writer)
    elements, scales = quantize(columns, layout.block, rule, format.element, format.scale)
    if format.scale == "ue8m0":
        scales = exponents_of(scales)
    elif format.scale == "e4m3":
        scales = scales.to(torch.float8_e4m3fn)
    if format.scale_lanes:  # gathered as bytes: float8 tensors cannot be
        scales = scales.view(torch.uint8)[:, _blocks_in_order(layout, scales.device)]
    found = {
        "columns": pack(elements) if format.element == "e2m1" else elements,
        "scales": scales,
        "tail": tail.to(torch.bfloat16) if format.tail == "bf16" else to_e4m3(tail),
    }
    return {role: part.contiguous().view(torch.uint8) for role, part in found.items()}


def _view_as(stored: Tensor, dtype: str) -> Tensor:
    """Bytes [n, bytes] as elements of a type; wider ones are copied, for theirs must be aligned."""
    kind = DTYPES[dtype]
    return stored.view(kind) if kind.itemsize == 1 else stored.contiguous().view(kind)


def _scale_values(stored: Tensor, layout: RowLayout) -> Tensor:
    """The scales of blocks in their order, fp32."""
    kind = layout.format.scale
    if kind == "e4m3":
        scales = e4m3_values(stored)
    else:
        scales = (stored.view(torch.float8_e8m0fnu) if kind == "ue8m0" else stored).float()
    if layout.format.scale_lanes:
        places = torch.tensor(layout.scale_places, dtype=torch.int64, device=scales.device)
        scales = scales[:, places]
    return scales


def _blocks_in_order(layout: RowLayout, device: torch.device) -> Tensor:
    """Which block's scale lies at each place."""
    places = layout.scale_places
    order = sorted(range(layout.blocks), key=places.__getitem__)
    return torch.tensor(order, dtype=torch.int64, device=device)


def _views(pages: Tensor, page_size: int, layout: RowLayout) -> LatentCache:
    """Rows of pages of bytes and, where these have a tensor of their own, the scales behind."""
    kind, columns = layout.data
    row = columns * ELEMENT_BITS[kind] // 8
    number = pages.shape[0]
    rows = pages[:, : page_size * row].view(number, page_size, row)
    try:
        data = rows.view(DTYPES[kind])
    except RuntimeError:  # the only elements of a row that are wider than bytes
        raise InvalidArgument("pages", "pages at multiples of 2 bytes", "others") from None
    scales = None
    if layout.scale_columns:
        behind = pages[:, page_size * row : page_size * layout.row_bytes]
        scales = behind.view(number, page_size, layout.row_bytes - row)
        scales = scales.view(DTYPES[layout.format.scale])
    return LatentCache(data, scales, layout.latent, layout.rope, layout.format.name)


def require_operators(module: str) -> None:
    """Register the operators that a cache's methods call, whatever else of openmla was imported."""
    if module not in sys.modules and not torch.compiler.is_compiling():
        import_module(module)


def pick_rows(pages: Tensor, rows: Tensor) -> Tensor:
    """pages [P, page_size, width] -> [len(rows), width], copying just the rows asked for."""
    if pages.is_contiguous():
        return pages.view(-1, pages.shape[-1]).index_select(0, rows)
    return pages[rows // pages.shape[1], rows % pages.shape[1]]


def check_rows(name: str, rows: Tensor, limit: int) -> None:
    """Row numbers must be a 1-d integer tensor; on the CPU their values are checked too."""
    if not isinstance(rows, Tensor):
        raise InvalidArgument(name, "a tensor of row numbers", type(rows).__name__)
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise InvalidArgument(name, "int64 [tokens], physical rows", got)
    refuse_wrapped(name, rows)
    if rows.device.type == "cpu" and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise InvalidArgument(
                name, f"rows 0 to {limit - 1} (the pool has {limit})", f"row {bad}"
            )


def plain_memory(name: str, value: Tensor) -> None:
    """What is written to, or read as bytes, must hold its numbers, not their negatives."""
    refuse_wrapped(name, value)
    # Dynamo cannot trace the question; while it traces, torch itself refuses to write there.
    if not torch.compiler.is_compiling() and value.is_neg():
        got = "a view with torch's negative bit (is_neg)"
        raise InvalidArgument(name, "memory that holds the numbers themselves", got)


def refuse_derivatives(name: str, value: Tensor, why: str) -> None:
    """Saying so beats silently losing a gradient, or a tangent of forward-mode differentiation."""
    if torch.compiler.is_compiling():
        refuse_traced_transforms()
    if value.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient, and {why}",
            "the same call under torch.no_grad(), or with detached tensors",
        )
    refuse_tangent(name, value, why)


def refuse_traced_transforms() -> None:
    """While torch.compile traces torch.func.grad, no tensor says that it requires a gradient, and
    the call would have gradients of zero. Untraced, tensors do, and are refused or served."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise Unsupported(NO_TRANSFORMS, AUTOGRAD)


def refuse_wrapped(name: str, value: Tensor) -> None:
    """Refuse a tensor that stands for several, of which operators see neither memory nor shape:
    batched by torch.func.vmap, or one whose parts lie on several ranks."""
    if torch.compiler.is_compiling():  # `refuse_traced_transforms` says so then
        return
    if torch._C._functorch.is_batchedtensor(value):
        raise Unsupported(
            f"{name} is batched by torch.func.vmap, and openmla has no batching rules",
            "one call over all sequences, end to end",
        )
    if type(value) is not Tensor and hasattr(value, "device_mesh"):
        raise Unsupported(
            f"{name} is a DTensor, and openmla has no sharding rules",
            "torch.distributed.tensor.experimental.local_map around the call",
        )


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
        refuse_wrapped(name, value)
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


def _check_pages(pages: object, least: int) -> Tensor:
    kinds = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    if not isinstance(pages, Tensor):
        raise InvalidArgument("pages", "a tensor of bytes, [pages, bytes]", type(pages).__name__)
    if pages.dim() != 2 or pages.dtype not in kinds or pages.shape[1] < least:
        got = f"{pages.dtype} of shape {tuple(pages.shape)}"
        raise InvalidArgument("pages", f"uint8 [pages, at least {least}]", got)
    if pages.stride(1) != 1:
        raise InvalidArgument("pages", "a contiguous last dimension", f"stride {pages.stride(1)}")
    plain_memory("pages", pages)
    return pages.view(torch.uint8)


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
