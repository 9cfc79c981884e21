"""What openmla is compared with on the CPU: what people write with plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def sdpa(q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, padded: bool) -> Tensor:
    """torch SDPA, causal, one sequence. K is copied out to full width per head, as it demands.

    With `padded`, V gets zero columns up to the width of K, which is what lets torch take its
    blocked kernel; without, it takes the plain one.
    """
    heads = q.shape[1]
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], dim=-1)
    wide_v = pad(v, (0, k.shape[2] - v.shape[2])) if padded else v
    query, key, value = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, wide_v))
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    return out[0].transpose(0, 1)[..., : v.shape[2]]


def gather_einsum(q: Tensor, kv: Tensor, indices: Tensor, d_v: int, scale: float) -> Tensor:
    """Sparse attention as one would write it: gather all rows, einsum, softmax, einsum."""
    rows = kv[indices.long()]
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    return torch.einsum("thk,tkd->thd", torch.softmax(scores, dim=-1), rows[..., :d_v])


def over_rows(q: Tensor, kv: Tensor, d_v: int, scale: float) -> Tensor:
    """Latent attention of a request's last queries, causal, as one would write it."""
    seen = torch.ones(q.shape[0], kv.shape[0], dtype=torch.bool).tril(kv.shape[0] - q.shape[0])
    scores = torch.einsum("thd,kd->htk", q, kv) * scale
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return torch.einsum("htk,kd->thd", weights, kv[:, :d_v])
