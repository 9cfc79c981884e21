"""The running state of blocked attention: maximum, sum and unnormalized output of each row.

Scores arrive block by block in natural-log units, fp32. With m the largest score so far,

    l = sum(exp(s - m))        o = sum(exp(s - m) * v)

and when a block raises m, both are multiplied by exp(m_old - m_new). The exponential is taken as
exp2((s - m) * log2 e): the difference is formed first, so scores near the fp32 limit cannot
overflow, and torch's exp2 is about twice as fast as its exp.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.workspace import apart, in_whole_lines, whole_lines
from openmla.sequences import SequenceSpan

LOG2_E = math.log2(math.e)
LARGEST = torch.finfo(torch.float32).max
# A sum of 2**32 values below this is finite.
HUGE = LARGEST * 2.0**-33


class Finished(NamedTuple):
    """Rows of attention over some keys."""

    out: Tensor
    """[groups, rows, d_v], fp32."""
    lse: Tensor
    """[groups, rows]; -inf where no key was seen."""
    max_logits: Tensor
    """[groups, rows]: the largest score; -inf where no key was seen."""


def merge(parts: list[Finished], sink: Tensor | None) -> Finished:
    """The same rows over the keys of all parts, which were finished without a sink.

    Parts are added in their order: bits depend on the parts alone.
    """
    if len(parts) == 1 and sink is None:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    m = lse.amax(0)
    empty = m == -torch.inf
    weights = in_whole_lines(torch.exp2, (lse - torch.where(empty, 0.0, m)) * LOG2_E)
    total = weights[0].clone()  # torch's sum of five or more has an order that depends on the place
    for weight in weights[1:]:
        total += weight
    total.masked_fill_(empty, 1.0)
    denominator = total
    if sink is not None:
        extra = in_whole_lines(torch.exp2, (sink - m) * LOG2_E)
        denominator = torch.where(empty, 1.0, denominator + extra)
    weights = (weights / denominator).unsqueeze(-1)
    out = parts[0].out * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.out, weight)
    # Weights may add up to a little more than 1: an average of finite numbers stays finite.
    if all(is_finite(part.out) for part in parts):
        out.clamp_(-LARGEST, LARGEST)
    else:
        finite = torch.stack([torch.isfinite(part.out) for part in parts]).all(0)
        out = torch.where(finite, out.clamp(-LARGEST, LARGEST), out)
    if bool(empty.any()):
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
    largest = torch.stack([part.max_logits for part in parts]).amax(0)
    return Finished(out, m + in_whole_lines(torch.log, total), largest)


class OnlineSoftmax:
    """State for a batch of row groups: m, l [groups, rows], o [groups, rows, d_v].

    Values near the fp32 limit would overflow o before it is divided by l. From the first block that
    holds such values on, o is the running average sum(p * v) / l instead.
    """

    def __init__(self, groups: int, rows: int, d_v: int) -> None:
        make: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self.m = torch.full((groups, rows), -torch.inf, **make)
        self.l = torch.zeros(groups, rows, **make)
        self.o = apart(torch.empty(groups, whole_lines(rows * d_v), **make), rows, d_v)
        self.blocks = 0
        self.averages = False
        self.spoiled: Tensor | None = None  # NaN and Inf that rows have seen, 0 elsewhere

    def add_block(self, scores: Tensor, values: Tensor | list[Tensor], tame: bool = True) -> None:
        """Take in scores [groups, rows, n] (overwritten) and values [groups, n, d_v].

        Values as a list are multiplied one after another, so that bits of a group do not depend on
        how many there are.

        `tame=False` says that values may be huge, or NaN or Inf: a row must not meet those of a key
        that it does not see (0 * NaN is NaN).
        """
        m_new = torch.maximum(self.m, scores.amax(dim=-1))
        # A row that has seen no key yet has m = -inf; shifting by 0 avoids -inf - -inf = NaN.
        shift = torch.where(m_new == -torch.inf, 0.0, m_new)
        p = scores.sub_(shift.unsqueeze(-1)).mul_(LOG2_E).exp2_()
        if isinstance(values, list):
            self._add_one_by_one(p, values, (self.m - shift).mul_(LOG2_E))
            self.m = m_new
            self.blocks += 1
            return
        if not tame:
            values = self._set_aside(p, values)
            if not self.averages and not is_tame(values):
                self._start_averages()
        if self.averages:
            self._average(p, values, torch.exp2((self.m - shift) * LOG2_E))
        elif self.blocks == 0:
            self.l = p.sum(dim=-1)
            torch.bmm(p, values, out=self.o)
        else:
            correction = torch.exp2((self.m - shift) * LOG2_E)
            self.l.mul_(correction).add_(p.sum(dim=-1))
            self.o.mul_(correction.unsqueeze(-1)).baddbmm_(p, values)
        self.m = m_new
        self.blocks += 1

    def _add_one_by_one(self, p: Tensor, values: list[Tensor], fallen: Tensor) -> None:
        """Products of each group by themselves; `fallen` is log2 of the correction."""
        if self.blocks == 0:
            self.l = p.sum(dim=-1)
        else:
            correction = in_whole_lines(torch.exp2, fallen)
            self.l.mul_(correction).add_(p.sum(dim=-1))
            self.o.mul_(correction.unsqueeze(-1))
        for o, weights, of_group in zip(self.o, p, values, strict=True):
            if self.blocks == 0:
                torch.mm(weights, of_group, out=o)
            else:
                o.addmm_(weights, of_group)

    def finish(self, sink: Tensor | None = None) -> Finished:
        """The normalized rows; sink broadcasts to [groups, rows] and stays out of lse."""
        empty = self.m == -torch.inf
        denominator = self.l
        if sink is not None:
            denominator = denominator + torch.exp2((sink - self.m) * LOG2_E)
        if self.averages:
            denominator = denominator / self.l
        out = self.o.div_(torch.where(empty, 1.0, denominator).unsqueeze(-1))
        if self.spoiled is not None:
            out.add_(self.spoiled)
        if bool(empty.any()):
            out.masked_fill_(empty.unsqueeze(-1), 0.0)
        lse = torch.where(
            empty, self.m, self.m + in_whole_lines(torch.log, torch.where(empty, 1.0, self.l))
        )
        return Finished(out, lse, self.m)

    def _start_averages(self) -> None:
        self.averages = True
        if self.blocks == 0:
            self.o.zero_()
        else:
            self.o.div_(torch.where(self.l > 0, self.l, 1.0).unsqueeze(-1))

    def _average(self, p: Tensor, values: Tensor, correction: Tensor) -> None:
        """The average of what came before and of `values`, by their shares of the new l."""
        before = self.l * correction
        self.l = before + p.sum(dim=-1)
        share = 1 / torch.where(self.l > 0, self.l, 1.0)
        self.o.mul_((before * share).unsqueeze(-1))
        self.o.baddbmm_(p.mul_(share.unsqueeze(-1)), values)
        # Shares may add up to a little more than 1: an average of finite numbers stays finite.
        self.o.clamp_(-LARGEST, LARGEST)

    def _set_aside(self, p: Tensor, values: Tensor) -> Tensor:
        """Values with NaN and Inf zeroed; what those give to rows that see them is kept apart."""
        broken = ~torch.isfinite(values)
        if not broken.any():
            return values
        if self.spoiled is None:
            self.spoiled = torch.zeros_like(self.o)
        for group, key in broken.any(dim=-1).nonzero().tolist():
            seen = (p[group, :, key, None] > 0) & broken[group, key]
            self.spoiled[group] += torch.where(seen, values[group, key], 0.0)
        return values.masked_fill(broken, 0.0)


def is_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no Inf. A finite sum says so, 30 times as fast as each element."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def is_tame(values: Tensor) -> bool:
    """Whether sums of values cannot overflow: no NaN, no Inf, nothing huge."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool((low > -HUGE) & (high < HUGE))  # NaN compares false


