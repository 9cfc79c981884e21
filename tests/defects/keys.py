"""Seeded defects in which keys a query sees: masks, tiles, pages, index lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from defects.blocked import Blocked, Tile
from defects.showcases import defect
from openmla.cache import LatentCache
from openmla.operands import DenseOperands, SparseOperands
from openmla.sequences import SequenceSpan


@defect("a query does not see its own key", "dense", "paged")
class CausalOneTooFew(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return max(super().visible(span, query) - 1, 0)


@defect("a query sees the key after its own", "dense", "paged")
class CausalOneTooMany(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return min(super().visible(span, query) + 1, span.k_len)


@defect("causal aligned top-left: query i sees keys 0 … i", "dense", "paged")
class CausalTopLeft(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return min(query + 1, span.k_len)


@defect("the causal mask is not applied", "dense", "paged")
class CausalIgnored(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return span.k_len


@defect("a causal mask where none was asked for", "full")
class CausalAlways(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return min(max(span.k_len - span.q_len + query + 1, 0), span.k_len)


@defect("the mask is only applied in the last block of keys", "dense")
class MaskOnlyInLastBlock(Blocked):
    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        return super().mask(scores, tile, block) if block.stop == tile.n else scores


@defect("a sequence also sees the first key of its neighbor", "full")
class NeighborLeak(Blocked):
    def key_range(self, span: SequenceSpan) -> slice:
        assert isinstance(self.op, DenseOperands)
        stop = min(span.k_start + span.k_len + 1, self.case.total_k)
        return slice(span.k_start, stop)

    def visible(self, span: SequenceSpan, query: int) -> int:
        return span.k_len + 1

    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        return scores


@defect("the last block is dropped when it is not full", "dense", "long", "paged", "sparse")
class LastPartialBlockDropped(Blocked):
    def blocks(self, tile: Tile) -> Iterator[slice]:
        return (b for b in super().blocks(tile) if b.stop - b.start == self.BN)


@defect("one zero key too many: padding of the last block is not masked", "full", "long", "sparse")
class PaddedZeroKey(Blocked):
    def attend(self, tile: Tile) -> None:
        if tile.n % self.BN:
            tile.k = torch.cat([tile.k, torch.zeros_like(tile.k[:1])])
            tile.v = torch.cat([tile.v, torch.zeros_like(tile.v[:1])])
            if tile.k_scale is not None:
                tile.k_scale = torch.cat([tile.k_scale, tile.k_scale.new_ones(1)])
            tile.seen = [n + (n == tile.n - 1) for n in tile.seen]
        super().attend(tile)


@defect("the first key is skipped", "dense", "paged", "sparse")
class FirstKeySkipped(Blocked):
    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        scores = super().mask(scores, tile, block)
        if block.start == 0:
            scores[..., 0] = -torch.inf
        return scores


@defect("keys at a block's edge are read twice", "long", "full")
class BlocksOverlap(Blocked):
    def blocks(self, tile: Tile) -> Iterator[slice]:
        return (slice(max(b.start - 1, 0), b.stop) for b in super().blocks(tile))


@defect("a window has one key more", "window", "window_of_one", "window_long", "window_paged")
class WindowOneKeyLonger(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return max(super().first_seen(span, query) - 1, 0)


@defect("a window has one key less", "window", "window_long", "window_paged")
class WindowOneKeyShorter(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return super().first_seen(span, query) + 1


@defect("a window ends one key early: before the query's own", "window", "window_paged")
class WindowEndsBeforeTheQuery(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return max(super().visible(span, query) - 1, 0)

    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return max(super().first_seen(span, query) - 1, 0)


@defect("windows are aligned top-left: where keys are more, they lie too early", "window")
class WindowAlignedTopLeft(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return max(query + 1 - self.case.window, 0)


@defect("windows of queries before the first key reach into it", "window_of_one_empty")
class WindowOfQueriesBeforeTheKeys(Blocked):
    def visible(self, span: SequenceSpan, query: int) -> int:
        return min(max(span.k_len - span.q_len + query + 1, 1), span.k_len)


@defect("windows begin where their block does", "window", "window_long", "window_paged")
class WindowBeginsWithItsBlock(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return super().first_seen(span, query) // self.BN * self.BN


@defect("the window of a tile is that of its first query", "window", "window_paged")
class WindowOfTheTile(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return super().first_seen(span, query // self.BM * self.BM)


@defect("the window is forgotten", "window", "window_of_one", "window_long", "window_paged")
class WindowIgnored(Blocked):
    def first_seen(self, span: SequenceSpan, query: int) -> int:
        return 0


@defect("the second and third page of a sequence are swapped", "paged_from_start", "rope_cache")
class PagesSwapped(Blocked):
    def slots(self, table: Tensor, cache: LatentCache, span: SequenceSpan) -> Tensor:
        swapped = table.clone()
        if span.k_len >= 3 * cache.page_size:
            swapped[:, 1], swapped[:, 2] = table[:, 2], table[:, 1]
        # Queries that see both pages do not notice the order of keys; those in between do.
        return super().slots(swapped, cache, span)


@defect("the first page is used for every page", "paged", "rope_cache")
class FirstPageOnly(Blocked):
    def slots(self, table: Tensor, cache: LatentCache, span: SequenceSpan) -> Tensor:
        return super().slots(table[:, :1].expand_as(table), cache, span)


@defect("block table of the sequence before", "paged")
class TableOfTheNeighbor(Blocked):
    def slots(self, table: Tensor, cache: LatentCache, span: SequenceSpan) -> Tensor:
        return super().slots(table.roll(1, dims=0).clamp(0, cache.num_pages - 1), cache, span)


@defect("the offset inside a page is one too high from the second page on", "paged")
class PageOffsetOffByOne(Blocked):
    def slots(self, table: Tensor, cache: LatentCache, span: SequenceSpan) -> Tensor:
        slots = super().slots(table, cache, span)
        later = torch.arange(slots.shape[0], device="cpu") >= cache.page_size
        return torch.where(later, (slots + 1) % cache.rows, slots)


@defect("one index past topk_lengths is used", "sparse")
class IndexPastLengthUsed(Blocked):
    def list_length(self, op: SparseOperands, token: int) -> int:
        return super().list_length(op, token) + 1


@defect("topk_lengths is ignored", "sparse")
class TopkLengthsIgnored(Blocked):
    def list_length(self, op: SparseOperands, token: int) -> int:
        return op.indices.shape[1]


@defect("the last index of a list is dropped", "sparse", "sparse_exact_lists")
class LastIndexDropped(Blocked):
    def list_length(self, op: SparseOperands, token: int) -> int:
        return max(super().list_length(op, token) - 1, 0)


@defect("lists are cut to a multiple of the block", "sparse_exact_lists")
class ListCutToBlocks(Blocked):
    def list_length(self, op: SparseOperands, token: int) -> int:
        return super().list_length(op, token) // self.BN * self.BN


@defect("a duplicate index counts once", "sparse_duplicates")
class DuplicatesCountedOnce(Blocked):
    def listed(self, op: SparseOperands, token: int) -> Tensor:
        once: Tensor = super().listed(op, token).unique()  # type: ignore[no-untyped-call]
        return once


@defect("index -1 reads the last row", "sparse_invalid")
class NegativeIndexWraps(Blocked):
    def listed(self, op: SparseOperands, token: int) -> Tensor:
        listed = op.indices[token].long()
        listed = torch.where(listed == -1, op.rows - 1, listed)
        return listed[(listed >= 0) & (listed < op.rows)]


@defect("an index past the pool is clamped to its last row", "sparse_invalid")
class LargeIndexClamped(Blocked):
    def listed(self, op: SparseOperands, token: int) -> Tensor:
        listed = op.indices[token].long()
        return listed[listed >= 0].clamp(max=op.rows - 1)


@defect("an invalid index counts as a key of zeros", "sparse_invalid")
class InvalidIndexIsZeroKey(Blocked):
    def rows(self, op: object, slots: Tensor) -> Tensor:
        assert isinstance(op, SparseOperands)
        rows = super().rows(op, slots.clamp(0, op.rows - 1))
        return rows * ((slots >= 0) & (slots < op.rows))[:, None, None]

    def listed(self, op: SparseOperands, token: int) -> Tensor:
        return op.indices[token].long()


@defect("V of the next head", "dense")
class WrongHeadsV(Blocked):
    def values(self, op: DenseOperands, keys: slice) -> Tensor:
        return super().values(op, keys).roll(1, dims=1)


@defect("V of the last two heads exchanged in the last block only", "long")
class HeadsOfVExchangedAtTheEnd(Blocked):
    def expanded_v(self, tile: Tile, block: slice) -> Tensor:
        v = super().expanded_v(tile, block)
        return v.flip(1) if block.stop == tile.n else v


@defect("query heads take turns with the heads of K and V", "grouped")
class GroupsInterleaved(Blocked):
    def of_heads(self, rows: Tensor) -> Tensor:
        return rows.repeat(1, self.case.group, 1)


@defect("the last group reads the head of K and V before its own", "grouped")
class LastGroupReadsTheHeadBefore(Blocked):
    def of_heads(self, rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, -1] = rows[:, -2]
        return super().of_heads(rows)


@defect("V one row late", "dense", "long")
class VOneRowLate(Blocked):
    def values(self, op: DenseOperands, keys: slice) -> Tensor:
        return super().values(op, keys).roll(1, dims=0)
