"""The definition of right: float64, one query row at a time, no tiling, no masks.

Every other path is judged against this file, so it is written to be read. A query row sees a list
of keys; `attend_row` is all of attention for it:

    scores = scale * q_scale * k_scale * (q . k)           [H, n]
    lse    = log(sum(exp(scores)))                          -inf when n == 0
    out    = sum(exp(scores - lse) * v) / (1 + exp(sink - lse))      +0 when n == 0

A sum of rows is turned as its rows are: where results are turned back, v is (`turned_back`).

The three forms differ only in which keys a row sees. Nothing outside those keys is ever touched, so
NaN in unused memory cannot matter here. Besides out and lse, a `Truth` holds what an error bound
needs: sums over p and v that rounding errors scale with, and how large the scores were before
cancellation. `calls` lets it run as a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla.operands import (
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.planning import Plan
from openmla.sequences import (
    first_key,
    first_key_of,
    page_rows,
    paged_spans,
    ragged_spans,
    visible_keys,
)
from openmla.sources import TurnBack


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact results (float64): out [T, H, d_v], the rest [T, H] or [T, H, d_v]."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor
    magnitude: Tensor
    """sum(p * |v|) per output element: what rounding errors of P and V cannot exceed, times u. Of a
    result that is turned back, |v| is |a cos| + |b sin|: both sums that it is made of have errors
    of their own."""
    deviation: Tensor
    """sqrt(sum((p * v)**2)): what independent rounding errors of P add up to, times u. The p of a
    row that is listed several times round alike; here they count as one, their sum."""
    total_v: Tensor
    """sum(|v|): what an absolute error of every P costs, before it is divided by the row sum."""
    score_magnitude: Tensor
    """Largest scale * sum(|q| * |k|) of the row: what rounding errors of scores scale with. Scores
    that are not finite have none."""
    keys: Tensor
    """Keys the row sees, int64 [T]."""
    unsettled: Tensor
    """Where NaN comes of Inf in V times a weight of 0 alone, of scores that are all -inf, or of a
    score times a scale of 0: whether it does is not promised. Kernels hide keys by scores of -inf,
    and may take a row that has no others for one that sees no key; at a scale of 0 they may take
    all scores for 0."""

    @staticmethod
    def empty(total_q: int, heads: int, d_v: int) -> Truth:
        """Rows that see no key: zeros and -inf."""
        wide = (total_q, heads, d_v)
        make: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        return Truth(
            out=torch.zeros(wide, **make),
            lse=torch.full(wide[:2], -torch.inf, **make),
            max_logits=torch.full(wide[:2], -torch.inf, **make),
            magnitude=torch.zeros(wide, **make),
            deviation=torch.zeros(wide, **make),
            total_v=torch.zeros(wide, **make),
            score_magnitude=torch.zeros(wide[:2], **make),
            keys=torch.zeros(total_q, dtype=torch.int64, device="cpu"),
            unsettled=torch.zeros(wide, dtype=torch.bool, device="cpu"),
        )

    def attend_row(
        self,
        row: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Weights,
        k_ids: Tensor,
        v_sizes: Tensor | None = None,
    ) -> None:
        """Fill one row from q [H, D], k [n, H or 1, D], v [n, H or 1, d_v]; k_ids index k_scale.
        v_sizes: |v| if None.

        einsum reads a 1 as all heads: |k| and v**2 of shared rows are computed once."""
        if not k.shape[0]:
            return
        factor = torch.tensor(w.scale, dtype=torch.float64, device=q.device)
        if w.q_scale is not None:
            factor = factor * w.q_scale[row].double()
        if w.k_scale is not None:
            factor = factor * w.k_scale[k_ids].double()
        scores = torch.einsum("hd,nhd->hn", q, k) * factor
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.softmax(scores, dim=-1)  # exp(scores - lse) loses log n beside scores of 1e16
        if w.sink is not None:
            p = p / (1 + torch.exp(w.sink.double() - lse))[:, None]
        self.out[row] = torch.einsum("hn,nhv->hv", p, v)
        if not bool(v.isfinite().all()):
            broken = (~v.isfinite()).double()
            reached = torch.einsum("hn,nhv->hv", (p != 0).double(), broken)
            self.unsettled[row] = ~self.out[row].isfinite() & (reached == 0)
        self.unsettled[row, (scores == -torch.inf).all(-1)] = True
        if w.scale == 0:
            self.unsettled[row, scores.isnan().any(-1)] = True
        self.lse[row] = lse
        self.max_logits[row] = scores.amax(-1)
        v_sizes = v.abs() if v_sizes is None else v_sizes
        self.magnitude[row] = torch.einsum("hn,nhv->hv", p, v_sizes)
        together = p * _weight_of_row(p, k_ids)
        self.deviation[row] = torch.einsum("hn,nhv->hv", together, v**2).sqrt()
        self.total_v[row] = v_sizes.sum(dim=0)
        sizes = torch.einsum("hd,nhd->hn", q.abs(), k.abs()) * factor.abs()
        self.score_magnitude[row] = torch.where(scores.isfinite(), sizes, 0.0).amax(-1)
        self.keys[row] = k.shape[0]


def _weight_of_row(p: Tensor, k_ids: Tensor) -> Tensor:
    """For every key, the sum of p [H, n] over all places that list the same row.

    >>> _weight_of_row(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([7, 3, 7]))
    tensor([[0.7500, 0.2500, 0.7500]])
    """
    rows, place = torch.unique(k_ids, return_inverse=True)
    sums = p.new_zeros(p.shape[0], rows.shape[0]).index_add_(1, place, p)
    return sums[:, place]


def of(operands: Operands) -> Truth:
    """The definition of a call of any form."""
    if isinstance(operands, DenseOperands):
        return dense(operands)
    return latent(operands) if isinstance(operands, LatentOperands) else sparse(operands)


def dense(op: DenseOperands) -> Truth:
    """MHA form: query i of a sequence sees its first visible_keys(i) keys, with a window the last
    of them."""
    total_q, heads, _ = op.q.shape
    truth = Truth.empty(total_q, heads, op.v.shape[-1])
    for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k, op.k_start):
        before = first_key_of(span, op.window)
        rows = slice(span.k_start + before, span.k_start + span.k_len)
        k, v = (op.of_heads(x[rows]).double() for x in (op.k_nope, op.v))
        if op.rope_cache is not None and op.block_table is not None:
            pages, size = op.block_table[span.number], op.rope_cache.page_size
            slots = page_rows(pages, size, before, span.k_len)
            rope = op.rope_cache.read(slots)[:, None, op.rope_cache.latent :]
            k = torch.cat([k, rope.double().expand(-1, heads, -1)], dim=-1)
        elif op.k_rope is not None:
            rope = op.k_rope[rows]
            rope = op.of_heads(rope) if rope.dim() == 3 else rope[:, None]
            k = torch.cat([k, rope.double().expand(-1, heads, -1)], dim=-1)
        k_ids = torch.arange(rows.start, rows.stop, device=k.device)
        for i in range(span.q_len):
            n = visible_keys(i, span.q_len, span.k_len, op.causal)
            first, row = first_key(n, op.window), span.q_start + i
            seen: slice | Tensor = slice(first - before, n - before)
            if op.key_mask is not None:
                seen = masked_keys(op.key_mask[row], n, first) - before
            truth.attend_row(row, op.q[row].double(), k[seen], v[seen], op.weights, k_ids[seen])
    return truth


def masked_keys(words: Tensor, n: int, first: int = 0) -> Tensor:
    """The keys among `first` … n - 1 whose bits are set.

    >>> masked_keys(torch.tensor([0b1011, -1], dtype=torch.int32), 34).tolist()
    [0, 1, 3, 32, 33]
    """
    bits = (words[:, None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten()[first:n].nonzero()[:, 0] + first


def latent(op: LatentOperands) -> Truth:
    """Latent form: all heads see the same rows of the paged cache."""
    total_q, heads, _ = op.q.shape
    truth = Truth.empty(total_q, heads, op.d_v)
    for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
        before = first_key_of(span, op.window)
        slots = page_rows(op.block_table[span.number], op.cache.page_size, before, span.k_len)
        k = op.cache.read(slots).double()[:, None]
        for i in range(span.q_len):
            n = visible_keys(i, span.q_len, span.k_len, op.causal)
            seen = slice(first_key(n, op.window) - before, n - before)
            row = span.q_start + i
            v = k[seen, :, : op.d_v]
            truth.attend_row(row, op.q[row].double(), k[seen], v, op.weights, slots[seen])
    return truth


def sparse(op: SparseOperands | AttendOperands) -> Truth:
    """Sparse form: a row sees the rows of its sources; a duplicate counts twice.

    Rows of a second source are numbered after those of the first: a row of each is two rows.
    """
    total_q, heads, _ = op.q.shape
    truth = Truth.empty(total_q, heads, op.d_v)
    for row in range(total_q):
        ids, parts, before = [], [], 0
        for source in op.sources:
            slots = source.seen(row)
            ids.append(slots + before)
            parts.append(source.read(slots).double())
            before += source.count
        k = torch.cat(parts)[:, None]
        v = k[:, :, : op.d_v]
        sizes = None
        if op.turn_back is not None:
            v, sizes = turned_back(v, op.turn_back, row)
        truth.attend_row(row, op.q[row].double(), k, v, op.weights, torch.cat(ids), sizes)
    return truth


def turned_back(v: Tensor, turn: TurnBack, token: int) -> tuple[Tensor, Tensor]:
    """(v [n, 1, d_v] with its last columns turned by minus the angle of a token's position, the
    sums of absolute values that it is made of).

    >>> angle = TurnBack(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    >>> turned_back(torch.tensor([[[5.0, 1.0, 2.0]]]), angle, 0)
    (tensor([[[ 5.,  2., -1.]]]), tensor([[[5., 2., 1.]]]))
    """
    cos, sin = (x[0].to(v.dtype) for x in turn.cos_sin(slice(token, token + 1)))
    still = v.shape[-1] - turn.columns
    a, b = v[..., still::2], v[..., still + 1 :: 2]
    pairs = torch.stack([a * cos + b * sin, b * cos - a * sin], -1)
    sizes = torch.stack([(a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()], -1)
    before = v[..., :still]
    return torch.cat([before, pairs.flatten(-2)], -1), torch.cat(
        [before.abs(), sizes.flatten(-2)], -1
    )


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys -> the result over all of them, float64."""
    seen = torch.stack([torch.where(x == torch.inf, -torch.inf, x.double()) for x in lses])
    lse = torch.logsumexp(seen, 0)
    out = torch.zeros_like(outs[0], dtype=torch.float64)
    for part, part_lse in zip(outs, seen, strict=True):
        weight = torch.exp(part_lse - lse)[..., None]
        empty = (part_lse == -torch.inf)[..., None]
        out = out + torch.where(empty, 0.0, weight * part.double())
    return out, lse


@dataclass(frozen=True, eq=False)
class ReferenceCall:
    """One call, to be computed here and now."""

    operands: Operands
    results: Results

    def run(self) -> None:
        """Write what the definition says."""
        truth = of(self.operands)
        for written, rows in self.results.tensors().items():
            rows.copy_(getattr(truth, written))


def calls(plan: Plan, operands: Operands, results: Results) -> Iterator[ReferenceCall]:
    """The one call."""
    yield ReferenceCall(operands, results)
