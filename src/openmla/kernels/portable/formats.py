"""How operands look to the portable kernels: cache rows, tensors and strides."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.portable.records import PLAIN_ROW, CacheRow

_WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def next_power_of_2(n: int) -> int:
    """The least power of two not below n.

    >>> next_power_of_2(18), next_power_of_2(64)
    (32, 64)
    """
    return 1 << max(n - 1, 0).bit_length()


def row_constants(cache: LatentCache | Tensor) -> CacheRow:
    """Rows as the kernels' constant ROW describes them."""
    if isinstance(cache, Tensor) or not cache.layout.quantized:
        return PLAIN_ROW
    layout, data = cache.layout, cache.data
    format = layout.format
    places = {field.role: field.offset for field in layout.fields if field.tensor == "data"}
    wide = format.bf16_columns or (format.scales_in_row and format.scale == "fp32")
    anywhere = any(n % 4 for n in (data.data_ptr(), data.stride(0), data.stride(1)))
    return CacheRow(
        quantized=layout.quantized,
        scale_block=layout.block,
        scales_at=places.get("scales", 0),
        tail_at=places.get("tail", 0),
        is_unaligned=bool(wide and anywhere),
        has_exponents=format.scale == "ue8m0",
        has_e4m3_scales=format.scale == "e4m3",
        scale_lanes=format.scale_lanes or 1,
        is_fp4=format.element == "e2m1",
        has_e4m3_tail=format.tail == "e4m3",
    )


def row_tensors(cache: LatentCache | Tensor, native_e4m3: bool) -> tuple[Tensor, Tensor | None]:
    """(data, scales); e4m3 as such, or its bits where Triton does not convert it; FP4 as bytes."""
    if isinstance(cache, Tensor):
        return as_operand(cache, native_e4m3), None
    if not cache.layout.quantized:
        return cache.data, None
    fp8 = native_e4m3 and cache.layout.format.element == "e4m3"
    kind = torch.float8_e4m3fn if fp8 else torch.uint8
    scales = None if cache.scales is None else as_operand(cache.scales, native_e4m3)
    return cache.data if cache.data.dtype == kind else cache.data.view(kind), scales


def as_operand(x: Tensor, native_e4m3: bool) -> Tensor:
    """x, or the bits of an e4m3 tensor."""
    return x if native_e4m3 or x.dtype != torch.float8_e4m3fn else x.view(torch.uint8)


def row_strides(data: Tensor, scales: Tensor | None) -> dict[str, int]:
    """Strides of [pages, page_size, …] tensors, or of plain rows, by the kernels' names."""
    paged = data.dim() == 3
    return {
        "data_stride_page": data.stride(0) if paged else 0,
        "data_stride_t": data.stride(1) if paged else data.stride(0),
        "scale_stride_page": 0 if scales is None else scales.stride(0),
        "scale_stride_t": 0 if scales is None else scales.stride(1),
    }


def operand_type(dtype: torch.dtype) -> Any:
    """The type tl.dot multiplies. e4m3 numbers are bf16 numbers, exactly.

    They are fp16 numbers too, but P has the type of V, and fp16 flushes weights below 2^-25 to 0:
    all that a column holds when the heavy keys have zeros there.
    """
    return _WIDE.get(dtype, tl.bfloat16)


def row_type(cache: LatentCache | Tensor) -> Any:
    """The type tl.dot multiplies rows as; rows of a cache are bf16 by definition."""
    return operand_type(cache.dtype) if isinstance(cache, Tensor) else tl.bfloat16
