"""FP8 operands of the calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla import checks, ops
from openmla.errors import InvalidArgument

__all__ = ["quantize"]

assert ops.FORMS  # importing ops registers torch.ops.openmla.*


def quantize(x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, ...]:
    """e4m3 with one scale per token, in one pass: what a call with q_scale and k_scale takes.

    Returns x, rope if it was given, and the scales, fp32 [tokens]. A token's largest value becomes
    448, and its scale is that value / 448, or 1 where all are 0. NaN stays NaN, and infinities
    become NaN.

    Args:
        x: [tokens, heads, width], bf16, fp16 or fp32, columns contiguous.
        rope: [tokens, columns] that share the scale of their token.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not go together.
        Unsupported: a tensor requires gradients.

    >>> k_nope, k_rope = torch.randn(5, 16, 128), torch.randn(5, 64)
    >>> k_nope, k_rope, k_scale = quantize(k_nope, k_rope)
    >>> k_nope.dtype, k_scale.shape
    (torch.float8_e4m3fn, torch.Size([5]))
    """
    x = _wide_rows("x", x, ("tokens", "heads", "width"))
    parts = [x]
    if rope is not None:
        parts.append(_wide_rows("rope", rope, (x.shape[0], "columns"), x))
    checks.no_gradients(x=x, rope=rope)
    outs = [torch.empty(p.shape, dtype=torch.float8_e4m3fn, device=x.device) for p in parts]
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    torch.ops.openmla.quantize(parts, outs, scale)
    return (*outs, scale)


def _wide_rows(
    name: str, value: object, shape: Sequence[int | str], like: Tensor | None = None
) -> Tensor:
    """Numbers to be quantized, of the type and on the device of others where there are any."""
    dtypes = checks.Q_DTYPES[:3] if like is None else (like.dtype,)
    rows = checks.tensor(name, value, shape, dtypes, None if like is None else like.device)
    if not all(rows.shape[1:]):
        raise InvalidArgument(name, "at least one value per token", checks.describe(rows))
    checks.last_dim_contiguous(name, rows)
    return rows
