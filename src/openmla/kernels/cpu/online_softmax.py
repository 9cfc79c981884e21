"""The running state of blocked attention: maximum, sum and unnormalized output of each row.

Scores arrive block by block in natural-log units, fp32. With m the largest score so far,

    l = sum(exp(s - m))        o = sum(exp(s - m) * v)

and when a block raises m, both are multiplied by exp(m_old - m_new). The exponential is taken as
exp2((s - m) * log2 e): the difference is formed first, so scores near the fp32 limit cannot
overflow, and torch's exp2 is about twice as fast as its exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmla.sequences import Span

LOG2_E = math.log2(math.e)


class OnlineSoftmax:
    """State for a batch of row groups: m, l [groups, rows], o [groups, rows, d_v]."""

    def __init__(self, groups: int, rows: int, d_v: int) -> None:
        self.m = torch.full((groups, rows), -torch.inf)
        self.l = torch.zeros(groups, rows)
        self.o = torch.empty(groups, rows, d_v)
        self.blocks = 0

    def add_block(self, scores: Tensor, values: Tensor, finite: bool = True) -> None:
        """Take in scores [groups, rows, n] (overwritten) and values [groups, n, d_v].

        `finite=False` says that values may hold NaN or Inf: a row must not meet those of a key
        that it does not see (0 * NaN is NaN).
        """
        m_new = torch.maximum(self.m, scores.amax(dim=-1))
        # A row that has seen no key yet has m = -inf; shifting by 0 avoids -inf - -inf = NaN.
        shift = torch.where(m_new == -torch.inf, 0.0, m_new)
        p = scores.sub_(shift.unsqueeze(-1)).mul_(LOG2_E).exp2_()
        if not finite:
            values, spoiled = _set_aside(p, values)
        if self.blocks == 0:
            self.l = p.sum(dim=-1)
            torch.bmm(p, values, out=self.o)
        else:
            correction = torch.exp2((self.m - shift) * LOG2_E)
            self.l.mul_(correction).add_(p.sum(dim=-1))
            self.o.mul_(correction.unsqueeze(-1)).baddbmm_(p, values)
        if not finite:
            self.o.add_(spoiled)
        self.m = m_new
        self.blocks += 1

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, max_logits); sink broadcasts to [groups, rows] and stays out of lse."""
        empty = self.m == -torch.inf
        denominator = self.l
        if sink is not None:
            denominator = denominator + torch.exp2((sink - self.m) * LOG2_E)
        out = self.o.div_(torch.where(empty, 1.0, denominator).unsqueeze(-1))
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
        lse = torch.where(empty, self.m, self.m + torch.log(torch.where(empty, 1.0, self.l)))
        return out, lse, self.m


def all_finite(values: Tensor) -> bool:
    """Whether values hold no NaN or Inf. One sum tells; should it overflow, care does no harm."""
    return bool(torch.isfinite(values.sum()))


def _set_aside(p: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Values with the rows of NaN or Inf zeroed, and what those rows add where p is not 0."""
    broken = ~torch.isfinite(values).all(dim=-1)
    clean = values.masked_fill(broken.unsqueeze(-1), 0.0)
    spoiled = torch.zeros(*p.shape[:2], values.shape[-1])
    for group, key in broken.nonzero().tolist():
        weight = p[group, :, key, None]
        spoiled[group] += torch.where(weight > 0, weight * values[group, key], 0.0)
    return clean, spoiled


def hide_future_keys(
    scores: Tensor, span: Span, start: int, first: int, rows_per_query: int = 1
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
    key = torch.arange(first + column, first + scores.shape[-1])
    hidden = key >= (torch.arange(queries) + seen_by_first)[:, None]
    if rows_per_query > 1:
        hidden = hidden.repeat_interleave(rows_per_query, dim=0)
    scores[..., column:].masked_fill_(hidden, -torch.inf)
