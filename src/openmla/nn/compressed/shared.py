"""`SharedRowsAttention`: a layer of DeepSeek-V4.1, whose compressed rows are shared by layers.

A few layers write compressed rows, and those after them read the rows of the last that did:

    layers      0 … 1    2 … 7    8 … 13    14 … 19    20 … 39
    rows of     none     2        8         14         20
    ratio       -        2        2         2          1

A row is the mean of its tokens' values, weighted column by column by the softmax of their gates
(ratio 1 has none), normed and turned by the position of its first token. The indexer's key of a row
is a projection of it before it was turned, normed, with its last columns turned.

Some layers have an indexer; the list that it makes serves the layers after it, until the next. The
first layer of ratio 1 also names, for each query, the best blocks of 8 rows, and indexers after it
choose inside of these only. What layers leave to those after them in one forward pass is a
`Selected`:

    selected = Selected()                            # one for each forward pass
    for layer, cache in zip(layers, caches):         # a reader's: own.beside(writer's)
        x = layer(x, cache, batch, rows, selected)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import openmla
from openmla.compressor import compress_rows
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.api import SCORES_LIMIT
from openmla.indexer.cache import IndexCache
from openmla.indexer.groups import select_blocks, select_in_blocks
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch
from openmla.nn.compressed.attention import Scorer, index_queries
from openmla.nn.compressed.cache import CompressedCache, CompressorState, NewRows, Rows, physical
from openmla.nn.compressed.config import CompressedConfig
from openmla.nn.compressed.row_attention import RowAttention, up_to
from openmla.nn.indexer import fold
from openmla.nn.rope import Rope, Yarn, turn_tail
from openmla.sources import Listed, Source

SERVED = ("deepseek_v41", "deepseek_v41_text")


@dataclass(frozen=True)
class SharedRowsConfig(CompressedConfig):
    """Sizes of one layer, and its part in what layers share."""

    source: int = -1
    """The layer whose compressed rows it reads; -1 for a layer that sees the window alone."""
    writer: bool = False
    """Whether it writes them itself."""
    block: int = 0
    """Rows of a candidate block."""
    blocks: int = 0
    """Candidate blocks of each query."""
    names_blocks: bool = False
    """Whether its indexer names the candidate blocks of indexers after it."""
    within_blocks: bool = False
    """Whether its indexer chooses inside of candidate blocks."""

    @property
    def overlap(self) -> bool:
        """Rows are made of their own tokens alone."""
        return False

    @property
    def norms_heads(self) -> bool:
        """Heads of a query are not normed."""
        return False

    @property
    def writes_rows(self) -> bool:
        """Whether the layer makes compressed rows."""
        return self.writer

    @property
    def kept(self) -> tuple[str, ...]:
        """Which fields of a CompressedCache the layer reads or writes."""
        keys = ("keys",) if self.index_heads else ()
        return "rows", *keys, *(("state",) if self.writer and self.ratio > 1 else ())

    @staticmethod
    def of(config: Any, layer: int) -> SharedRowsConfig:
        """Layer number `layer` of DeepSeek-V4.1.

        Args:
            config: the model's text configuration, with the names of its config.json.
            layer: which layer, from 0.

        Raises:
            InvalidArgument: there is no such layer.
            Unsupported: the model is another, its indexer is not 128 wide, or a layer would read
                rows of another ratio than its own.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind not in SERVED:
            raise Unsupported(f"no layer of shared rows for {kind!r}", nearest=SERVED[0])
        if not 0 <= layer < config.num_hidden_layers:
            raise InvalidArgument("layer", f"0 to {config.num_hidden_layers - 1}", layer)
        ratio, indexes = config.compress_ratios[layer], layer in config.index_source_layer_ids
        source = max([s for s in config.kv_source_layer_ids if s <= layer], default=-1)
        if not ratio:
            source = -1
        elif source < 0 or config.compress_ratios[source] != ratio:
            raise Unsupported(f"layer {layer} of ratio {ratio}, without rows of that ratio")
        elif source == layer and not indexes:
            raise Unsupported(f"layer {layer}, which writes rows and no keys of an indexer")
        if indexes and config.index_head_dim != DIM:
            raise Unsupported(f"an indexer {config.index_head_dim} wide", nearest=f"{DIM} columns")
        names = config.candidate_source_layer_id
        return SharedRowsConfig(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            width=config.head_dim,
            q_lora=config.q_lora_rank,
            o_groups=config.o_groups,
            o_lora=config.o_lora_rank,
            window=config.sliding_window,
            rope=_rope(config, ratio),
            ratio=ratio,
            index_heads=config.index_n_heads if indexes else 0,
            topk=config.index_topk if ratio else 0,
            eps=config.rms_norm_eps,
            source=source,
            writer=source == layer,
            block=config.candidate_block_size,
            blocks=config.candidate_topk_blocks,
            names_blocks=layer == names,
            within_blocks=indexes and 0 <= names < layer,
        )


