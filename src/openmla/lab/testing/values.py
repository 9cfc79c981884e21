"""What the numbers of a case look like.

| kind | queries and keys | values |
|---|---|---|
| normal | unit normal | unit normal |
| peaky | queries 8 times larger: a few keys take all the weight | unit normal |
| rising | scores grow with the key's position: every block raises the maximum | unit normal |
| tiny | around the smallest normal number of the dtype, denormals included | likewise |
| large | 30 times larger | up to 1/8 of the dtype's range (at most 2^100) |
| equal | every key of a row scores the same | unit normal |
| exact | likewise | small integers: a mean over 2^n keys has no rounding at all |
| broken | unit normal, NaN or Inf in one of twelve rows or heads | likewise |

In the latent and sparse forms V is part of K, so `equal` and `exact` use queries that are zero
there.
"""

import math
from typing import Any

import torch
from torch import Tensor

from openmla.cache import DTYPES
from openmla.lab.testing.case import Case

BROKEN_ONE_IN = 12
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Draw:
    """Seeded tensors of one case, float32 unless said otherwise, always made on the CPU."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._generator = torch.Generator("cpu").manual_seed(case.seed)

    def normal(self, *shape: int) -> Tensor:
        """Unit normal."""
        return torch.randn(shape, generator=self._generator, **FLOAT)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 from low to high-1."""
        return torch.randint(low, high, shape, generator=self._generator, device="cpu")

    def permutation(self, n: int) -> Tensor:
        """0 … n-1 in random order."""
        return torch.randperm(n, generator=self._generator, device="cpu")

    def queries(self, tokens: int) -> Tensor:
        """[tokens, heads, d_qk]"""
        case = self.case
        q = self.normal(tokens, case.heads, case.d_qk)
        if case.values == "peaky":
            q = q * 8
        elif case.values == "large":
            q = q * 30
        elif case.values == "tiny":
            q = q * self._tiny(q, case.dtype)
        elif case.values == "rising":
            q = q.abs() + 0.5
        elif case.values in ("equal", "exact"):
            q = q.round()
            if case.form != "dense":
                q[..., : case.d_v] = 0
        return self._broken(q)

    def keys(self, positions: Tensor, *row: int) -> Tensor:
        """Key parts [tokens, *row]; `positions` are the places in their sequences, int64."""
        kind = self.case.values
        k = self.normal(positions.shape[0], *row)
        if kind == "large":
            k = k * 30
        elif kind == "tiny":
            k = k * self._tiny(k, self.case.dtype)
        elif kind == "rising":
            # Positive queries meet keys that grow along the sequence, a few units of score apart.
            level = positions.float() / max(self.case.longest, 1) * 4 - 2
            k = level.reshape(-1, *([1] * len(row))) + 0.2 * k
        elif kind in ("equal", "exact") and k.shape[0]:
            k = k[:1].round().expand_as(k)
        return k

    def latent(self, positions: Tensor) -> Tensor:
        """Latent rows [tokens, d_nope]: the first d_v columns are V as well."""
        case = self.case
        k = self.keys(positions, case.d_nope)
        if case.values in ("equal", "exact", "tiny"):
            k = torch.cat([self.values(k.shape[0], case.d_v), k[:, case.d_v :]], dim=1)
        return self._broken(k)

    def values(self, *shape: int) -> Tensor:
        """V"""
        kind, dtype = self.case.values, self.case.side_dtype or self.case.dtype
        if kind == "exact":
            return self.integers(-8, 9, *shape).float()
        v = self.normal(*shape)
        if kind == "large":
            return v * min(torch.finfo(DTYPES[dtype]).max / 8, 2.0**100)
        if kind == "tiny":
            return v * self._tiny(v, dtype)
        return v

    def per_token_scale(self, tokens: int) -> Tensor:
        """Positive factors around 1; exactly 1 where scores must stay equal."""
        if self.case.values in ("equal", "exact"):
            return torch.ones(tokens, **FLOAT)
        return 0.5 + torch.rand(tokens, generator=self._generator, **FLOAT)

    def key_mask(self, words: int, past: bool) -> Tensor:
        """int32 [total_q, words]: random bits for a query's keys, and `past` after the last."""
        case = self.case
        share = {"half": 0.5, "few": 0.02, "all": 1.0}[case.key_mask]
        shape, column = (case.total_q, 32 * words), torch.arange(32 * words, device="cpu")
        flags = torch.rand(shape, generator=self._generator, **FLOAT) < share
        lengths = torch.tensor(case.k_lens, dtype=torch.int64, device="cpu")
        keys = lengths.repeat_interleave(torch.tensor(case.q_lens, dtype=torch.int64, device="cpu"))
        flags = torch.where(column < keys[:, None], flags, past).view(case.total_q, words, 32)
        return (flags.to(torch.int64) << torch.arange(32, device="cpu")).sum(2).to(torch.int32)

    def sink(self) -> Tensor | None:
        """float32 [heads]"""
        kind, heads = self.case.sink, self.case.heads
        if kind == "none":
            return None
        if kind in ("low", "high"):
            return torch.full((heads,), -torch.inf if kind == "low" else torch.inf, **FLOAT)
        sink = self.normal(heads) * 2
        if kind == "mixed":
            sink[self.integers(0, heads, 1)] = torch.inf
            sink[self.integers(0, heads, 1)] = -torch.inf
        return sink

    def _broken(self, x: Tensor) -> Tensor:
        """x [..., columns]; where values are broken, a number of some rows is NaN, Inf or -Inf."""
        if self.case.values != "broken" or not x.numel():
            return x
        rows = x.reshape(-1, x.shape[-1])
        kinds = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cpu")
        drawn = kinds[self.integers(0, len(kinds), rows.shape[0], 1)]
        column = self.integers(0, rows.shape[1], rows.shape[0], 1)
        whole = self.integers(0, BROKEN_ONE_IN, rows.shape[0], 1) > 0
        rows.scatter_(1, column, torch.where(whole, rows.gather(1, column), drawn))
        return rows.view(x.shape)

    def _tiny(self, like: Tensor, dtype: str) -> Tensor:
        """Powers of two from 16 times below the smallest normal number to 2^16 above it."""
        lowest = int(math.log2(torch.finfo(DTYPES[dtype]).tiny))
        span = self.integers(-4, 17, *like.shape)
        return torch.pow(2.0, (lowest + span).double()).float()


def to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the nearest; what is finite is kept inside the finite range of the dtype."""
    return torch.where(values.isinf(), values, finite(values, dtype)).to(dtype)


def finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers inside the finite range of a dtype; NaN stays."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit)
