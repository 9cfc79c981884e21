"""Seeded defects in the scores: scales, rope, widths, quantization."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from defects.blocked import Blocked, Tile
from defects.showcases import defect
from openmla.block_scaling import dequantize
from openmla.cache import LatentCache, pick_rows
from openmla.operands import DenseOperands
from openmla.sequences import SequenceSpan


@defect("scale 1 % too large", "dense", "paged", "sparse")
class ScaleOffByOnePercent(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        return super().queries(tile) * 1.01


@defect("scale 0.1 % too small", "dense", "peaky")
class ScaleOffByOnePerMille(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        return super().queries(tile) * 0.999


@defect("default scale from d_nope, not from d_nope + d_rope", "dense")
class ScaleOfNopeWidth(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        return super().queries(tile) * math.sqrt(self.case.d_qk / self.case.d_nope)


@defect("scale applied twice", "paged", "sparse")
class ScaleTwice(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        return super().queries(tile) * self.weights.scale


@defect("scaled queries rounded to bf16 again", "dense", "peaky", "paged")
class ScaledQueriesRounded(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        return super().queries(tile).bfloat16().float()


@defect("scores rounded to bf16", "dense", "paged")
class ScoresRounded(Blocked):
    def scores(self, q: Tensor, tile: Tile, block: slice) -> Tensor:
        return super().scores(q, tile, block).bfloat16().float()


@defect("rope columns left out of the scores", "dense", "paged", "rope_cache")
class RopeDropped(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        q = super().queries(tile)
        q[..., self.case.d_nope :] = 0
        return q


@defect("rope left out for the last head", "dense", "paged")
class RopeDroppedForOneHead(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        q = super().queries(tile)
        q[:, -1, self.case.d_nope :] = 0
        return q


@defect("rope of the next token", "dense", "rope_cache")
class RopeOfTheWrongToken(Blocked):
    def rope(self, op: DenseOperands, span: SequenceSpan, keys: slice) -> Tensor | None:
        rope = super().rope(op, span, keys)
        return None if rope is None else rope.roll(1, dims=0)


@defect("rope always read from the first sequence", "dense")
class RopeOfTheWrongSequence(Blocked):
    def rope(self, op: DenseOperands, span: SequenceSpan, keys: slice) -> Tensor | None:
        return super().rope(op, span, slice(0, keys.stop - keys.start))


@defect("q_scale ignored", "scaled")
class QScaleDropped(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        tokens = slice(tile.tokens.start, tile.tokens.stop)
        return self.op.q[tokens].float() * self.weights.scale


@defect("q_scale of the tile's first query for all of it", "scaled")
class QScaleOfTheTile(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        tokens = slice(tile.tokens.start, tile.tokens.stop)
        q = self.op.q[tokens].float() * self.weights.scale
        assert self.weights.q_scale is not None
        return q * self.weights.q_scale[tile.tokens.start]


@defect("k_scale ignored", "scaled", "paged_scaled")
class KScaleDropped(Blocked):
    def k_scale(self, ids: Tensor) -> Tensor | None:
        return None


@defect("k_scale of the row before", "scaled", "paged_scaled")
class KScaleOffByOne(Blocked):
    def k_scale(self, ids: Tensor) -> Tensor | None:
        return super().k_scale((ids - 1).clamp(min=0))


@defect("k_scale found by position in the sequence, not by physical row", "paged_scaled")
class KScaleByPosition(Blocked):
    def k_scale(self, ids: Tensor) -> Tensor | None:
        return super().k_scale(torch.arange(ids.shape[0], device="cpu"))


@defect("the last column of a width that is no multiple of 16 is dropped", "odd_width")
class LastColumnDropped(Blocked):
    def queries(self, tile: Tile) -> Tensor:
        q = super().queries(tile)
        q[..., self.case.d_nope - 1] = 0
        return q


@defect("FP8 block scales off by one block", "fp8")
class BlockScaleOffByOneBlock(Blocked):
    def read(self, cache: LatentCache, slots: Tensor) -> Tensor:
        return _dequantized(cache, slots, roll=1, shift=0)


@defect("FP8 block scales of the row before", "fp8")
class BlockScaleOffByOneRow(Blocked):
    def read(self, cache: LatentCache, slots: Tensor) -> Tensor:
        return _dequantized(cache, slots, roll=0, shift=1)


@defect("FP8 block scales ignored", "fp8")
class BlockScaleDropped(Blocked):
    def read(self, cache: LatentCache, slots: Tensor) -> Tensor:
        return _raw_values(cache, slots).float()


@defect("FP8 denormals read as zero", "fp8")
class Fp8DenormalsFlushed(Blocked):
    def read(self, cache: LatentCache, slots: Tensor) -> Tensor:
        values = super().read(cache, slots)
        raw = _raw_values(cache, slots).float()
        # Denormals of e4m3 reach 2^-6; flushing a wider range stands for a coarser format.
        return torch.where(raw.abs() < 2.0**3, 0.0, values)


def _raw_values(cache: LatentCache, slots: Tensor) -> Tensor:
    return pick_rows(cache.data.view(torch.uint8), slots).view(torch.float8_e4m3fn)


def _dequantized(cache: LatentCache, slots: Tensor, roll: int, shift: int) -> Tensor:
    assert cache.scales is not None
    scales = pick_rows(cache.scales, slots).roll(roll, dims=1).roll(shift, dims=0)
    return dequantize(_raw_values(cache, slots), scales, cache.layout.block).float()
