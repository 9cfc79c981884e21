"""`Indexer`: which keys each query of a DSA layer attends to.

From a token's hidden state x and its compressed query r (what the layer's own queries are made of):

    q = r W_q   [heads, 128]        k = LayerNorm(x W_k)   [128]        w = x W_w   [heads]
    score(t, s) = sum over heads of w[t] * relu(q[t] . k[s]) / sqrt(heads * 128)

with rope on the first columns of q and k. They are multiplied in e4m3, with a scale per row: q's is
folded into w, k's lies in the cache beside it. Parameters are named as in Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import IndexCache, quantize
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch
from openmla.nn.rope import Rope

EPS = 1e-6
PAGE = 64  # of the cache that a batch without one is given
# Whether pairs of columns that rope turns are neighbors: the layer's own rope does not tell.
INTERLEAVED = {"deepseek_v32": False, "glm_moe_dsa": True}


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of one indexer and its rotary embedding."""

    hidden: int
    """Width of hidden states."""
    q_lora: int
    """Width of compressed queries."""
    heads: int
    """Heads of the indexer."""
    topk: int
    """Keys that are selected for each query."""
    rope: Rope
    """The rotary embedding of the first columns of q and k."""
    hadamard: bool = False
    """Rotate q and k by a Hadamard matrix, as DeepSeek's own code does before it quantizes. Scores
    stay what they are, but keys written with it can only be read with it."""

    @staticmethod
    def of(config: Any) -> IndexerConfig:
        """From the configuration of a model in `INTERLEAVED`.

        Args:
            config: a configuration of Transformers, or an object with the same attributes.

        Raises:
            Unsupported: the model is none of these, its indexer is not 128 wide, or its rotary
                embedding is not served.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind not in INTERLEAVED:
            raise Unsupported(f"no indexer for {kind!r}", nearest=", ".join(INTERLEAVED))
        if config.index_head_dim != DIM:
            raise Unsupported(f"an indexer {config.index_head_dim} wide", nearest=f"{DIM} columns")
        return IndexerConfig(
            hidden=config.hidden_size,
            q_lora=config.q_lora_rank,
            heads=config.index_n_heads,
            topk=config.index_topk,
            rope=Rope.of(config.qk_rope_head_dim, config, INTERLEAVED[kind]),
        )


class Indexer(nn.Module):
    """Selects keys over ragged batches and a paged cache of its own, without gradients.

    It is trained by `loss` alone, which MLAAttention.forward_and_loss computes.

    Args:
        config: sizes and rotary embedding; weights are untrained.
    """

    def __init__(self, config: IndexerConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(config.q_lora, config.heads * DIM, bias=False)
        self.wk = nn.Linear(config.hidden, DIM, bias=False)
        self.k_norm = nn.LayerNorm(DIM, eps=EPS)
        self.weights_proj = nn.Linear(config.hidden, config.heads, bias=False)

    @torch.no_grad()
    def forward(
        self,
        x: Tensor,
        compressed: Tensor,
        positions: Tensor,
        batch: Batch,
        cache: IndexCache | None = None,
        return_mask: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """int32 [tokens, topk]: places in the query's own sequence, ascending, then -1.

        New keys are appended to the cache. With return_mask also the bits of the selected keys.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            compressed: [tokens, q_lora], their compressed queries, as MLAAttention.compress_queries
                makes them.
            positions: int [tokens], each token's place in its sequence.
            batch: the sequences, and where their keys lie in the cache.
            cache: an IndexCache of the indexer's keys, which shares its pages' numbers with the
                layer's cache; None for fresh sequences, whose keys are kept for the call alone.
            return_mask: also return int32 [tokens, words], as mla_prefill's key_mask takes them.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        q, k, weights = self.project(x, compressed, positions)
        if cache is None:
            cache, batch = own_pages(batch)
        cache.append(k, batch.slots(cache.page_size))
        return self.select(q, weights, batch, cache, return_mask)

    def select(
        self, q: Tensor, weights: Tensor, batch: Batch, cache: IndexCache, return_mask: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """The lists of queries over keys that the cache has; results as those of `forward`.

        Args:
            q: [tokens, heads, 128], as `project` makes them.
            weights: fp32 [tokens, heads], as `project` makes them.
            batch: the sequences, with a block_table of the cache's pages.
            cache: the IndexCache, new keys included.
            return_mask: also return int32 [tokens, words], as mla_prefill's key_mask takes them.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        assert batch.block_table is not None  # or slots would have said so
        values, folded = fold(q, weights)
        return openmla.index_topk(
            values,
            cache,
            folded,
            self.config.topk,
            cu_seqlens_q=batch.cu_seqlens,
            block_table=batch.block_table,
            cache_lengths=batch.cache_lengths,
            rows="relative",
            return_mask=return_mask,
        )

    def loss(
        self,
        x: Tensor,
        compressed: Tensor,
        positions: Tensor,
        batch: Batch,
        attention: tuple[Tensor, Tensor, Tensor, Tensor],
        scale: float,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """How far its scores are from what attention looked at: float32 [tokens].

        Scores are of the model's dtype, those of inference are the same rounded to e4m3. Gradients
        end here: x and compressed have none.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            compressed: [tokens, q_lora], their compressed queries, as MLAAttention.compress_queries
                makes them.
            positions: int [tokens], each token's place in its sequence.
            batch: the sequences, all of them fresh.
            attention: q, k_nope, k_rope and lse of mla_prefill over them: a target
                (openmla.indexer_loss).
            scale: the scale that mla_prefill was given.
            key_mask: the key_mask that mla_prefill was given; None if it saw all keys.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        index_q, index_k, weights = self.project(x.detach(), compressed.detach(), positions)
        return openmla.indexer_loss(
            index_q,
            index_k,
            weights,
            *attention,
            cu_seqlens_q=batch.cu_seqlens,
            scale=scale,
            key_mask=key_mask,
        )

    def append(self, x: Tensor, positions: Tensor, batch: Batch, cache: IndexCache) -> None:
        """Only keep the new keys: what a batch needs in which every key is attended to.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            positions: int [tokens], each token's place in its sequence.
            batch: the sequences, with a block_table of the cache's pages.
            cache: the IndexCache that keeps the keys.

        Raises:
            InvalidArgument: the batch has no block_table, or on the CPU a page is past the cache.
        """
        cache.append(self.keys(x, positions), batch.slots(cache.page_size))

    def check_cache(self, cache: object) -> None:
        """Refuse a cache of another kind.

        Args:
            cache: what MLAAttention was given as index_cache.

        Raises:
            InvalidArgument: it is not an IndexCache.
        """
        if cache is not None and not isinstance(cache, IndexCache):
            raise InvalidArgument("index_cache", "an IndexCache", type(cache).__name__)

    def project(
        self, x: Tensor, compressed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, heads, 128], k [tokens, 128], weights fp32 [tokens, heads], all factors in.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            compressed: [tokens, q_lora], their compressed queries, as MLAAttention.compress_queries
                makes them.
            positions: int [tokens], each token's place in its sequence.
        """
        q = self.wq_b(compressed).view(len(x), self.config.heads, DIM)
        q = self._turned(q, positions)
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        return q, self.keys(x, positions), weights * (self.config.heads * DIM) ** -0.5

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys of tokens, [tokens, 128], normed and with rope, before they are quantized.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            positions: int [tokens], each token's place in its sequence.
        """
        return self._turned(self.k_norm(self.wk(x))[:, None], positions)[:, 0]

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [tokens, n, 128] with rope on its first columns."""
        rope = self.config.rope
        cos, sin = rope.cos_sin(positions, x.dtype)
        first = rope.turn(x[..., : rope.width], cos[:, None], sin[:, None])
        x = torch.cat([first, x[..., rope.width :]], dim=-1)
        return hadamard(x) if self.config.hadamard else x


def fold(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """q in e4m3 and weights fp32 [tokens, heads] with q's scales inside."""
    values, scales = quantize(q.flatten(0, 1), "fp32")
    return values.view(q.shape), weights * scales.view(weights.shape)


def hadamard(x: Tensor) -> Tensor:
    """The last dimension, a power of two, times the symmetric orthogonal Hadamard matrix.

    >>> hadamard(torch.tensor([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[0.5, 0.5, 0.5, 0.5]]
    """
    width = x.shape[-1]
    y = x
    for step in (1 << n for n in range(width.bit_length() - 1)):
        a, b = y.reshape(*x.shape[:-1], width // (2 * step), 2, step).unbind(-2)
        y = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
    return y * (1 / math.sqrt(width))


def own_pages(batch: Batch) -> tuple[IndexCache, Batch]:
    """A cache for fresh sequences, and the batch with a table that finds them in it."""
    device, pages = batch.cu_seqlens.device, -(-max(batch.keys, default=0) // PAGE)
    table = torch.arange(len(batch.new) * pages, dtype=torch.int32, device=device)
    cache = IndexCache.allocate(num_pages=table.shape[0], page_size=PAGE, device=device)
    table = table.view(len(batch.new), pages)
    return cache, Batch.of(batch.new, batch.context, table)
