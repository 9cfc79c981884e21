"""What a layer of compressed rows keeps between calls, and where it lies.

window    a row per token, in pages named by the batch's own block table. Pages whose tokens
          have left every window may be given back: -1 in the table
rows      a row per `ratio` tokens, in pages named by a table of their own
keys      the indexer's key of each such row, in pages of the same numbers
state     the tokens of the row that is not complete, per request: values and gates, fp32; where
          rows overlap, also the tokens of the row before
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.errors import InvalidArgument
from openmla.formats import FormatName
from openmla.indexer.cache import IndexCache, ScaleName
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch
from openmla.nn.compressed.config import CompressedConfig


class Rows(NamedTuple):
    """Where the compressed rows of a batch lie, and what is kept for each sequence."""

    block_table: Tensor
    """int32 [sequences, max_pages]: pages of compressed rows, those of new ones included."""
    requests: Tensor
    """int64 [sequences]: the line of `CompressorState` that belongs to each sequence."""


class Complete(NamedTuple):
    """Rows that the new tokens of a batch complete."""

    kv: Tensor
    """[rows, ratio, columns] of their tokens, float32."""
    gate: Tensor
    """[rows, ratio, columns] of their tokens, float32."""
    previous: tuple[Tensor, Tensor] | None
    """kv and gate of the tokens before them, where rows overlap; a gate of -inf: there are none."""
    sequence: Tensor
    """int64 [rows]."""
    place: Tensor
    """int64 [rows]: which row of its sequence it is."""


class NewRows(NamedTuple):
    """Rows that a batch completed, ready to be cached."""

    values: Tensor
    """[rows, width]."""
    sequence: Tensor
    """int64 [rows]."""
    place: Tensor
    """int64 [rows]: which row of its sequence it is."""

    def slots(self, table: Tensor, page_size: int) -> Tensor:
        """int64 [rows]: where they lie in a pool.

        Args:
            table: int32 [sequences, max_pages], the pages of rows.
            page_size: rows per page.
        """
        return physical(table, self.sequence, self.place, page_size)


def physical(table: Tensor, sequence: Tensor, place: Tensor, page_size: int) -> Tensor:
    """int64: where places of sequences lie in a pool of pages."""
    page = table[sequence, place // page_size].long()
    return page * page_size + place % page_size


@dataclass(frozen=True, eq=False)
class CompressorState:
    """The last tokens of each request: position p lies at p % tokens."""

    kv: Tensor
    """fp32 [requests, tokens, columns]."""
    gate: Tensor
    """fp32 [requests, tokens, columns]."""
    ratio: int
    """Tokens per row."""

    @staticmethod
    def allocate(
        requests: int,
        ratio: int,
        columns: int,
        overlap: bool = False,
        device: torch.device | str = "cpu",
    ) -> CompressorState:
        """For so many requests. What a line held before a request does not matter.

        Args:
            requests: lines, one for each sequence that is in progress.
            ratio: tokens per row.
            columns: of a token's values, and as many of its gates.
            overlap: keep the tokens of the row before as well.
            device: where the state lives.
        """
        kept = ratio * (2 if overlap else 1)
        kv, gate = (torch.zeros(requests, kept, columns, device=device) for _ in range(2))
        return CompressorState(kv, gate, ratio)

    @property
    def overlap(self) -> bool:
        """Whether the tokens of the row before are kept as well."""
        return self.kv.shape[1] > self.ratio

    def advance(self, kv: Tensor, gate: Tensor, batch: Batch, requests: Tensor) -> Complete:
        """Take the new tokens' kv and gate [tokens, columns]; return the rows they complete.

        Args:
            kv: [tokens, columns], values of the batch's new tokens.
            gate: [tokens, columns], their gates.
            batch: the sequences, whose contexts the state has seen.
            requests: int64 [sequences], the line of each sequence.
        """
        first = [n // self.ratio for n in batch.context]
        last = [n // self.ratio for n in batch.keys]
        sequence, place = batch.span(first, last)
        kv, gate = kv.float(), gate.float()
        places = torch.arange(self.ratio, device=kv.device)
        position = place[:, None] * self.ratio + places
        found = _Tokens(self, kv, gate, batch, requests)
        own, previous = found.at(sequence, position), None
        if self.overlap:
            previous = found.at(sequence, position - self.ratio)
        self._keep(kv, gate, batch, requests)
        return Complete(*own, previous, sequence, place)

    def _keep(self, kv: Tensor, gate: Tensor, batch: Batch, requests: Tensor) -> None:
        """Write the last tokens of every sequence, which no later ones of this call overwrite."""
        kept = self.kv.shape[1]
        pairs = zip(batch.context, batch.keys, strict=True)
        first = [max(context, keys - kept) for context, keys in pairs]
        sequence, position = batch.span(first, batch.keys)
        token = batch.cu_seqlens[sequence] + position - _contexts(batch)[sequence]
        line, at = requests[sequence], position % kept
        self.kv[line, at], self.gate[line, at] = kv[token], gate[token]


def _contexts(batch: Batch) -> Tensor:
    """int32 [sequences]: the position of each sequence's first new token."""
    return batch.cache_lengths - batch.cu_seqlens.diff()


