"""The definition of right gradients: float64, one query row at a time, no tiling.

With P the weights of a row, P0 what they would be without a sink, and everything of one head,

    scores = scale * (q . k)          P0 = exp(scores - lse)       P = P0 / (1 + exp(sink - lse))
    dP     = d_out . v                D  = d_out . out             S_sink = 1 - sum(P)
    dS     = P * (dP - D) + P0 * d_lse

    d_q    = scale * sum over keys (dS * k)           d_sink = -sum over queries (S_sink * D)
    d_k    = scale * sum over queries (dS * q)        d_v    =  sum over queries (P * d_out)

lse has no sink in it, so its gradient goes by P0, which is not P where there is a sink. A rope row
that all heads share gets the sum over the heads. A key that nobody sees gets +0, and so does a
query that sees no key.

Kernels know out and lse only as the forward pass rounded them. `backward` takes these where they
are given (`Saved`): then D and P0 are made of them, and their rounding is no error of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.errors import Unsupported
from openmla.operands import DenseOperands
from openmla.reference import masked_keys
from openmla.sequences import first_key, ragged_spans, visible_keys


class Saved(NamedTuple):
    """What the forward pass wrote, to be taken as it is."""

    out: Tensor
    lse: Tensor


class ExactGradients(NamedTuple):
    """Gradients in float64, by the names of what they are gradients of."""

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor | None
    v: Tensor
    sink: Tensor | None


class Row(NamedTuple):
    """One query row and all keys that it sees: what its terms of every gradient are made of."""

    row: int
    keys: Tensor
    """Rows of the keys, int64 [n]."""
    q: Tensor
    """[H, d_qk]"""
    k: Tensor
    """[n, H, d_qk]"""
    v: Tensor
    """[n, H, d_v]"""
    out: Tensor
    """[H, d_v]"""
    d_out: Tensor
    """[H, d_v]"""
    d_lse: Tensor
    """[H]"""
    p: Tensor
    """[H, n]"""
    p_alone: Tensor
    """[H, n], P0: the weights without a sink."""
    p_sink: Tensor
    """[H]: the weight of the sink, 0 without one."""
    d_scores: Tensor
    """[H, n]: gradients of the scores."""
    d_sum: Tensor
    """[H]: D."""


def backward(
    op: DenseOperands, d_out: Tensor, d_lse: Tensor | None = None, saved: Saved | None = None
) -> ExactGradients:
    """Gradients of sum(out * d_out) + sum(lse * d_lse)."""
    total_k, heads, d_nope = op.k_nope.shape
    d_q = torch.zeros(op.q.shape, dtype=torch.float64, device=op.q.device)
    d_k = d_q.new_zeros(total_k, heads, op.q.shape[2])
    d_v = d_q.new_zeros(op.v.shape)
    d_sink = d_q.new_zeros(heads)
    scale = op.weights.scale
    for row in rows(op, d_out, d_lse, saved):
        d_q[row.row] = scale * torch.einsum("hn,nhd->hd", row.d_scores, row.k)
        d_k.index_add_(0, row.keys, scale * torch.einsum("hn,hd->nhd", row.d_scores, row.q))
        d_v.index_add_(0, row.keys, torch.einsum("hn,hv->nhv", row.p, row.d_out))
        d_sink -= row.p_sink * row.d_sum
    d_rope = None
    if op.k_rope is not None:
        d_rope = d_k[..., d_nope:] if op.k_rope.dim() == 3 else d_k[..., d_nope:].sum(1)
    return ExactGradients(
        d_q, d_k[..., :d_nope], d_rope, d_v, None if op.weights.sink is None else d_sink
    )


def rows(
    op: DenseOperands, d_out: Tensor, d_lse: Tensor | None, saved: Saved | None = None
) -> Iterator[Row]:
    """Every query row that sees a key, in order."""
    refuse_what_is_undefined(op)
    heads = op.q.shape[1]
    for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k):
        ids = torch.arange(span.k_start, span.k_start + span.k_len, device=op.q.device)
        k, v = op.k_nope[ids].double(), op.v[ids].double()
        if op.k_rope is not None:
            rope = op.k_rope[ids] if op.k_rope.dim() == 3 else op.k_rope[ids][:, None]
            k = torch.cat([k, rope.double().expand(-1, heads, -1)], dim=-1)
        for i in range(span.q_len):
            n = visible_keys(i, span.q_len, span.k_len, op.causal)
            row = span.q_start + i
            first = first_key(n, op.window)
            seen: slice | Tensor = slice(first, n)
            if op.key_mask is not None:
                seen = masked_keys(op.key_mask[row], n, first)
            if not ids[seen].numel():
                continue
            dlse = None if d_lse is None else d_lse[row].double()
            given = (
                None if saved is None else Saved(saved.out[row].double(), saved.lse[row].double())
            )
            terms = op.q[row].double(), k[seen], v[seen], d_out[row].double(), dlse
            yield differentiate_row(op, row, ids[seen], *terms, given)


def differentiate_row(
    op: DenseOperands,
    row: int,
    keys: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    saved: Saved | None,
) -> Row:
    """The formulas at the top of the file, for one row."""
    scores = torch.einsum("hd,nhd->hn", q, k) * op.weights.scale
    if saved is None:
        lse, p_alone = torch.logsumexp(scores, dim=-1), torch.softmax(scores, dim=-1)
    else:
        lse, p_alone = saved.lse, torch.exp(scores - saved.lse[:, None])
    p, p_sink = p_alone, torch.zeros_like(lse)
    if op.weights.sink is not None:
        sink = op.weights.sink.double()
        p = p_alone / (1 + torch.exp(sink - lse))[:, None]
        p_sink = 1 / (1 + torch.exp(lse - sink))
    out = torch.einsum("hn,nhv->hv", p, v) if saved is None else saved.out
    d_sum = (out * d_out).sum(-1)
    d_weights = torch.einsum("hv,nhv->hn", d_out, v)
    d_scores = p * (d_weights - d_sum[:, None])
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    d_scores = d_scores + p_alone * d_lse[:, None]
    return Row(row, keys, q, k, v, out, d_out, d_lse, p, p_alone, p_sink, d_scores, d_sum)


def refuse_what_is_undefined(op: DenseOperands) -> None:
    """Options of the dense form whose gradients nobody has defined here."""
    given = {
        "k_start": op.k_start,
        "k_rope in a LatentCache": op.rope_cache,
        "q_scale": op.weights.q_scale,
        "k_scale": op.weights.k_scale,
    }
    for name, value in given.items():
        if value is not None:
            raise Unsupported(f"gradients of a call with {name} are not defined")


class ReferenceCall(NamedTuple):
    """The definition as a launch."""

    operands: BackwardOperands
    gradients: Gradients

    def run(self) -> None:
        """Write every gradient that is wanted. What the forward pass saved is taken as it is."""
        op = self.operands
        exact = backward(op.forward, op.d_out, op.d_lse, Saved(op.out, op.lse))
        for name, written in self.gradients.tensors().items():
            written.copy_(getattr(exact, name))


def calls(
    plan: object, operands: BackwardOperands, gradients: Gradients
) -> Iterator[ReferenceCall]:
    """The one call."""
    yield ReferenceCall(operands, gradients)
