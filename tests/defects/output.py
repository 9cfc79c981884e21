"""Seeded defects in what is stored: empty rows, lse, rounding, rows and heads left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from defects.blocked import Blocked, State, Tile
from defects.showcases import defect


@defect("an empty row is NaN", "empty")
class EmptyRowNan(Blocked):
    def empty_out(self, state: State) -> Tensor:
        return torch.full_like(state.o, torch.nan)


@defect("an empty row is -0", "empty")
class EmptyRowMinusZero(Blocked):
    def empty_out(self, state: State) -> Tensor:
        return -torch.zeros_like(state.o)


@defect("lse of an empty row is +inf", "empty")
class EmptyLsePlusInfinity(Blocked):
    def empty_lse(self) -> float:
        return torch.inf


@defect("lse of an empty row is a large negative number", "empty")
class EmptyLseFinite(Blocked):
    def empty_lse(self) -> float:
        return -50000.0


@defect("an fp32 output is rounded to the type of q first", "fp32_out", "fp32_out_fp16")
class RoundedBeforeFp32(Blocked):
    def stored(self, out: Tensor) -> Tensor:
        return out.to(self.dtype).float()


@defect("lse in base 2", "dense", "paged", "sparse")
class BaseTwoLse(Blocked):
    def log_sum(self, state: State) -> Tensor:
        return super().log_sum(state) * math.log2(math.e)


@defect("lse without the maximum", "dense")
class LseWithoutMaximum(Blocked):
    def log_sum(self, state: State) -> Tensor:
        return torch.log(state.l)


@defect("lse rounded to bf16", "dense", "paged")
class LseRounded(Blocked):
    def log_sum(self, state: State) -> Tensor:
        return super().log_sum(state).bfloat16().float()


@defect("lse rounded to fp16", "dense", "long")
class LseInFp16(Blocked):
    def log_sum(self, state: State) -> Tensor:
        return super().log_sum(state).half().float()


@defect("max_logits without the scale", "max_logits")
class MaxLogitsUnscaled(Blocked):
    def finish(self, tile: Tile, state: State) -> None:
        super().finish(tile, state)
        self.max_logits[tile.tokens.start : tile.tokens.stop] = state.m / self.weights.scale


@defect("outputs truncated instead of rounded", "dense", "paged", "sparse")
class TruncatedOutputs(Blocked):
    def stored(self, out: Tensor) -> Tensor:
        return (out.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


@defect("fp16 outputs pass through bf16", "fp16")
class OutputsThroughBf16(Blocked):
    def stored(self, out: Tensor) -> Tensor:
        return out.bfloat16().to(self.dtype)


@defect("the reciprocal of the row sum is rounded to bf16", "fp16")
class RoundedReciprocal(Blocked):
    # In bf16 this costs no more than the rounding of P does, and the rule accepts it.
    def normalized(self, state: State, denominator: Tensor) -> Tensor:
        return state.o * (1 / denominator).bfloat16().float()[..., None]


@defect("outputs are not normalized", "dense")
class NotNormalized(Blocked):
    def normalized(self, state: State, denominator: Tensor) -> Tensor:
        return state.o


@defect("the last column of the output is not written", "odd_width", "paged")
class LastOutputColumnMissing(Blocked):
    def stored(self, out: Tensor) -> Tensor:
        out[..., -1] = 0
        return super().stored(out)


@defect("the last row of a partial tile is not written", "dense", "paged")
class LastRowMissing(Blocked):
    def finish(self, tile: Tile, state: State) -> None:
        super().finish(tile, state)
        if len(tile.tokens) % self.BM:
            self.out[tile.tokens[-1]] = 0


@defect("a partial tile repeats its first row", "dense")
class FirstRowRepeated(Blocked):
    def finish(self, tile: Tile, state: State) -> None:
        super().finish(tile, state)
        self.out[tile.tokens[-1]] = self.out[tile.tokens[0]]


@defect("the last head of an odd count is not computed", "paged")
class OddHeadMissing(Blocked):
    def finish(self, tile: Tile, state: State) -> None:
        super().finish(tile, state)
        if self.heads % 2:
            self.out[tile.tokens.start : tile.tokens.stop, -1] = 0


@defect("one row of one head is 2 % off", "dense", "long")
class OneRowSlightlyOff(Blocked):
    def finish(self, tile: Tile, state: State) -> None:
        super().finish(tile, state)
        self.out[tile.tokens.start, 0] *= 1.02


@defect("two heads exchanged in the output", "dense", "sparse")
class HeadsExchanged(Blocked):
    def stored(self, out: Tensor) -> Tensor:
        return super().stored(out[:, [1, 0, *range(2, self.heads)]])


@defect("a sink of +inf makes lse -inf", "sink_inf")
class InfiniteSinkEmptiesLse(Blocked):
    def log_sum(self, state: State) -> Tensor:
        lse = super().log_sum(state)
        return torch.where(self.sink_term(state) == torch.inf, -torch.inf, lse)