@dataclass(eq=False)
class Selected:
    """What the layers of one forward pass leave to those after them. Make one for each pass."""

    source: int = -1
    """The layer whose rows were chosen from; -1: nothing was chosen so far."""
    rows: Tensor | None = None
    """int32 [tokens, topk], physical rows of the source; None: a query sees all rows so far."""
    blocks: Tensor | None = None
    """int32 [tokens, blocks], candidate blocks; None: every row may be chosen."""


class RowCompressor(nn.Module):
    """From hidden states to rows, not turned yet."""

    def __init__(self, config: SharedRowsConfig) -> None:
        super().__init__()
        self.config = config
        self.kv_proj = nn.Linear(config.hidden, config.width, bias=False)
        if config.ratio > 1:
            self.gate_proj = nn.Linear(config.hidden, config.width, bias=False)
        self.kv_norm = nn.RMSNorm(config.width, eps=config.eps)

    def completed(
        self, x: Tensor, batch: Batch, state: CompressorState | None, requests: Tensor
    ) -> NewRows:
        """What the new tokens x [tokens, hidden] complete; the state takes them."""
        ratio, kv = self.config.ratio, self.kv_proj(x)
        if ratio == 1:
            return NewRows(self._normed(kv, x.dtype), batch.sequences, batch.positions)
        assert state is not None
        done = state.advance(kv, self.gate_proj(x), batch, requests)
        pooled = compress_rows(done.kv, done.gate, ratio=ratio)[:, 0]
        return NewRows(self._normed(pooled, x.dtype), done.sequence, done.place)

    def _normed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.kv_norm.weight.float()
        return rms_norm(rows.float(), weight.shape, weight, self.config.eps).to(dtype)


class SharedIndexer(nn.Module):
    """Queries of an indexer; in a layer that writes rows, also their keys."""

    def __init__(self, config: SharedRowsConfig) -> None:
        super().__init__()
        self.config = config
        self.q_b_proj = nn.Linear(config.q_lora, config.index_heads * DIM, bias=False)
        self.scorer = Scorer(config)
        if config.writer:
            self.k_proj = nn.Linear(config.width, DIM, bias=False)
            self.k_norm = nn.RMSNorm(DIM, eps=config.eps)

    def project(self, x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, 128] and weights fp32 [tokens, heads], all factors in."""
        weights = self.scorer.weights_proj(x)
        return index_queries(self.q_b_proj(residual), weights, self.config, positions)

    def keys(self, new: NewRows, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, 128], keys of rows that are not turned yet."""
        return turn_tail(self.k_norm(self.k_proj(new.values)), cos, sin)


