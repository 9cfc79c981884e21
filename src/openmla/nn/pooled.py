"""`PoolIndexer`: which keys a layer of GLM-5.3-Flash attends to, chosen by pools of tokens.

Every `pool` tokens of a sequence have one key, the mean of theirs, weighted column by column by the
softmax of gates with a bias for each place (openmla.compressor). A query scores the pools that are
complete when it comes, takes the best and attends to their tokens, and to all tokens of the pool
that is not complete:

    k, g = LayerNorm(x W_k), x W_g   [128]
    key[p] = sum over the tokens of pool p of softmax(g + bias) * k
    score(t, p) = sum over heads of w[t] * relu(q[t] . key[p]) / sqrt(heads * 128)

Nothing is turned by positions. Scores are those of openmla.nn.indexer, in e4m3 or FP4 keys.
Parameters are named as in Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import openmla
from openmla.compressor import compress_rows
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import IndexCache, ScaleName
from openmla.indexer.groups import expand_pools
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch, require_pages
from openmla.nn.compressed.cache import CompressorState, NewRows
from openmla.nn.indexer import EPS, fold, hadamard, own_pages

POOLED = "glm5_next_text"
"""The model whose indexer this is, as Transformers calls it."""


@dataclass(frozen=True)
class PoolIndexerConfig:
    """Sizes of one indexer of pools."""

    hidden: int
    """Width of hidden states."""
    q_lora: int
    """Width of compressed queries."""
    heads: int
    """Heads of the indexer."""
    topk: int
    """Tokens of the selected pools; those of the unfinished one come on top."""
    pool: int
    """Tokens of a pool."""
    hadamard: bool = False
    """Rotate q and the keys of pools by a Hadamard matrix, as vLLM does before it quantizes. Scores
    stay what they are, but keys written with it can only be read with it."""

    @staticmethod
    def of(config: Any) -> PoolIndexerConfig:
        """From the text configuration of GLM-5.3-Flash.

        Args:
            config: a configuration of Transformers, or an object with the same attributes.

        Raises:
            Unsupported: the model is another, its indexer is not 128 wide, or it leaves the tokens
                of an unfinished pool out.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind != POOLED:
            raise Unsupported(f"no indexer of pools for {kind!r}", nearest=POOLED)
        if config.index_head_dim != DIM:
            raise Unsupported(f"an indexer {config.index_head_dim} wide", nearest=f"{DIM} columns")
        if not config.index_kpool_always_select_tail:
            raise Unsupported("index_kpool_always_select_tail=False", nearest="True")
        return PoolIndexerConfig(
            hidden=config.hidden_size,
            q_lora=config.q_lora_rank,
            heads=config.index_n_heads,
            topk=config.index_topk,
            pool=config.index_kpool,
        )


@dataclass(frozen=True, eq=False)
class PoolCache:
    """What an indexer of pools keeps between calls."""

    keys: IndexCache
    """A key per complete pool, in pages with the numbers of the layer's own cache: a page of it
    holds `pool` times as many tokens as one of these holds keys."""
    state: CompressorState
    """The tokens of the pool that is not complete, for each request."""
    requests: Tensor | None = None
    """int64 [sequences]: the line of `state` that belongs to each sequence of a batch; None: lines
    0, 1, 2, …"""

    @staticmethod
    def allocate(
        *,
        num_pages: int,
        requests: int,
        pool: int,
        page_size: int = 64,
        scales: ScaleName = "ue8m0",
        device: torch.device | str = "cpu",
    ) -> PoolCache:
        """A cache beside a LatentCache of as many pages.

        Args:
            num_pages: pages in the pool, as many as the layer's cache has.
            requests: lines of state, one for each sequence that is in progress.
            pool: tokens that share a key.
            page_size: tokens per page, as the layer's cache has; a multiple of pool.
            scales: how keys are stored: one of IndexCache.allocate's.
            device: where the caches live.

        Raises:
            InvalidArgument: a number is wrong, or there are no such scales.
        """
        if page_size % pool:
            raise InvalidArgument("page_size", f"a multiple of {pool} tokens", page_size)
        size = page_size // pool
        keys = IndexCache.allocate(
            num_pages=num_pages, page_size=size, scales=scales, device=device
        )
        return PoolCache(keys, CompressorState.allocate(requests, pool, DIM, device=device))

    def of(self, requests: Tensor) -> PoolCache:
        """This cache, for a batch whose sequences have these lines of state.

        Args:
            requests: int64 [sequences].
        """
        return replace(self, requests=requests)

    def lines(self, batch: Batch) -> Tensor:
        """int64 [sequences]: the line of `state` of each sequence.

        Args:
            batch: the sequences.

        Raises:
            InvalidArgument: there are not as many lines as sequences.
        """
        device, count = batch.cu_seqlens.device, len(batch.new)
        if self.requests is None:
            if count > self.state.kv.shape[0]:
                got = f"{self.state.kv.shape[0]} lines of state"
                raise InvalidArgument("index_cache", f"{count} requests", got)
            return torch.arange(count, device=device)
        if self.requests.shape != (count,):
            got = f"shape {tuple(self.requests.shape)}"
            raise InvalidArgument("index_cache.requests", f"[{count}]", got)
        return self.requests


