"""A small, plain, correct blocked attention whose every step is a method.

It computes as a GPU kernel does: keys in blocks of BN, fp32 scores, an online softmax, P rounded to
the input's dtype before it meets V, the row sum over unrounded P. Seeded defects override one
method each. Nothing is shared with the kernels that openmla ships.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.checks import out_dtype
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.values import FLOAT
from openmla.operands import DenseOperands, LatentOperands, SparseOperands
from openmla.sequences import SequenceSpan, page_rows, paged_spans, ragged_spans


@dataclass(eq=False)
class Tile:
    """A few queries and all keys that any of them sees."""

    tokens: range
    k: Tensor
    """[n, H or 1, D], fp32."""
    v: Tensor
    """[n, H or 1, d_v], fp32."""
    k_scale: Tensor | None
    """[n]"""
    seen: list[int]
    """How many of the keys each query sees: the first, or with `since` those from there on."""
    since: list[int] | None = None
    """The first key that each query sees; None: key 0."""

    @property
    def n(self) -> int:
        """Keys."""
        return self.k.shape[0]


@dataclass(eq=False)
class State:
    """The online softmax: m, l [queries, H], o [queries, H, d_v]."""

    m: Tensor
    l: Tensor  # noqa: E741  the name it has in every paper
    o: Tensor


class Blocked:
    """Blocked attention over the operands of a built case."""

    BM, BN = 16, 32

    def __init__(self, built: BuiltCase) -> None:
        self.case, self.op, self.weights = built.case, built.operands, built.operands.weights
        self.heads, self.d_v = self.op.q.shape[1], built.case.d_v
        self.dtype = out_dtype(self.op.q.dtype)
        self.stored_dtype = torch.float32 if self.case.fp32_out else self.dtype
        shape = self.op.q.shape[:2]
        self.out = torch.zeros(*shape, self.d_v, dtype=self.stored_dtype, device="cpu")
        self.lse = torch.full(shape, -torch.inf, **FLOAT)
        self.max_logits = torch.full(shape, -torch.inf, **FLOAT)

    def run(self) -> Outcome:
        """All tiles, one after another."""
        for tile in self.tiles():
            self.attend(tile)
        return Outcome(
            self.out,
            self.lse if self.case.return_lse else None,
            self.max_logits if self.case.return_max_logits else None,
        )

    # Which keys

    def tiles(self) -> Iterator[Tile]:
        """The problem cut into tiles."""
        op = self.op
        if isinstance(op, SparseOperands):
            for token in range(op.q.shape[0]):
                slots = self.listed(op, token)
                rows = self.rows(op, slots)
                scale = self.k_scale(slots)
                v = rows[..., : op.d_v]
                yield Tile(range(token, token + 1), rows, v, scale, [slots.shape[0]])
            return
        for span, k, v, scale in self.sequences():
            for start in range(0, span.q_len, self.BM):
                queries = range(start, min(start + self.BM, span.q_len))
                seen = [self.visible(span, i) for i in queries]
                n = min(max(seen, default=0), k.shape[0])
                tokens = range(span.q_start + queries.start, span.q_start + queries.stop)
                tile_scale = None if scale is None else scale[:n]
                since = [self.first_seen(span, i) for i in queries]
                yield Tile(tokens, k[:n], v[:n], tile_scale, seen, since)

    def sequences(self) -> Iterator[tuple[SequenceSpan, Tensor, Tensor, Tensor | None]]:
        """Every sequence with all its keys, values and key scales."""
        op = self.op
        if isinstance(op, DenseOperands):
            for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k, op.k_start):
                keys = self.key_range(span)
                parts = [self.of_heads(op.k_nope[keys].float()), self.rope(op, span, keys)]
                k = torch.cat([p for p in parts if p is not None], dim=-1)
                ids = torch.arange(keys.start, keys.stop, device="cpu")
                yield span, k, self.values(op, keys), self.k_scale(ids)
        elif isinstance(op, LatentOperands):
            for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
                slots = self.slots(op.block_table, op.cache, span)
                rows = self.rows(op, slots)
                yield span, rows, rows[..., : op.d_v], self.k_scale(slots)

    def key_range(self, span: SequenceSpan) -> slice:
        """Rows of a ragged sequence's keys."""
        return slice(span.k_start, span.k_start + span.k_len)

    def values(self, op: DenseOperands, keys: slice) -> Tensor:
        """V of ragged keys, [n, H, d_v]."""
        return self.of_heads(op.v[keys].float())

    def of_heads(self, rows: Tensor) -> Tensor:
        """Rows of K's heads as query heads see them."""
        return rows.repeat_interleave(self.case.group, dim=1)

    def rope(self, op: DenseOperands, span: SequenceSpan, keys: slice) -> Tensor | None:
        """Rope of ragged keys, [n, H, d_rope]."""
        if op.rope_cache is not None and op.block_table is not None:
            slots = self.slots(op.block_table, op.rope_cache, span)
            rope = self.read(op.rope_cache, slots)[:, None, op.rope_cache.latent :]
        elif op.k_rope is None:
            return None
        else:
            rope = op.k_rope[keys].float()
            rope = self.of_heads(rope) if rope.dim() == 3 else rope[:, None]
        return rope.expand(-1, self.heads, -1)

    def visible(self, span: SequenceSpan, query: int) -> int:
        """Keys that a query sees: bottom-right causal."""
        if not self.case.causal:
            return span.k_len
        return min(max(span.k_len - span.q_len + query + 1, 0), span.k_len)

    def first_seen(self, span: SequenceSpan, query: int) -> int:
        """The first key that a query sees: of a window, whose last key is the query's own."""
        if not self.case.window:
            return 0
        return max(span.k_len - span.q_len + query + 1 - self.case.window, 0)

    def slots(self, table: Tensor, cache: LatentCache, span: SequenceSpan) -> Tensor:
        """Physical rows of a paged sequence."""
        return page_rows(table[span.number], cache.page_size, 0, span.k_len)

    def listed(self, op: SparseOperands, token: int) -> Tensor:
        """Indices of a token that count."""
        listed = op.indices[token].long()[: self.list_length(op, token)]
        return listed[(listed >= 0) & (listed < op.rows)]

    def list_length(self, op: SparseOperands, token: int) -> int:
        """How many entries of a token's list may count."""
        if op.topk_lengths is None:
            return op.indices.shape[1]
        return max(int(op.topk_lengths[token]), 0)

    def rows(self, op: LatentOperands | SparseOperands, slots: Tensor) -> Tensor:
        """Latent rows [n, 1, width]."""
        if isinstance(op.cache, LatentCache):
            return self.read(op.cache, slots)[:, None]
        return op.cache.float().index_select(0, slots)[:, None]

    def read(self, cache: LatentCache, slots: Tensor) -> Tensor:
        """Dequantized values [n, width]."""
        return cache.read(slots).float()

    def k_scale(self, ids: Tensor) -> Tensor | None:
        """Key scales of rows."""
        return None if self.weights.k_scale is None else self.weights.k_scale[ids]

    # One tile

    def attend(self, tile: Tile) -> None:
        """Walk the keys of one tile and store its rows."""
        q = self.queries(tile)
        shape = (len(tile.tokens), self.heads)
        state = State(
            torch.full(shape, -torch.inf, **FLOAT),
            torch.zeros(shape, **FLOAT),
            torch.zeros(*shape, self.d_v, **FLOAT),
        )
        for block in self.blocks(tile):
            self.step(state, self.mask(self.scores(q, tile, block), tile, block), tile, block)
        self.finish(tile, state)

    def queries(self, tile: Tile) -> Tensor:
        """fp32 [queries, H, D], scaled."""
        tokens = slice(tile.tokens.start, tile.tokens.stop)
        q = self.op.q[tokens].float() * self.weights.scale
        if self.weights.q_scale is not None:
            q = q * self.weights.q_scale[tokens, None, None]
        return q

    def blocks(self, tile: Tile) -> Iterator[slice]:
        """Keys, BN at a time."""
        for first in range(0, tile.n, self.BN):
            yield slice(first, min(first + self.BN, tile.n))

    def scores(self, q: Tensor, tile: Tile, block: slice) -> Tensor:
        """[queries, H, n]"""
        k = tile.k[block].expand(-1, self.heads, -1)
        scores = torch.einsum("mhd,nhd->mhn", q, k)
        return scores if tile.k_scale is None else scores * tile.k_scale[block]

    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        """-inf where a query does not see a key."""
        keys = torch.arange(block.start, block.stop, device="cpu")
        hidden = keys >= torch.tensor(tile.seen, device="cpu")[:, None]
        if tile.since is not None:
            hidden = hidden | (keys < torch.tensor(tile.since, device="cpu")[:, None])
        return scores.masked_fill(hidden[:, None], -torch.inf)

    def step(self, state: State, scores: Tensor, tile: Tile, block: slice) -> None:
        """One block of the online softmax."""
        m = self.new_max(state.m, scores)
        shift = torch.where(m == -torch.inf, 0.0, m)
        p = self.exp(scores - shift[..., None])
        correction = self.exp(state.m - shift)
        state.l = self.rescaled_sum(state, correction, block) + self.row_sum(p)
        product = torch.einsum("mhn,nhv->mhv", self.rounded(p), self.expanded_v(tile, block))
        state.o = self.accumulated(self.rescaled_out(state, correction, block), product)
        state.m = m

    def new_max(self, m: Tensor, scores: Tensor) -> Tensor:
        """The running maximum after a block."""
        return torch.maximum(m, scores.amax(dim=-1))

    def exp(self, x: Tensor) -> Tensor:
        """e^x"""
        return torch.exp(x)

    def rescaled_sum(self, state: State, correction: Tensor, block: slice) -> Tensor:
        """l in units of the new maximum."""
        return state.l * correction

    def row_sum(self, p: Tensor) -> Tensor:
        """Over unrounded P."""
        return p.sum(dim=-1)

    def rounded(self, p: Tensor) -> Tensor:
        """P as the matrix unit gets it."""
        return p.to(self.dtype).float()

    def expanded_v(self, tile: Tile, block: slice) -> Tensor:
        """V of a block, [n, H, d_v]."""
        return tile.v[block].expand(-1, self.heads, -1)

    def rescaled_out(self, state: State, correction: Tensor, block: slice) -> Tensor:
        """o in units of the new maximum."""
        return state.o * correction[..., None]

    def accumulated(self, o: Tensor, product: Tensor) -> Tensor:
        """o after a block."""
        return o + product

    # The end of a tile

    def finish(self, tile: Tile, state: State) -> None:
        """Normalize, mark empty rows, store."""
        tokens = slice(tile.tokens.start, tile.tokens.stop)
        empty = state.m == -torch.inf
        out = self.normalized(state, torch.where(empty, 1.0, state.l + self.sink_term(state)))
        out = torch.where(empty[..., None], self.empty_out(state), out)
        lse = torch.where(empty, self.empty_lse(), self.log_sum(state))
        self.out[tokens] = self.stored(out)
        self.lse[tokens] = lse
        self.max_logits[tokens] = state.m

    def sink_term(self, state: State) -> Tensor:
        """What the sink adds to the denominator, in units of the maximum."""
        if self.weights.sink is None:
            return torch.zeros_like(state.l)
        return self.exp(self.weights.sink - state.m)

    def normalized(self, state: State, denominator: Tensor) -> Tensor:
        """o / denominator"""
        return state.o / denominator[..., None]

    def log_sum(self, state: State) -> Tensor:
        """lse"""
        return state.m + torch.log(state.l)

    def empty_out(self, state: State) -> Tensor:
        """Output of a row that sees no key."""
        return torch.zeros_like(state.o)

    def empty_lse(self) -> float:
        """lse of a row that sees no key."""
        return -torch.inf

    def stored(self, out: Tensor) -> Tensor:
        """Rounded to the output dtype."""
        return out.to(self.stored_dtype)
