"""A small, plain, correct blocked backward pass whose every step is a method.

It computes as a GPU does: one pass over query tiles that makes delta and d_q, one over key blocks
that makes d_k and d_v, fp32 scores, weights and gradients of scores rounded to bf16 before they
are multiplied. Seeded defects override one method each. Nothing is shared with the kernels that
openmla ships.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.backward.reference import Saved
from openmla.lab.testing.gradients import BuiltGradients
from openmla.operands import DenseOperands
from openmla.sequences import SequenceSpan, ragged_spans


@dataclass(eq=False)
class Queries:
    """Some queries of a sequence, fp32."""

    first: int
    """Place of the first in its sequence."""
    tokens: slice
    q: Tensor
    """[m, H, d_qk]"""
    out: Tensor
    d_out: Tensor
    """[m, H, d_v]"""
    lse: Tensor
    d_lse: Tensor
    """[m, H]"""


@dataclass(eq=False)
class Keys:
    """Some keys of a sequence, fp32."""

    first: int
    rows: slice
    k: Tensor
    """[n, H, d_qk]"""
    v: Tensor
    """[n, H, d_v]"""


class BlockedBackward:
    """Gradients of a built case, from what the forward pass saved."""

    BM, BN = 16, 32

    def __init__(self, built: BuiltGradients, saved: Saved) -> None:
        self.built, self.op, self.saved = built, built.operands, saved
        op = self.op
        self.heads, self.d_nope, self.dtype = op.q.shape[1], op.k_nope.shape[2], op.q.dtype
        self.scale, self.sink = op.weights.scale, op.weights.sink
        self.d_q = torch.zeros(op.q.shape, dtype=torch.float32)
        self.d_k = torch.zeros(op.k_nope.shape[0], self.heads, op.q.shape[2])
        self.d_v = torch.zeros(op.v.shape, dtype=torch.float32)
        self.delta = torch.zeros(op.q.shape[:2])
        self.d_sink = torch.zeros(self.heads)

    def run(self) -> dict[str, Tensor]:
        """All sequences, one after another."""
        for span in self.spans():
            tiles = [self.queries(span, i) for i in range(0, span.q_len, self.BM)]
            blocks = [self.keys(span, j) for j in range(0, span.k_len, self.BN)]
            for tile in tiles:
                self.delta[tile.tokens] = self.row_sums(tile)
                self.query_pass(span, tile, self.blocks_of(span, tile, blocks))
                self.d_sink += self.sink_part(tile)
            for block in blocks:
                self.key_pass(span, block, self.tiles_of(span, block, tiles))
        return self.stored()

    def spans(self) -> list[SequenceSpan]:
        return list(ragged_spans(self.op.cu_seqlens_q, self.op.cu_seqlens_k))

    # What is loaded

    def queries(self, span: SequenceSpan, first: int) -> Queries:
        stop = min(first + self.BM, span.q_len)
        tokens = slice(span.q_start + first, span.q_start + stop)
        d_lse = self.built.d_lse
        return Queries(
            first,
            tokens,
            self.op.q[tokens].float(),
            self.saved.out[tokens].float(),
            self.built.d_out[tokens].float(),
            self.lse_rows(tokens),
            torch.zeros(stop - first, self.heads) if d_lse is None else d_lse[tokens],
        )

    def lse_rows(self, tokens: slice) -> Tensor:
        return self.saved.lse[tokens]

    def keys(self, span: SequenceSpan, first: int) -> Keys:
        stop = min(first + self.BN, span.k_len)
        rows = slice(span.k_start + first, span.k_start + stop)
        op: DenseOperands = self.op
        k = op.k_nope[rows].float()
        if op.k_rope is not None:
            rope = op.k_rope[rows] if op.k_rope.dim() == 3 else op.k_rope[rows][:, None]
            k = torch.cat([k, rope.float().expand(-1, self.heads, -1)], dim=-1)
        return Keys(first, rows, k, self.values(rows))

    def values(self, rows: slice) -> Tensor:
        return self.op.v[rows].float()

    # Which blocks meet

    def blocks_of(self, span: SequenceSpan, tile: Queries, blocks: list[Keys]) -> list[Keys]:
        return [b for b in blocks if self.seen(span, tile, b).any()]

    def tiles_of(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> list[Queries]:
        return [t for t in tiles if self.seen(span, t, block).any()]

    def position(self, span: SequenceSpan, query: Tensor) -> Tensor:
        return query + span.k_len - span.q_len

    def seen(self, span: SequenceSpan, tile: Queries, block: Keys) -> Tensor:
        """[m, n]"""
        query = tile.first + torch.arange(len(tile.q))
        key = block.first + torch.arange(len(block.k))
        seen = torch.ones(len(query), len(key), dtype=torch.bool)
        if self.op.causal:
            seen = self.causal(key, self.position(span, query)[:, None])
        if self.op.window:
            seen = seen & (key > self.position(span, query)[:, None] - self.op.window)
        if self.op.key_mask is not None:
            seen = seen & self.mask_bits(tile, key)
        return seen

    def causal(self, key: Tensor, position: Tensor) -> Tensor:
        return key <= position

    def mask_bits(self, tile: Queries, key: Tensor) -> Tensor:
        words = self.op.key_mask[tile.tokens]
        return ((words[:, key // 32] >> (key % 32).int()) & 1) != 0

    # Softmax

    def reference(self, tile: Queries) -> Tensor:
        """[m, H]: what exponents are relative to; +inf where no key is seen."""
        total = tile.lse if self.sink is None else torch.logaddexp(tile.lse, self.sink)
        return torch.where(tile.lse == -torch.inf, torch.inf, total)

    def row_sums(self, tile: Queries) -> Tensor:
        """[m, H]: sum(out * d_out)."""
        return (tile.out * self.used(tile)).sum(-1)

    def used(self, tile: Queries) -> Tensor:
        """d_out of rows that see a key."""
        return torch.where((tile.lse == -torch.inf)[..., None], 0.0, tile.d_out)

    def scores(self, tile: Queries, block: Keys) -> Tensor:
        return torch.einsum("mhd,nhd->mhn", tile.q, block.k) * self.scale

    def hidden(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen[:, None], -torch.inf)

    def weights(self, scores: Tensor, tile: Queries) -> Tensor:
        return torch.exp(scores - self.reference(tile)[..., None])

    def d_weights(self, tile: Queries, block: Keys) -> Tensor:
        return torch.einsum("mhv,nhv->mhn", self.used(tile), block.v)

    def deltas(self, tile: Queries) -> Tensor:
        return self.delta[tile.tokens]

    def d_scores(self, span: SequenceSpan, tile: Queries, block: Keys) -> tuple[Tensor, Tensor]:
        """P and dS of a block, [m, H, n], fp32."""
        seen = self.seen(span, tile, block)
        scores = self.hidden(self.scores(tile, block), seen)
        p = self.weights(scores, tile)
        d_s = p * (self.d_weights(tile, block) - self.deltas(tile)[..., None])
        return p, d_s + self.lse_part(scores, tile)

    def lse_part(self, scores: Tensor, tile: Queries) -> Tensor:
        """P0 * d_lse."""
        lse = torch.where(tile.lse == -torch.inf, torch.inf, tile.lse)
        d_lse = torch.where(tile.lse == -torch.inf, 0.0, tile.d_lse)
        return torch.exp(scores - lse[..., None]) * d_lse[..., None]

    def rounded(self, x: Tensor) -> Tensor:
        """What is multiplied: bf16, or fp32."""
        return x.bfloat16().float() if self.dtype == torch.bfloat16 else x

    # Sums

    def query_pass(self, span: SequenceSpan, tile: Queries, blocks: list[Keys]) -> None:
        acc = torch.zeros_like(tile.q)
        for block in blocks:
            _, d_s = self.d_scores(span, tile, block)
            acc = self.add_q(acc, torch.einsum("mhn,nhd->mhd", self.rounded(d_s), block.k), block)
        self.d_q[tile.tokens] = acc * self.q_factor()

    def add_q(self, acc: Tensor, product: Tensor, block: Keys) -> Tensor:
        return acc + product

    def q_factor(self) -> float:
        return self.scale

    def key_pass(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> None:
        d_k, d_v = torch.zeros_like(block.k), torch.zeros_like(block.v)
        for tile in tiles:
            p, d_s = self.d_scores(span, tile, block)
            d_k = self.add_k(d_k, torch.einsum("mhn,mhd->nhd", self.rounded(d_s), tile.q), tile)
            d_v = self.add_v(d_v, self.value_product(p, tile), tile)
        self.d_k[block.rows] = d_k * self.k_factor()
        self.d_v[block.rows] = d_v

    def value_product(self, p: Tensor, tile: Queries) -> Tensor:
        return torch.einsum("mhn,mhv->nhv", self.rounded(p), self.used(tile))

    def add_k(self, acc: Tensor, product: Tensor, tile: Queries) -> Tensor:
        return acc + product

    def add_v(self, acc: Tensor, product: Tensor, tile: Queries) -> Tensor:
        return acc + product

    def k_factor(self) -> float:
        return self.scale

    def sink_part(self, tile: Queries) -> Tensor:
        """[H]: what these rows add to d_sink."""
        if self.sink is None:
            return torch.zeros(self.heads)
        share = 1 / (1 + torch.exp(tile.lse - self.sink))
        share = torch.where(tile.lse == -torch.inf, 0.0, share)
        return -(share * self.delta[tile.tokens]).sum(0)

    # What is stored

    def rope_sum(self, per_head: Tensor) -> Tensor:
        """[keys, d_rope] of [keys, H, d_rope]."""
        return per_head.sum(1)

    def stored(self) -> dict[str, Tensor]:
        nope, rope = self.d_k[..., : self.d_nope], self.d_k[..., self.d_nope :]
        found = {"q": self.d_q, "k_nope": nope, "v": self.d_v}
        if self.op.k_rope is not None:
            found["k_rope"] = rope if self.op.k_rope.dim() == 3 else self.rope_sum(rope)
        found = {name: (x + 0.0).to(self.dtype) for name, x in found.items()}
        if self.sink is not None:
            found["sink"] = self.d_sink
        return found
