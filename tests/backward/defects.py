"""Seeded defects of a backward pass: `BlockedBackward` with one deliberate mistake each.

A defect names the showcases in which it makes a difference. `judge_defect` asks the rule both ways:
a defect counts as seen where either verdict rejects it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backward.blocked import BlockedBackward, Keys, Queries
from defects.blocked import Blocked
from openmla import reference
from openmla.backward.reference import Saved
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import GradientVerdict, judge_twice
from openmla.lab.testing.gradients import BuiltGradients, GradientCase, build_gradients
from openmla.sequences import SequenceSpan

SEEDS = (1, 2, 3)
_DENSE = Case("dense", 4, 32, 16, 32, q_lens=(20, 9, 35), k_lens=(40, 9, 70))
SHOWCASES: dict[str, GradientCase] = {
    "plain": GradientCase(_DENSE),
    "lse": GradientCase(_DENSE, d_lse=True),
    "full": GradientCase(replace(_DENSE, causal=False)),
    "fp32": GradientCase(replace(_DENSE, dtype="fp32")),
    "fp16": GradientCase(replace(_DENSE, dtype="fp16")),
    "peaky": GradientCase(replace(_DENSE, values="peaky")),
    "small": GradientCase(_DENSE, d_out="small"),
    "sink": GradientCase(replace(_DENSE, sink="normal")),
    "sink and lse": GradientCase(replace(_DENSE, sink="normal"), d_lse=True),
    "sink inf": GradientCase(replace(_DENSE, sink="high"), d_lse=True),
    "many heads": GradientCase(replace(_DENSE, heads=24, q_lens=(24,), k_lens=(24,))),
    "mask": GradientCase(replace(_DENSE, key_mask="half")),
    "few bits": GradientCase(replace(_DENSE, key_mask="few"), d_lse=True),
    "per head": GradientCase(replace(_DENSE, rope="per_head")),
    "no rope": GradientCase(replace(_DENSE, rope="none", d_rope=0)),
    "empty rows": GradientCase(replace(_DENSE, q_lens=(30, 3, 4), k_lens=(13, 0, 5), spare=3)),
    "long keys": GradientCase(replace(_DENSE, heads=2, q_lens=(6,), k_lens=(400,), causal=False)),
    "negative scale": GradientCase(replace(_DENSE, scale=-0.2)),
}


@dataclass(frozen=True)
class Defect:
    """One deliberate mistake: an implementation that differs from `BlockedBackward` in one step."""

    name: str
    breaks: str
    shows: tuple[str, ...]
    implementation: type[BlockedBackward]

    def cases(self) -> list[GradientCase]:
        """The showcases with every seed."""
        shown = [SHOWCASES[name] for name in self.shows]
        return [replace(c, case=replace(c.case, seed=s)) for c in shown for s in SEEDS]


REGISTER: list[Defect] = []


def defect(breaks: str, *shows: str) -> Callable[[type[BlockedBackward]], type[BlockedBackward]]:
    """Register a class as a defect; its name becomes words."""
    if unknown := set(shows) - set(SHOWCASES):
        raise ValueError(f"unknown showcases: {sorted(unknown)}")

    def register(implementation: type[BlockedBackward]) -> type[BlockedBackward]:
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in implementation.__name__)
        REGISTER.append(Defect(words.strip(), breaks, shows, implementation))
        return implementation

    return register


def forward(built: BuiltGradients) -> Saved:
    """What a forward pass with rounded weights saves; the exact one, rounded, under a mask."""
    if built.operands.key_mask is None:
        outcome = Blocked(built.built).run()
        assert outcome.lse is not None
        return Saved(outcome.out, outcome.lse)
    truth = reference.of(built.operands)
    return Saved(truth.out.to(built.operands.q.dtype), truth.lse.float())


def verdicts(
    implementation: type[BlockedBackward], case: GradientCase
) -> tuple[GradientVerdict, GradientVerdict]:
    """The rule on an implementation: end to end, and with the forward pass taken as it is."""
    built = build_gradients(case)
    saved = forward(built)
    return judge_twice(built, implementation(built, saved).run(), saved)


def slipped(found: Defect) -> list[GradientCase]:
    """Cases in which neither verdict rejects a defect."""
    return [c for c in found.cases() if all(v.ok for v in verdicts(found.implementation, c))]


# Factors


@defect("the scale is not applied to d_q", "plain", "fp32")
class ScaleDroppedInQ(BlockedBackward):
    def q_factor(self) -> float:
        return 1.0


@defect("the scale is not applied to d_k", "plain", "fp32")
class ScaleDroppedInK(BlockedBackward):
    def k_factor(self) -> float:
        return 1.0


@defect("the scale is applied to d_q twice", "plain")
class ScaleSquaredInQ(BlockedBackward):
    def q_factor(self) -> float:
        return self.scale**2


@defect("the scale is applied to d_k twice", "plain")
class ScaleSquaredInK(BlockedBackward):
    def k_factor(self) -> float:
        return self.scale**2


@defect("log2 e stays in d_q", "plain")
class LogTwoInQ(BlockedBackward):
    def q_factor(self) -> float:
        return self.scale * math.log2(math.e)


@defect("log2 e is taken out of d_k once too often", "plain")
class LogTwoOutOfK(BlockedBackward):
    def k_factor(self) -> float:
        return self.scale / math.log2(math.e)


@defect("the sign of the scale is lost", "negative scale")
class SignOfScaleLost(BlockedBackward):
    def q_factor(self) -> float:
        return abs(self.scale)


@defect("d_q is 1 % too large", "plain", "lse", "fp16", "full")
class OnePercentInQ(BlockedBackward):
    def q_factor(self) -> float:
        return self.scale * 1.01


@defect("d_k is 1 % too small", "plain", "lse", "fp16", "full")
class OnePercentInK(BlockedBackward):
    def k_factor(self) -> float:
        return self.scale * 0.99


@defect("weights for d_v are 0.5 % too large", "plain", "small", "full")
class HalfPercentInV(BlockedBackward):
    def value_product(self, p: Tensor, tile: Queries) -> Tensor:
        return BlockedBackward.value_product(self, p, tile) * 1.005


# delta


@defect("the gradient of lse is ignored", "lse", "sink and lse")
class LseGradientIgnored(BlockedBackward):
    def lse_part(self, scores: Tensor, tile: Queries) -> Tensor:
        return torch.zeros_like(scores)


@defect("the gradient of lse has the wrong sign", "lse")
class LseGradientSubtracted(BlockedBackward):
    def lse_part(self, scores: Tensor, tile: Queries) -> Tensor:
        return -BlockedBackward.lse_part(self, scores, tile)


@defect("the gradient of lse goes by the weights with the sink", "sink and lse")
class LseGradientWithSink(BlockedBackward):
    def lse_part(self, scores: Tensor, tile: Queries) -> Tensor:
        return self.weights(scores, tile) * tile.d_lse[..., None]


@defect("delta is left out", "plain", "per head")
class NoDelta(BlockedBackward):
    def deltas(self, tile: Queries) -> Tensor:
        return torch.zeros(len(tile.q), self.heads)


@defect("delta of the row before", "plain", "fp32")
class DeltaOfAnotherRow(BlockedBackward):
    def deltas(self, tile: Queries) -> Tensor:
        return self.delta[tile.tokens].roll(1, 0)


@defect("delta of the neighboring head", "plain")
class DeltaOfAnotherHead(BlockedBackward):
    def deltas(self, tile: Queries) -> Tensor:
        return self.delta[tile.tokens].roll(1, 1)


@defect("delta without the last column of out", "plain", "fp32")
class DeltaWithoutLastColumn(BlockedBackward):
    def row_sums(self, tile: Queries) -> Tensor:
        return (tile.out * tile.d_out)[..., :-1].sum(-1)


@defect("delta is rounded to bf16", "plain", "peaky")
class DeltaRounded(BlockedBackward):
    def row_sums(self, tile: Queries) -> Tensor:
        return BlockedBackward.row_sums(self, tile).bfloat16().float()


@defect("delta of queries is not written before keys read it", "plain")
class DeltaNotThereYet(BlockedBackward):
    def key_pass(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> None:
        kept, self.delta = self.delta, torch.zeros_like(self.delta)
        BlockedBackward.key_pass(self, span, block, tiles)
        self.delta = kept


# Weights


@defect("the sink is not in the weights", "sink", "sink and lse")
class SinkMissing(BlockedBackward):
    def reference(self, tile: Queries) -> Tensor:
        return torch.where(tile.lse == -torch.inf, torch.inf, tile.lse)


@defect("weights are not normalized", "plain")
class NotNormalized(BlockedBackward):
    def weights(self, scores: Tensor, tile: Queries) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        return torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))


@defect("lse of the neighboring head", "plain")
class LseOfAnotherHead(BlockedBackward):
    def lse_rows(self, tokens: slice) -> Tensor:
        return self.saved.lse[tokens].roll(1, 1)


@defect("lse of the row before", "plain")
class LseOfAnotherRow(BlockedBackward):
    def lse_rows(self, tokens: slice) -> Tensor:
        return self.saved.lse[tokens].roll(1, 0)


@defect("lse is read in base two", "plain")
class LseInBaseTwo(BlockedBackward):
    def lse_rows(self, tokens: slice) -> Tensor:
        return self.saved.lse[tokens] * math.log2(math.e)


@defect("lse is rounded to bf16", "plain", "full")
class LseRounded(BlockedBackward):
    def lse_rows(self, tokens: slice) -> Tensor:
        return self.saved.lse[tokens].bfloat16().float()


@defect("weights are rounded to e4m3 for d_v", "plain")
class CoarseWeights(BlockedBackward):
    def value_product(self, p: Tensor, tile: Queries) -> Tensor:
        coarse = p.to(torch.float8_e4m3fn).float()
        return torch.einsum("mhn,mhv->nhv", coarse, self.used(tile))


@defect("gradients of scores are rounded to fp16, which flushes small ones", "small")
class FlushedScores(BlockedBackward):
    def rounded(self, x: Tensor) -> Tensor:
        return x.half().float()


@defect("rows without a key have weights", "empty rows", "few bits")
class EmptyRowsCount(BlockedBackward):
    def reference(self, tile: Queries) -> Tensor:
        return torch.where(tile.lse == -torch.inf, 0.0, tile.lse)

    def hidden(self, scores: Tensor, seen: Tensor) -> Tensor:
        some = seen.any(1)[:, None, None]
        return torch.where(some, BlockedBackward.hidden(self, scores, seen), scores)

    def used(self, tile: Queries) -> Tensor:
        return tile.d_out


# Masks


@defect("hidden keys get gradients", "plain", "mask")
class MaskForgotten(BlockedBackward):
    def hidden(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores


@defect("causal sees one key more", "plain")
class CausalOneMore(BlockedBackward):
    def causal(self, key: Tensor, position: Tensor) -> Tensor:
        return key <= position + 1


@defect("causal sees one key less", "plain")
class CausalOneLess(BlockedBackward):
    def causal(self, key: Tensor, position: Tensor) -> Tensor:
        return key < position


@defect("causal is aligned top-left", "plain")
class CausalTopLeft(BlockedBackward):
    def position(self, span: SequenceSpan, query: Tensor) -> Tensor:
        return query


@defect("the mask is ignored", "mask")
class MaskIgnored(BlockedBackward):
    def mask_bits(self, tile: Queries, key: Tensor) -> Tensor:
        return torch.ones(len(tile.q), len(key), dtype=torch.bool)


@defect("bits of the key after", "mask")
class MaskShifted(BlockedBackward):
    def mask_bits(self, tile: Queries, key: Tensor) -> Tensor:
        words = self.op.key_mask[tile.tokens]
        nxt = (key + 1).clamp(max=32 * words.shape[1] - 1)
        return ((words[:, nxt // 32] >> (nxt % 32).int()) & 1) != 0


@defect("bits of the first word for every key", "mask")
class MaskFirstWord(BlockedBackward):
    def mask_bits(self, tile: Queries, key: Tensor) -> Tensor:
        words = self.op.key_mask[tile.tokens]
        return ((words[:, key * 0] >> (key % 32).int()) & 1) != 0


# Tiles


@defect("the first query tile of a key block is skipped", "plain", "full")
class FirstTileSkipped(BlockedBackward):
    def tiles_of(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> list[Queries]:
        return BlockedBackward.tiles_of(self, span, block, tiles)[1:]


@defect("the last query tile of a key block is skipped", "plain", "full")
class LastTileSkipped(BlockedBackward):
    def tiles_of(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> list[Queries]:
        return BlockedBackward.tiles_of(self, span, block, tiles)[:-1]


@defect("the last key block of a query tile is skipped", "plain")
class LastBlockSkipped(BlockedBackward):
    def blocks_of(self, span: SequenceSpan, tile: Queries, blocks: list[Keys]) -> list[Keys]:
        return BlockedBackward.blocks_of(self, span, tile, blocks)[:-1]


@defect("a query tile is counted twice", "plain", "full")
class TileTwice(BlockedBackward):
    def tiles_of(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> list[Queries]:
        found = BlockedBackward.tiles_of(self, span, block, tiles)
        return found + found[-1:]


@defect("d_q holds the last block alone", "plain", "long keys")
class AccumulatorOverwritten(BlockedBackward):
    def add_q(self, acc: Tensor, product: Tensor, block: Keys) -> Tensor:
        return product


@defect("d_k is not cleared between blocks", "plain")
class StaleAccumulator(BlockedBackward):
    def key_pass(self, span: SequenceSpan, block: Keys, tiles: list[Queries]) -> None:
        BlockedBackward.key_pass(self, span, block, tiles)
        if block.first:
            before = slice(block.rows.start - len(block.k), block.rows.start)
            self.d_k[block.rows] += self.d_k[before]


@defect("accumulators of d_q are bf16", "long keys", "full")
class CoarseAccumulatorOfQ(BlockedBackward):
    BN = 8

    def add_q(self, acc: Tensor, product: Tensor, block: Keys) -> Tensor:
        return (acc + product).bfloat16().float()


@defect("accumulators of d_v are bf16", "full", "plain")
class CoarseAccumulatorOfV(BlockedBackward):
    BM = 4

    def add_v(self, acc: Tensor, product: Tensor, tile: Queries) -> Tensor:
        return (acc + product).bfloat16().float()


@defect("accumulators of d_k are bf16", "full", "plain")
class CoarseAccumulatorOfK(BlockedBackward):
    BM = 4

    def add_k(self, acc: Tensor, product: Tensor, tile: Queries) -> Tensor:
        return (acc + product).bfloat16().float()


@defect("scores of one block meet d_out . v of the block before", "long keys", "plain")
class StaleValues(BlockedBackward):
    def d_weights(self, tile: Queries, block: Keys) -> Tensor:
        span = next(s for s in self.spans() if s.k_start <= block.rows.start < s.k_start + s.k_len)
        before = self.keys(span, max(block.first - self.BN, 0))
        n = min(len(block.k), len(before.v))
        other = torch.cat([before.v[:n], block.v[n:]])
        return torch.einsum("mhv,nhv->mhn", self.used(tile), other)


@defect("v of the neighboring head", "plain")
class ValuesOfAnotherHead(BlockedBackward):
    def values(self, rows: slice) -> Tensor:
        return self.op.v[rows].float().roll(1, 1)


@defect("the row after a sequence is taken for one of it", "plain")
class RowPastTheSequence(BlockedBackward):
    def spans(self) -> list[SequenceSpan]:
        spans = BlockedBackward.spans(self)
        first = spans[0]
        return [first._replace(q_len=first.q_len + 1, k_len=first.k_len + 1), *spans[1:]]


@defect("the last sequence of the batch is left out", "plain", "no rope")
class SequenceMissing(BlockedBackward):
    def spans(self) -> list[SequenceSpan]:
        return BlockedBackward.spans(self)[:-1]


# What is stored


@defect("the rope row gets the gradient of the first head", "plain")
class RopeOfOneHead(BlockedBackward):
    def rope_sum(self, per_head: Tensor) -> Tensor:
        return per_head[:, 0]


@defect("the rope row misses the last head", "plain")
class RopeWithoutLastHead(BlockedBackward):
    def rope_sum(self, per_head: Tensor) -> Tensor:
        return per_head[:, :-1].sum(1)


@defect("the rope row gets the mean of the heads", "plain")
class RopeMean(BlockedBackward):
    def rope_sum(self, per_head: Tensor) -> Tensor:
        return per_head.mean(1)


@defect("heads of the rope row are added in bf16", "many heads")
class RopeSumRounded(BlockedBackward):
    def rope_sum(self, per_head: Tensor) -> Tensor:
        total = torch.zeros_like(per_head[:, 0]).bfloat16()
        for head in range(per_head.shape[1]):
            total = total + per_head[:, head].bfloat16()
        return total.float()


@defect("d_k and d_v change places in their buffer", "plain")
class PartsSwapped(BlockedBackward):
    def stored(self) -> dict[str, Tensor]:
        found = BlockedBackward.stored(self)
        return {**found, "k_nope": found["v"], "v": found["k_nope"]}


@defect("keys that nobody sees keep what was there", "empty rows", "few bits")
class UnseenNotWritten(BlockedBackward):
    def stored(self) -> dict[str, Tensor]:
        found = BlockedBackward.stored(self)
        unseen = found["v"] == 0
        found["v"] = torch.where(unseen, torch.full_like(found["v"], 1e-30), found["v"])
        return found


@defect("keys that nobody sees get -0", "empty rows", "few bits")
class UnseenNegativeZero(BlockedBackward):
    def stored(self) -> dict[str, Tensor]:
        found = BlockedBackward.stored(self)
        found["k_nope"] = torch.where(found["k_nope"] == 0, -0.0, found["k_nope"].float()).to(
            found["k_nope"].dtype
        )
        return found


@defect("d_sink has the wrong sign", "sink", "sink and lse")
class SinkSign(BlockedBackward):
    def sink_part(self, tile: Queries) -> Tensor:
        return -BlockedBackward.sink_part(self, tile)


@defect("d_sink misses the first tile of every sequence", "sink")
class SinkTileMissing(BlockedBackward):
    def sink_part(self, tile: Queries) -> Tensor:
        part = BlockedBackward.sink_part(self, tile)
        return part if tile.first else torch.zeros_like(part)


@defect("d_sink takes the gradient of lse in", "sink and lse")
class SinkTakesLse(BlockedBackward):
    def sink_part(self, tile: Queries) -> Tensor:
        if self.sink is None:
            return torch.zeros(self.heads)
        factor = torch.exp(self.reference(tile) - tile.lse)
        share = 1 / (1 + torch.exp(tile.lse - self.sink))
        return -(share * (self.delta[tile.tokens] - tile.d_lse * factor)).sum(0)


@defect("a sink of +inf makes NaN", "sink inf")
class InfiniteSink(BlockedBackward):
    def lse_part(self, scores: Tensor, tile: Queries) -> Tensor:
        factor = torch.exp(self.reference(tile) - tile.lse)
        return self.weights(scores, tile) * (factor * tile.d_lse)[..., None]
