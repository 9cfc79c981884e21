"""Rows of e4m3 with one scale per token, on a GPU, plain Triton: one pass over memory.

| a program computes | reads | writes |
|---|---|---|
| one token | its heads, and its rope if there is one | e4m3 of both, one scale |

The whole token stays in registers between the search for its largest value and the rounding. Values
are multiplied by 448 / amax, so there is one division per token. Bits are those of the CPU's
`quantize_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.kernels.call import PLAIN_LAUNCH
from openmla.kernels.portable.cache_ops import E4M3_MAX, e4m3_bits
from openmla.kernels.portable.formats import next_power_of_2
from openmla.kernels.portable.records import TokenTile

VALUES_PER_THREAD, MOST_WARPS = 32, 16
LEAST_AMAX = tl.constexpr(2.0**-117)  # keeps the scale a normal number, and 448 / amax finite
NATIVE = (8, 9)  # the first chip that converts to e4m3


@triton.jit
def _largest(x):
    """The largest magnitude of a tile; NaN is not counted."""
    return tl.max(tl.max(tl.where(x == x, tl.abs(x), 0.0), 1), 0)


@triton.jit
def _store(pointers, x, inverse, inside, NATIVE: tl.constexpr):
    """x * inverse as e4m3 in ±448, or the one NaN without a sign, which differs between chips."""
    scaled = x * inverse
    clamped = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
    scaled = tl.where(scaled == scaled, clamped, float("nan"))
    if NATIVE:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = e4m3_bits(scaled)
    tl.store(pointers, code, mask=inside)


@triton.jit
def quantize_kernel(  # noqa: PLR0913
    x_ptr,
    rope_ptr,
    x_out_ptr,
    rope_out_ptr,
    scale_ptr,
    x_stride_t,
    x_stride_h,
    rope_stride_t,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize one token. TILE: TokenTile."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TILE.heads)[:, None]
    column = tl.arange(0, TILE.columns)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    here = x_ptr + token * x_stride_t + head * tl.cast(x_stride_h, tl.int64) + column
    x = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    amax = _largest(x)
    if rope_ptr is not None:
        at = tl.arange(0, TILE.rope)[None, :]
        kept = at < ROPE
        rope = tl.load(rope_ptr + token * rope_stride_t + at, mask=kept, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, _largest(rope))
    known = tl.maximum(amax, LEAST_AMAX)
    inverse = tl.where(amax > 0.0, tl.math.div_rn(E4M3_MAX, known), 1.0)
    scale = tl.where(amax > 0.0, tl.math.div_rn(known, E4M3_MAX), 1.0)
    tl.store(scale_ptr + token, scale)
    out = x_out_ptr + token * (HEADS * WIDTH) + head * WIDTH + column
    _store(out, x, inverse, inside, NATIVE)
    if rope_ptr is not None:
        _store(rope_out_ptr + token * ROPE + at, rope, inverse, kept, NATIVE)


def quantize(x: Tensor, rope: Tensor | None, outs: list[Tensor], scale: Tensor) -> None:
    """x [tokens, heads, width] and rope [tokens, columns] into e4m3 `outs` of the same shapes."""
    tokens, heads, width = x.shape
    if not tokens:
        return
    tile = TokenTile(heads=next_power_of_2(heads), columns=next_power_of_2(width), rope=1)
    more: dict[str, Any] = {"rope_ptr": None, "rope_out_ptr": None, "rope_stride_t": 0, "ROPE": 0}
    if rope is not None:
        tile = tile._replace(rope=next_power_of_2(rope.shape[1]))
        more = {
            "rope_ptr": rope,
            "rope_out_ptr": outs[1].view(torch.uint8),
            "rope_stride_t": rope.stride(0),
            "ROPE": rope.shape[1],
        }
    warps = min(max(tile.heads * tile.columns // (32 * VALUES_PER_THREAD), 1), MOST_WARPS)
    quantize_kernel[(tokens,)](
        x_ptr=x,
        x_out_ptr=outs[0].view(torch.uint8),
        scale_ptr=scale,
        x_stride_t=x.stride(0),
        x_stride_h=x.stride(1),
        **more,
        HEADS=heads,
        WIDTH=width,
        TILE=tile,
        NATIVE=_native(x.device),
        **{**PLAIN_LAUNCH, "num_warps": warps},
    )


def _native(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= NATIVE
