"""An indexer's queries in e4m3, where vLLM's own kernels for them do not run; nothing needs vLLM.

They are Triton's: there is none of it on a CPU, and before SM89 it does not convert to e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.integrations.vllm.forward import E4M3_MAX


def quantize_queries(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`per_token_group_quant_fp8`: e4m3 [.., columns] and a scale for each group of columns.

    >>> x = torch.tensor([[1.0, -3.5, 0.25, 0.0]])
    >>> q, scale = quantize_queries(x, 2, use_ue8m0=True)
    >>> scale.tolist(), (q.float().view(2, 2) * scale.view(2, 1)).tolist()
    ([[0.0078125, 0.0009765625]], [[1.0, -3.5], [0.25, 0.0]])
    """
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(eps) / E4M3_MAX
    if use_ue8m0:  # the next power of two
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    quantized = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized.flatten(-2), scale.squeeze(-1)


def rotate_and_quantize(
    positions: Tensor,
    q: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """`fused_indexer_q_rope_quant`: queries rotated and in e4m3, and weights with all factors.

    q [tokens, heads, columns], the first of which are rotated; weights [tokens, heads]. A head of a
    token has one scale, a power of two, which goes into its weight.

    >>> turn = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])  # cosines, then sines
    >>> q = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 448.0]]])
    >>> for is_neox in (True, False):
    ...     turned, _ = rotate_and_quantize(
    ...         torch.tensor([1]), q, turn, torch.ones(1, 1), 1.0, 1.0, is_neox
    ...     )
    ...     turned.tolist()
    [[[-3.0, 2.0, 1.0, 4.0, 448.0]]]
    [[[-2.0, 1.0, 3.0, 4.0, 448.0]]]
    """
    width = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    turned = q[..., :width].float()
    if is_neox:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat(pairs, dim=-1) if is_neox else torch.stack(pairs, dim=-1).flatten(-2)
    whole = torch.cat([rotated.to(q.dtype), q[..., width:]], dim=-1)
    quantized, scale = quantize_queries(whole, whole.shape[-1], use_ue8m0=True)
    return quantized, weights.float() * scale.squeeze(-1) * softmax_scale * head_scale
