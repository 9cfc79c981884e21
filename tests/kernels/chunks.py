"""One prompt in latent form, and parts of it as calls of their own: what an invariant call is
asked with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.operands import LatentOperands, Results, Weights

SCALE = 0.1


class Prompt(NamedTuple):
    """Queries and rows of one sequence."""

    q: Tensor
    rows: Tensor
    d_v: int
    causal: bool = True
    sink: Tensor | None = None
    range_keys: int = 0

    @staticmethod
    def of(tokens: int, heads: int, d_v: int, rope: int, seed: int = 0) -> Prompt:
        """Random numbers; scores grow, so that references move."""
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(tokens, heads, d_v + rope, generator=generator)
        rows = torch.randn(tokens, d_v + rope, generator=generator)
        rows *= torch.linspace(0.5, 2.5, tokens)[:, None]
        sink = torch.randn(heads, generator=generator)
        return Prompt(q.bfloat16(), rows.bfloat16(), d_v, sink=sink)

    def call(self, *parts: tuple[int, int], page: int = 16, seed: int = 0) -> LatentOperands:
        """Tokens first … last - 1 of the prompt after all that come before them, for each part: a
        batch of requests that share nothing. Pages are anywhere."""
        generator = torch.Generator().manual_seed(seed)
        each = [-(-last // page) for _, last in parts]
        places = torch.randperm(sum(each) + 1, generator=generator).int()
        data = torch.full((len(places), page, self.rows.shape[1]), torch.nan).bfloat16()
        table = torch.zeros(len(parts), max(each), dtype=torch.int32)
        queries, used = [], 0
        for i, (first, last) in enumerate(parts):
            table[i, : each[i]] = places[used : used + each[i]]
            used += each[i]
            key = torch.arange(last)
            data[table[i, key // page].long(), key % page] = self.rows[:last]
            queries.append(self.q[first:last])
        ends = torch.tensor([0, *(last - first for first, last in parts)]).cumsum(0).int()
        cache = LatentCache(data, None, self.d_v, self.rows.shape[1] - self.d_v, "bf16")
        lengths = torch.tensor([last for _, last in parts]).int()
        weights = Weights(SCALE, self.sink)
        q = torch.cat(queries)
        options = self.causal, self.d_v, weights, True, 0, self.range_keys
        return LatentOperands(q, cache, table, lengths, ends, *options)


def new_results(op: LatentOperands) -> Results:
    """Outputs full of NaN."""
    out = torch.full((*op.q.shape[:2], op.d_v), torch.nan, dtype=op.q.dtype)
    return Results(out, torch.full(op.q.shape[:2], torch.nan))


def cut(results: Results, parts: tuple[tuple[int, int], ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """out and lse of each part of a call."""
    assert results.lse is not None
    first = 0
    for start, stop in parts:
        rows = slice(first, first + stop - start)
        yield results.out[rows], results.lse[rows]
        first = rows.stop


def other_bits(
    whole: Results, results: Results, parts: tuple[tuple[int, int], ...]
) -> list[tuple[int, int]]:
    """Parts whose bits are not those of the whole prompt."""
    assert whole.lse is not None
    return [
        part
        for part, (out, lse) in zip(parts, cut(results, parts), strict=True)
        if not torch.equal(out.view(torch.int16), whole.out[slice(*part)].view(torch.int16))
        or not torch.equal(lse.view(torch.int32), whole.lse[slice(*part)].view(torch.int32))
    ]