class SharedRowsAttention(RowAttention):
    """One attention layer over ragged batches and paged caches, without gradients.

    Args:
        config: sizes of the layer and its part in what layers share; weights are untrained.
    """

    config: SharedRowsConfig
    """Sizes of the layer, and its part in what layers share."""

    def __init__(self, config: SharedRowsConfig) -> None:
        super().__init__(config)
        self.compressor = RowCompressor(config) if config.writer else None
        self.indexer = SharedIndexer(config) if config.index_heads else None

    @staticmethod
    def from_config(config: Any, layer: int) -> SharedRowsAttention:
        """Layer number `layer`, untrained, of DeepSeek-V4.1.

        Args:
            config: the model's text configuration, with the names of its config.json.
            layer: which layer, from 0.

        Raises:
            InvalidArgument: there is no such layer.
            Unsupported: the model is another, its indexer is not 128 wide, or a layer would read
                rows of another ratio than its own.
        """
        return SharedRowsAttention(SharedRowsConfig.of(config, layer))

    def forward(
        self,
        x: Tensor,
        cache: CompressedCache,
        batch: Batch,
        rows: Rows | None = None,
        selected: Selected | None = None,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. New rows are appended to the caches.

        Every token of a sequence must go through the layer once, in order: the state of its request
        is made of them. A call that needs gradients is refused: run it under torch.no_grad(), or
        with parameters that require none.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            cache: the caches of this layer, as CompressedCache.allocate makes them for its config;
                of a layer that reads rows, `beside` those of the layer that writes them.
            batch: the sequences, with a block_table of the window's pages.
            rows: the pages of compressed rows and the lines of state; None for a layer of ratio 0.
            selected: what the layers before left in this forward pass, and this layer leaves; None
                for a layer of ratio 0.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        self.check(x, cache, batch, rows)
        config = self.config
        if config.ratio:
            if selected is None:
                raise InvalidArgument("selected", "a Selected of this forward pass", "None")
            if self.indexer is None and selected.source != config.source:
                got = f"one of layer {selected.source}" if selected.source >= 0 else "an empty one"
                raise InvalidArgument("selected", f"rows of layer {config.source}", got)

        def others(residual: Tensor) -> list[Source]:
            if rows is None or selected is None or not config.ratio:
                return []
            return self._compressed(x, residual, cache, batch, rows, selected)

        with torch.no_grad():
            return self.attend(x, cache.window, batch, others)

    def _compressed(
        self,
        x: Tensor,
        residual: Tensor,
        cache: CompressedCache,
        batch: Batch,
        rows: Rows,
        selected: Selected,
    ) -> list[Source]:
        """The compressed rows that each query sees; none where no sequence has one."""
        assert cache.rows is not None
        if self.compressor is not None:
            self._write(self.compressor, x, cache, batch, rows)
        ends = ((batch.positions + 1) // self.config.ratio).int()
        most = max(batch.keys, default=0) // self.config.ratio
        if self.indexer is not None and cache.keys is not None:
            selected.source, selected.rows = self.config.source, None
            if most > self.config.topk:
                q, weights = fold(*self.indexer.project(x, residual, batch.positions))
                lengths = batch.cache_lengths // self.config.ratio
                query = _Query(q, weights, cache.keys, batch, rows.block_table, lengths, ends)
                self._choose(query, most, selected)
        if not most:
            return []
        if selected.rows is not None:
            return [Listed(cache.rows, selected.rows)]
        return [up_to(ends, cache.rows, rows.block_table, batch)]

    def _write(
        self,
        compressor: RowCompressor,
        x: Tensor,
        cache: CompressedCache,
        batch: Batch,
        rows: Rows,
    ) -> None:
        """Rows that the new tokens complete, and their keys, go into the caches."""
        assert cache.rows is not None and cache.keys is not None and self.indexer is not None
        new = compressor.completed(x, batch, cache.state, rows.requests)
        cos, sin = self.config.rope.cos_sin(new.place * self.config.ratio, x.dtype)
        slots = new.slots(rows.block_table, cache.rows.page_size)
        cache.rows.append(turn_tail(new.values, cos, sin), None, slots)
        cache.keys.append(self.indexer.keys(new, cos, sin), slots)

    def _choose(self, query: _Query, most: int, selected: Selected) -> None:
        """The list of every query, and candidate blocks where the layer names them."""
        config, block = self.config, self.config.block
        names = config.names_blocks and most > config.blocks * block
        if not names and not (config.within_blocks and selected.blocks is not None):
            selected.rows = query.best(config.topk)
            return
        blocks, chosen = [], []
        for part, scores in query.scores():
            ends = query.ends[part]
            if names:
                blocks.append(select_blocks(scores, config.blocks, block=block, ends=ends))
                found = openmla.select_topk(scores, config.topk, ends=ends)
                assert isinstance(found, Tensor)
            else:
                assert selected.blocks is not None
                candidates = selected.blocks[part]
                found = select_in_blocks(scores, candidates, config.topk, block=block, ends=ends)
            chosen.append(found)
        selected.rows = query.physical(torch.cat(chosen))
        selected.blocks = torch.cat(blocks) if names else selected.blocks


@dataclass(frozen=True, eq=False)
class _Query:
    """Queries of an indexer, and the keys of rows that they are compared with."""

    q: Tensor
    weights: Tensor
    keys: IndexCache
    batch: Batch
    table: Tensor
    lengths: Tensor
    """int32 [sequences]: keys of each."""
    ends: Tensor
    """int32 [tokens]: how many keys each query sees."""

    def best(self, topk: int) -> Tensor:
        """int32 [tokens, topk]: physical rows."""
        found = openmla.index_topk(
            self.q,
            self.keys,
            self.weights,
            topk,
            cu_seqlens_q=self.batch.cu_seqlens,
            block_table=self.table,
            cache_lengths=self.lengths,
            ends=self.ends,
        )
        assert isinstance(found, Tensor)
        return found

    def scores(self) -> Iterator[tuple[slice, Tensor]]:
        """(which queries, their scores), at most SCORES_LIMIT bytes at a time."""
        width = self.table.shape[1] * self.keys.page_size
        step = max(SCORES_LIMIT // (4 * max(width, 1)), 1)
        for first in range(0, max(len(self.q), 1), step):
            part = slice(first, min(first + step, len(self.q)))
            yield (
                part,
                openmla.indexer_scores(
                    self.q[part],
                    self.keys,
                    self.weights[part],
                    cu_seqlens_q=(self.batch.cu_seqlens - first).clamp(0, part.stop - first),
                    block_table=self.table,
                    cache_lengths=self.lengths,
                    ends=self.ends[part],
                ),
            )

    def physical(self, places: Tensor) -> Tensor:
        """int32 [tokens, n]: physical rows of places in each query's sequence; -1 names none."""
        sequence = self.batch.sequences[:, None]
        found = physical(self.table, sequence, places.clamp(min=0).long(), self.keys.page_size)
        return torch.where(places < 0, -1, found).int()


def _rope(config: Any, ratio: int) -> Rope:
    """The one rotary embedding of a layer: stretched where rows are compressed. Neither sines nor
    scores have YaRN's factors."""
    width, given = config.qk_rope_head_dim, getattr(config, "rope_scaling", None)
    given = given or config.rope_parameters
    if not ratio:
        return Rope(width, given.get("rope_theta") or config.rope_theta)
    yarn = Yarn(
        given["factor"],
        given["original_max_position_embeddings"],
        given.get("beta_fast") or 32.0,
        given.get("beta_slow") or 1.0,
    )
    return Rope(width, config.compress_rope_theta, yarn=yarn)