def hide_unset_keys(scores: Tensor, words: Tensor, first: int) -> None:
    """-inf where the bit of a key is 0. Column c of `scores` [..., rows, n] is key first + c."""
    n, start = scores.shape[-1], first // 32
    here = words[:, start : -(-(first + n) // 32)]
    bits = (here[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    hidden = bits.flatten(1)[:, first - 32 * start :][:, :n] == 0
    if bool(scores.sum().isnan()):  # a hidden NaN must go too
        scores.masked_fill_(hidden, -torch.inf)
    else:  # 30 times as fast
        torch.minimum(scores, torch.where(hidden, -torch.inf, torch.inf), out=scores)


def hide_past_keys(
    scores: Tensor, span: SequenceSpan, start: int, first: int, window: int, rows_per_query: int = 1
) -> None:
    """-inf where a key comes before the last `window` up to its query (bottom-right causal).

    Rows and columns are those of `hide_future_keys`. Columns that the last query of the tile sees
    are in no row's past: they are not touched.
    """
    queries = scores.shape[-2] // rows_per_query
    first_of_first = span.k_len - span.q_len + start + 1 - window  # of the tile's first query
    columns = min(first_of_first + queries - 1 - first, scores.shape[-1])
    if columns <= 0:
        return
    key = torch.arange(first, first + columns, device=scores.device)
    query = torch.arange(queries, device=scores.device)
    hidden = key < (query + first_of_first)[:, None]
    if rows_per_query > 1:
        hidden = hidden.repeat_interleave(rows_per_query, dim=0)
    scores[..., :columns].masked_fill_(hidden, -torch.inf)


def hide_future_keys(
    scores: Tensor, span: SequenceSpan, start: int, first: int, rows_per_query: int = 1
) -> None:
    """-inf where a key comes after its query (bottom-right causal).

    Row r of `scores` belongs to query start + r // rows_per_query of the sequence, column c to key
    first + c. Columns that the first query of the tile sees are seen by all: they are not touched.
    """
    seen_by_first = span.k_len - span.q_len + start + 1
    column = max(seen_by_first - first, 0)
    if column >= scores.shape[-1]:
        return
    queries = scores.shape[-2] // rows_per_query
    key = torch.arange(first + column, first + scores.shape[-1], device=scores.device)
    query = torch.arange(queries, device=scores.device)
    hidden = key >= (query + seen_by_first)[:, None]
    if rows_per_query > 1:
        hidden = hidden.repeat_interleave(rows_per_query, dim=0)
    scores[..., column:].masked_fill_(hidden, -torch.inf)
