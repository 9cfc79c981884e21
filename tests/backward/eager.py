"""Attention of the dense form as plain torch operations, for autograd to differentiate."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.operands import DenseOperands
from openmla.sequences import ragged_spans, visible_keys


def attend(
    op: DenseOperands,
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of every sequence, in the dtype of q; rows that see no key are +0 and -inf.

    -inf stands where no key is seen, and its gradient is nowhere asked for.
    """
    outs, lses, end = [], [], 0
    for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k):
        rows = slice(span.k_start, span.k_start + span.k_len)
        tokens = slice(span.q_start, span.q_start + span.q_len)
        k = k_nope[rows]
        if k_rope is not None:
            rope = k_rope[rows] if k_rope.dim() == 3 else k_rope[rows][:, None]
            k = torch.cat([k, rope.expand(-1, k.shape[1], -1)], dim=-1)
        seen = _seen(op, span.q_start, span.q_len, span.k_len)
        some = seen.any(1)
        scores = torch.einsum("qhd,khd->qhk", q[tokens], k) * op.weights.scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)[some]
        lse = torch.logsumexp(scores, dim=-1)
        total = lse if sink is None else torch.logaddexp(lse, sink)
        out = torch.einsum("qhk,khv->qhv", torch.exp(scores - total[..., None]), v[rows])
        place = some.nonzero()[:, 0]
        whole = q.new_zeros(span.q_len, q.shape[1], v.shape[2]).index_copy(0, place, out)
        outs.append(whole)
        lses.append(q.new_full((span.q_len, q.shape[1]), -torch.inf).index_copy(0, place, lse))
        end = span.q_start + span.q_len
    rest = q.shape[0] - end
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((rest, q.shape[1]), -torch.inf))
    return torch.cat(outs), torch.cat(lses)


def _seen(op: DenseOperands, first: int, q_len: int, k_len: int) -> Tensor:
    """[q_len, k_len]: which keys each query sees."""
    counts = torch.tensor([visible_keys(i, q_len, k_len, op.causal) for i in range(q_len)])
    seen = torch.arange(k_len) < counts[:, None]
    if op.window:
        seen &= torch.arange(k_len) >= counts[:, None] - op.window
    if op.key_mask is not None:
        words = op.key_mask[first : first + q_len]
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        seen &= bits.flatten(1)[:, :k_len] != 0
    return seen


def loss(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """The scalar whose gradients are judged."""
    value = (out * d_out.to(out.dtype)).sum()
    if d_lse is not None:
        kept = torch.where(lse == -torch.inf, 0.0, lse)
        value = value + (kept * d_lse.to(lse.dtype)).sum()
    return value


def gradients(op: DenseOperands, d_out: Tensor, d_lse: Tensor | None) -> dict[str, Tensor]:
    """By autograd, in float64."""
    inputs = {"q": op.q, "k_nope": op.k_nope, "k_rope": op.k_rope, "v": op.v}
    inputs["sink"] = op.weights.sink
    wide = {n: None if x is None else x.double().requires_grad_() for n, x in inputs.items()}
    value = loss(*attend(op, **wide), d_out, d_lse)
    given = {n: x for n, x in wide.items() if x is not None}
    if not value.requires_grad:
        return {n: torch.zeros_like(x) for n, x in given.items()}
    found = torch.autograd.grad(value, list(given.values()), allow_unused=True)
    return {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(given.items(), found, strict=True)
    }
