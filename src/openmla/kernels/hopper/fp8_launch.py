"""Host side of FP8 caches on Hopper: their tensors as the kernels take them."""

from __future__ import annotations

from typing import Any

import torch

from openmla.cache import V32_BLOCK, LatentCache, block_width

VECTOR_BYTES = 16
V32_SCALES = slice(128, 132)  # of a row as fp32
V32_ROPE = slice(264, 328)  # of a row as bf16


def fp8_rows(cache: LatentCache) -> dict[str, Any]:
    """Where rows and scales lie; see fp8_rows.py for the names. No bytes are copied."""
    data, scales, rope = cache.data.view(torch.float8_e4m3fn), cache.scales, None
    if cache.format == "fp8_656":
        scales = cache.data.view(torch.float32)[..., V32_SCALES]
        rope = cache.data.view(torch.bfloat16)[..., V32_ROPE]
    assert scales is not None
    end_to_end = data.shape[0] == 1 or all(
        x.stride(0) == x.shape[1] * x.stride(1) for x in (data, scales)
    )
    return {
        "data_ptr": data,
        "scale_ptr": scales,
        "rope_ptr": rope,
        "stride_page": 0 if end_to_end else data.stride(0) // VECTOR_BYTES,
        "stride_row": data.stride(1) // VECTOR_BYTES,
        "scale_page": 0 if end_to_end else scales.stride(0),
        "scale_row": scales.stride(1),
        "PAGE": 0 if end_to_end else data.shape[1],
        "SCALED": V32_BLOCK if rope is not None else block_width(cache.format, cache.width),
    }