class PoolIndexer(nn.Module):
    """Selects pools of keys over ragged batches and a paged cache of its own, without gradients.

    Args:
        config: sizes; weights are untrained.
    """

    def __init__(self, config: PoolIndexerConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(config.q_lora, config.heads * DIM, bias=False)
        self.wk = nn.Linear(config.hidden, DIM, bias=False)
        self.k_norm = nn.LayerNorm(DIM, eps=EPS)
        self.weights_proj = nn.Linear(config.hidden, config.heads, bias=False)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(config.pool, DIM))
        self.index_kpool_compress_gate = nn.Parameter(torch.zeros(DIM, config.hidden))

    @torch.no_grad()
    def forward(
        self,
        x: Tensor,
        compressed: Tensor,
        positions: Tensor,
        batch: Batch,
        cache: PoolCache | None = None,
        return_mask: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """int32 [tokens, topk + pool - 1]: places in the query's own sequence, ascending, then -1.

        Keys of the pools that are complete now are appended to the cache. With return_mask also the
        bits of the selected keys.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            compressed: [tokens, q_lora], their compressed queries, as MLAAttention.compress_queries
                makes them.
            positions: int [tokens], each token's place in its sequence; not looked at.
            batch: the sequences, and where their keys lie in the cache.
            cache: a PoolCache, which shares its pages' numbers with the layer's cache; None for
                fresh sequences, whose keys are kept for the call alone.
            return_mask: also return int32 [tokens, words], as mla_prefill's key_mask takes them.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        table = batch.block_table
        if cache is None:
            cache, table = self._own(batch)
        self._take(x, batch, cache, table)
        q, weights = self.project(x, compressed)
        indices = self._select(q, weights, batch, cache, table)
        return (indices, batch.selected_bits(indices)) if return_mask else indices

    def append(self, x: Tensor, positions: Tensor, batch: Batch, cache: PoolCache) -> None:
        """Only keep the new keys: what a batch needs in which every key is attended to.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            positions: int [tokens], each token's place in its sequence; not looked at.
            batch: the sequences, with a block_table of the cache's pages.
            cache: the PoolCache that keeps the keys.

        Raises:
            InvalidArgument: the batch has no block_table, or on the CPU a page is past the cache.
        """
        with torch.no_grad():
            self._take(x, batch, cache, batch.block_table)

    def check_cache(self, cache: object) -> None:
        """Refuse a cache of another kind, or of pools of another size.

        Args:
            cache: what MLAAttention was given as index_cache.

        Raises:
            InvalidArgument: it is not a PoolCache of this indexer's pools.
        """
        if cache is None:
            return
        if not isinstance(cache, PoolCache):
            got = type(cache).__name__
            raise InvalidArgument("index_cache", "a PoolCache: keys stand for pools", got)
        if cache.state.ratio != self.config.pool:
            expected = f"pools of {self.config.pool} tokens"
            raise InvalidArgument("index_cache", expected, cache.state.ratio)

    def project(self, x: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, 128] and weights fp32 [tokens, heads], all factors in.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            compressed: [tokens, q_lora], their compressed queries.
        """
        q = self._rotated(self.wq_b(compressed).view(len(x), self.config.heads, DIM))
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        return q, weights * (self.config.heads * DIM) ** -0.5

    def _take(self, x: Tensor, batch: Batch, cache: PoolCache, table: Tensor | None) -> None:
        """Keys of the pools that new tokens complete go into the cache, the rest into its state."""
        if table is None:
            raise InvalidArgument("batch", "one with a block_table, beside an index_cache", "none")
        pools = [keys // self.config.pool for keys in batch.keys]
        require_pages("block_table", table, cache.keys.page_size, pools)
        k, gate = self.k_norm(self.wk(x)), linear(x, self.index_kpool_compress_gate)
        done = cache.state.advance(k, gate, batch, cache.lines(batch))
        bias = self.index_kpool_compress_ape
        pooled = compress_rows(done.kv, done.gate, bias, ratio=self.config.pool)[:, 0]
        new = NewRows(self._rotated(pooled.to(x.dtype)), done.sequence, done.place)
        cache.keys.append(new.values, new.slots(table, cache.keys.page_size))

    def _select(
        self, q: Tensor, weights: Tensor, batch: Batch, cache: PoolCache, table: Tensor | None
    ) -> Tensor:
        pool, lengths = self.config.pool, (batch.positions + 1).int()
        values, folded = fold(q, weights)
        pools = openmla.index_topk(
            values,
            cache.keys,
            folded,
            self.config.topk // pool,
            cu_seqlens_q=batch.cu_seqlens,
            block_table=table,  # type: ignore[arg-type]  # or _take would have said so
            cache_lengths=batch.cache_lengths // pool,
            ends=lengths // pool,
            rows="relative",
        )
        assert isinstance(pools, Tensor)
        return expand_pools(pools, lengths, pool)

    def _own(self, batch: Batch) -> tuple[PoolCache, Tensor | None]:
        """A cache for fresh sequences, and the table that finds their pools in it."""
        pool = self.config.pool
        keys, pages = own_pages(
            Batch.of([n // pool for n in batch.new], device=batch.cu_seqlens.device)
        )
        state = CompressorState.allocate(len(batch.new), pool, DIM, device=keys.device)
        return PoolCache(keys, state), pages.block_table

    def _rotated(self, x: Tensor) -> Tensor:
        return hadamard(x) if self.config.hadamard else x
