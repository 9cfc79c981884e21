"""Seeded defects in the online softmax: maxima, rescaling, rounding, sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from defects.blocked import Blocked, State, Tile
from defects.showcases import defect


@defect("the output accumulator is bf16", "dense", "long", "fp16")
class Bf16Accumulator(Blocked):
    def accumulated(self, o: Tensor, product: Tensor) -> Tensor:
        return super().accumulated(o, product).bfloat16().float()


@defect("the row sum is kept in bf16", "dense", "long")
class Bf16RowSum(Blocked):
    def row_sum(self, p: Tensor) -> Tensor:
        return super().row_sum(p).bfloat16().float()


@defect("the row sum adds P rounded to bf16", "dense", "long", "sparse")
class RoundedPInRowSum(Blocked):
    def row_sum(self, p: Tensor) -> Tensor:
        return super().row_sum(self.rounded(p))


@defect("the output is not rescaled in the second block", "dense", "peaky")
class OneRescaleOfOutMissing(Blocked):
    def rescaled_out(self, state: State, correction: Tensor, block: slice) -> Tensor:
        if block.start == self.BN:
            return state.o
        return super().rescaled_out(state, correction, block)


@defect("the output is never rescaled", "rising", "dense", "sparse")
class RescaleOfOutMissing(Blocked):
    def rescaled_out(self, state: State, correction: Tensor, block: slice) -> Tensor:
        return state.o


@defect("the row sum is not rescaled in the second block", "dense", "peaky")
class OneRescaleOfSumMissing(Blocked):
    def rescaled_sum(self, state: State, correction: Tensor, block: slice) -> Tensor:
        if block.start == self.BN:
            return state.l
        return super().rescaled_sum(state, correction, block)


@defect("the correction is rounded to bf16", "fp16", "peaky")
class CorrectionRounded(Blocked):
    def rescaled_out(self, state: State, correction: Tensor, block: slice) -> Tensor:
        return super().rescaled_out(state, correction.bfloat16().float(), block)


@defect("the maximum is never raised after the first block", "large")
class MaximumOfFirstBlock(Blocked):
    def new_max(self, m: Tensor, scores: Tensor) -> Tensor:
        return torch.where(m == -torch.inf, super().new_max(m, scores), m)


@defect("the maximum starts at 0", "large")
class MaximumStartsAtZero(Blocked):
    def new_max(self, m: Tensor, scores: Tensor) -> Tensor:
        top = super().new_max(m, scores)
        return torch.where(top == -torch.inf, top, top.clamp(min=0))


@defect("no maximum is subtracted at all", "large")
class NoMaximum(Blocked):
    def new_max(self, m: Tensor, scores: Tensor) -> Tensor:
        top = super().new_max(m, scores)
        return torch.where(top == -torch.inf, top, 0.0)


@defect("hidden keys score -50000 instead of -inf", "empty")
class FiniteMask(Blocked):
    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        masked = super().mask(scores, tile, block)
        return torch.where(masked == -torch.inf, -50000.0, masked)


@defect("hidden keys score 0", "dense")
class MaskedScoresAreZero(Blocked):
    def mask(self, scores: Tensor, tile: Tile, block: slice) -> Tensor:
        masked = super().mask(scores, tile, block)
        return torch.where(masked == -torch.inf, 0.0, masked)


@defect("powers of 2 instead of e", "dense", "paged")
class BaseTwoSoftmax(Blocked):
    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x)


@defect("an exponential good to 3e-4 only", "dense", "fp16")
class CoarseExponential(Blocked):
    def exp(self, x: Tensor) -> Tensor:
        # A quadratic for the fraction, as a polynomial cut one term short would be.
        t = x * math.log2(math.e)
        whole = torch.where(torch.isfinite(t), torch.floor(t), t)
        f = torch.where(torch.isfinite(t), t - whole, 0.0)
        return torch.exp2(whole) * (1.0 + f * (0.6565 + f * 0.3435))


@defect("P kept as FP8", "dense", "long")
class Fp8P(Blocked):
    def rounded(self, p: Tensor) -> Tensor:
        return p.to(torch.float8_e4m3fn).float()


@defect("P truncated instead of rounded", "full", "long")
class TruncatedP(Blocked):
    def rounded(self, p: Tensor) -> Tensor:
        return (p.view(torch.int32) & -65536).view(torch.float32)


@defect("the sink is ignored", "sink", "sink_inf")
class SinkIgnored(Blocked):
    def sink_term(self, state: State) -> Tensor:
        return torch.zeros_like(state.l)


@defect("the sink enters lse", "sink")
class SinkInLse(Blocked):
    def log_sum(self, state: State) -> Tensor:
        return state.m + torch.log(state.l + self.sink_term(state))


@defect("the sink is not shifted by the maximum", "sink")
class SinkNotShifted(Blocked):
    def sink_term(self, state: State) -> Tensor:
        assert self.weights.sink is not None
        return torch.exp(self.weights.sink).expand_as(state.l)


@defect("the sink is multiplied by the scale", "sink")
class SinkScaled(Blocked):
    def sink_term(self, state: State) -> Tensor:
        assert self.weights.sink is not None
        return self.exp(self.weights.sink * self.weights.scale - state.m)


@defect("the sink of the next head", "sink")
class SinkOfTheWrongHead(Blocked):
    def sink_term(self, state: State) -> Tensor:
        assert self.weights.sink is not None
        return self.exp(self.weights.sink.roll(1) - state.m)


@defect("a sink of +inf gives NaN", "sink_inf")
class InfiniteSinkIsNan(Blocked):
    def normalized(self, state: State, denominator: Tensor) -> Tensor:
        return super().normalized(state, denominator) * (denominator / denominator)[..., None]
