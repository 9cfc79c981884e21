"""Dense MLA prefill on the CPU, latent form over a paged cache.

Called by kernels/launch.py only. All heads of a token read the same rows, so a tile is tokens ×
heads rows of one matrix product, and a cache row is fetched (and dequantized) once per tile. A tile
is the piece of work that one thread takes. A request that is one tile alone (decode, and the last
tokens of a prompt) is divided by ranges of its keys instead: by its own lengths, never by those of
others in the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.latent_invariant import invariant_latent
from openmla.kernels.cpu.online_softmax import (
    Finished,
    OnlineSoftmax,
    hide_future_keys,
    hide_past_keys,
    is_tame,
    merge,
)
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workers import divide
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import LatentOperands, Results
from openmla.sequences import SequenceSpan, first_key, page_rows, paged_spans, visible_keys


class _Tile(NamedTuple):
    """Tokens start … stop-1 of one sequence, all heads."""

    span: SequenceSpan
    start: int
    stop: int

    @property
    def tokens(self) -> slice:
        """Its rows of the batch."""
        return slice(self.span.q_start + self.start, self.span.q_start + self.stop)


class _Piece(NamedTuple):
    """A tile and the blocks of keys that it meets, each with its first and last."""

    tile: _Tile
    blocks: list[tuple[int, int]]


def latent(config: CpuConfig, op: LatentOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence stay empty rows."""
    if op.invariant:
        invariant_latent(config, op, results)
        return
    pieces, scores = [], 0
    for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
        scores += op.q.shape[1] * span.q_len * min(span.k_len, op.window or span.k_len)
        pieces += _pieces(config, op, span)

    def work_on(work: Workspace, piece: _Piece) -> Finished | None:
        part = _attend(op, work, piece)
        if len(piece.blocks) < _block_count(config, op, piece.tile):
            return part
        _store(op, results, piece.tile, [part])
        return None

    parts = divide(work_on, pieces, 2.0 * scores * (op.q.shape[2] + op.d_v))
    ranges: dict[_Tile, list[Finished]] = {}
    for piece, part in zip(pieces, parts, strict=True):
        if part is not None:
            ranges.setdefault(piece.tile, []).append(part)
    for tile, of_tile in ranges.items():
        _store(op, results, tile, of_tile)


def _pieces(config: CpuConfig, op: LatentOperands, span: SequenceSpan) -> list[_Piece]:
    """The tiles of a sequence, or the ranges of the one that it is."""
    tokens = config.tokens_per_tile(op.q.shape[1])
    starts = range(0, span.q_len, tokens)
    tiles = [_Tile(span, start, min(start + tokens, span.q_len)) for start in starts]
    if len(tiles) == 1:
        ranges = config.in_ranges(_blocks(config, op, tiles[0]))
        return [_Piece(tiles[0], blocks) for blocks in ranges]
    pieces = [_Piece(tile, _blocks(config, op, tile)) for tile in tiles]
    return [piece for piece in pieces if piece.blocks]


def _block_starts(config: CpuConfig, op: LatentOperands, tile: _Tile) -> range:
    """Where the blocks of keys begin that a tile meets: from the first key that its first token
    sees to the last that its last token sees."""
    span = tile.span
    first = first_key(visible_keys(tile.start, span.q_len, span.k_len, op.causal), op.window)
    seen = visible_keys(tile.stop - 1, span.q_len, span.k_len, op.causal)
    return range(first, seen, config.keys_per_block((tile.stop - tile.start) * op.q.shape[1]))


def _block_count(config: CpuConfig, op: LatentOperands, tile: _Tile) -> int:
    return len(_block_starts(config, op, tile))


def _blocks(config: CpuConfig, op: LatentOperands, tile: _Tile) -> list[tuple[int, int]]:
    starts = _block_starts(config, op, tile)
    return [(first, min(first + starts.step, starts.stop)) for first in starts]


def _attend(op: LatentOperands, work: Workspace, piece: _Piece) -> Finished:
    """A tile over some of its keys."""
    tile, heads = piece.tile, op.q.shape[1]
    q = work.pack("q", op.q[tile.tokens]).mul_(op.weights.scale)
    if op.weights.q_scale is not None:
        q.mul_(op.weights.q_scale[tile.tokens, None, None])
    q = q.flatten(0, 1)

    state = OnlineSoftmax(1, q.shape[0], op.d_v)
    for first, last in piece.blocks:
        slots = page_rows(op.block_table[tile.span.number], op.cache.page_size, first, last)
        rows = work.pack("rows", op.cache.read(slots))
        scores = work.take("scores", 1, q.shape[0], last - first)
        torch.mm(q, rows.T, out=scores[0])
        if op.weights.k_scale is not None:
            scores.mul_(op.weights.k_scale[slots])
        if op.causal:
            hide_future_keys(scores, tile.span, tile.start, first, rows_per_query=heads)
        if op.window:
            hide_past_keys(scores, tile.span, tile.start, first, op.window, rows_per_query=heads)
        state.add_block(scores, rows[None, :, : op.d_v], is_tame(rows))
    return state.finish()


def _store(op: LatentOperands, results: Results, tile: _Tile, parts: list[Finished]) -> None:
    """Merge what a tile has of its ranges of keys, and write its rows."""
    sink: Tensor | None = op.weights.sink
    rows = merge(parts, None if sink is None else sink.repeat(tile.stop - tile.start))
    results.write(tile.tokens, *(x.unflatten(1, (-1, op.q.shape[1]))[0] for x in rows))