class _Tokens(NamedTuple):
    """Tokens of a batch by their position: new ones, and those that the state has kept."""

    state: CompressorState
    kv: Tensor
    gate: Tensor
    batch: Batch
    requests: Tensor

    def at(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """kv and gate [rows, ratio, columns]; before position 0, zeros and -inf."""
        batch, kept = self.batch, self.state.kv.shape[1]
        offset = position - _contexts(batch)[sequence, None]
        is_new = (offset >= 0)[..., None]
        fresh = (batch.cu_seqlens[sequence, None] + offset.clamp(min=0)).long()
        line = self.requests[sequence, None]
        old = position.clamp(min=0) % kept
        exists = (position >= 0)[..., None]
        found = []
        for tokens, state, none in (
            (self.kv, self.state.kv, 0.0),
            (self.gate, self.state.gate, -torch.inf),
        ):
            value = torch.where(is_new, tokens[fresh], state[line, old])
            found.append(torch.where(exists, value, none))
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class CompressedCache:
    """The caches of one layer. Those that its ratio does not need are None."""

    window: LatentCache
    """A row per token."""
    rows: LatentCache | None = None
    """Compressed rows; None at ratio 0."""
    keys: IndexCache | None = None
    """The indexer's key of each compressed row; None where all rows are attended to."""
    state: CompressorState | None = None
    """Tokens of rows that are not complete; None at ratio 0."""
    key_state: CompressorState | None = None
    """Tokens of the indexer's keys that are not complete; None without an indexer."""

    def __post_init__(self) -> None:
        if self.keys is not None and self.rows is not None:
            size = self.rows.page_size
            if self.keys.page_size != size:
                raise InvalidArgument("keys", f"pages of {size}, as rows has", self.keys.page_size)

    @staticmethod
    def allocate(
        config: CompressedConfig,
        *,
        pages: int,
        row_pages: int = 0,
        requests: int = 0,
        page_size: int = 64,
        row_page_size: int = 64,
        format: FormatName = "bf16",
        row_format: FormatName | None = None,
        scales: ScaleName = "ue8m0",
        device: torch.device | str = "cpu",
    ) -> CompressedCache:
        """The caches of one layer, and None for those that its ratio does not need.

        Args:
            config: the layer's, which says what it keeps.
            pages: pages of the window, a row per token.
            row_pages: pages of compressed rows, and as many of the indexer's keys.
            requests: lines of state, one for each sequence that is in progress.
            page_size: rows per page of the window.
            row_page_size: rows per page of compressed rows and of keys.
            format: what a row of the window is, byte by byte: one of openmla.formats.FORMATS.
            row_format: what a compressed row is; None: the same.
            scales: how the indexer's keys are stored: one of IndexCache.allocate's.
            device: where the caches live.

        Raises:
            InvalidArgument: there is no such format, it has no such width, or a number is wrong.
        """

        def pool(count: int, size: int, format: FormatName) -> LatentCache:
            return LatentCache.allocate(
                num_pages=count,
                page_size=size,
                latent=config.width,
                rope=0,
                format=format,
                device=device,
            )

        def state(width: int) -> CompressorState:
            columns = width * (2 if config.overlap else 1)
            return CompressorState.allocate(requests, config.ratio, columns, config.overlap, device)

        window = pool(pages, page_size, format)
        if not config.writes_rows:
            return CompressedCache(window)
        rows = pool(row_pages, row_page_size, row_format or format)
        cache = CompressedCache(window, rows)
        if "keys" in config.kept:
            keys = IndexCache.allocate(
                num_pages=row_pages, page_size=row_page_size, scales=scales, device=device
            )
            cache = replace(cache, keys=keys)
        if "state" in config.kept:
            cache = replace(cache, state=state(config.width))
        if "key_state" in config.kept:
            cache = replace(cache, key_state=state(DIM))
        return cache

    def beside(self, source: CompressedCache) -> CompressedCache:
        """This window, and the compressed rows and keys that another layer of DeepSeek-V4.1 writes.

        Args:
            source: the caches of that layer.
        """
        return CompressedCache(self.window, source.rows, source.keys)
