"""Small inputs of the indexer, and its definition by other means than the package's own.

pair(...)     queries, contiguous keys and windows
paged(...)    the same keys in a cache of shuffled pages
sorted_topk   the selection by one stable sort per row
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla import IndexCache
from openmla.indexer.cache import quantize

KINDS = (
    "random",
    "equal",
    "zeros",
    "half zeros",
    "narrow",
    "coarse",
    "ascending",
    "descending",
    "nan",
    "infinite",
    "lone peak",
)


class Paged(NamedTuple):
    """Arguments of indexer_scores over a cache."""

    q: Tensor
    keys: IndexCache
    weights: Tensor
    options: dict[str, Any]


def queries(total_q: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q e4m3 and weights of both signs."""
    g = torch.Generator().manual_seed(seed)
    q, q_scale = quantize(torch.randn(total_q * heads, 128, generator=g), "ue8m0")
    weights = torch.randn(total_q, heads, generator=g) * heads**-0.5
    weights = weights * q_scale.view(total_q, heads) * 128**-0.5
    return q.view(total_q, heads, 128), weights


def keys(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed + 1000))


def paged(
    q_lens: list[int],
    k_lens: list[int],
    heads: int = 8,
    page_size: int = 4,
    seed: int = 0,
    scales: str = "ue8m0",
) -> Paged:
    """Requests whose keys are in shuffled pages; table entries past a request's end are wild."""
    g = torch.Generator().manual_seed(seed)
    used = [-(-n // page_size) for n in k_lens]
    pages = torch.randperm(sum(used) + 2, generator=g).int()
    table = torch.full((len(k_lens), max([*used, 1])), -(2**30), dtype=torch.int32)
    cache = IndexCache.allocate(num_pages=sum(used) + 2, page_size=page_size, scales=scales)
    cache.data.fill_(0xFF)  # NaN, wherever no key is
    at = 0
    for b, n in enumerate(k_lens):
        table[b, : used[b]] = pages[at : at + used[b]]
        at += used[b]
        position = torch.arange(n)
        slots = table[b].long()[position // page_size] * page_size + position % page_size
        cache.append(keys(n, seed + b), slots)
    q, weights = queries(sum(q_lens), heads, seed)
    return Paged(
        q,
        cache,
        weights,
        {
            "cu_seqlens_q": torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()]).int(),
            "block_table": table,
            "cache_lengths": torch.tensor(k_lens, dtype=torch.int32),
        },
    )


def spread(keys: IndexCache, share: float = 0.02, seed: int = 0) -> IndexCache:
    """FP4 keys a share of whose exponents lie anywhere, often many octaves from their neighbors;
    exponents of rows that are not there stay NaN."""
    g = torch.Generator().manual_seed(seed)
    exponents = keys.exponents_view
    drawn = torch.randint(20, 220, exponents.shape, generator=g).to(torch.uint8)
    moved = (torch.rand(exponents.shape, generator=g) < share) & (exponents != 255)
    exponents.copy_(torch.where(moved, drawn, exponents))
    return keys


def formula(q: Tensor, values: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """All scores in float64, in one line."""
    dots = torch.einsum("thd,sd->ths", q.double(), values.double()).relu()
    return torch.einsum("ths,th->ts", dots, weights.double()) * scales.double()


def scores_of(kind: str, rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of scores that make a selection hard."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if kind == "equal":
        x.fill_(1.5)
    elif kind == "zeros":
        x = torch.where(x > 2, x, 0.0 * x)  # both zeros
    elif kind == "half zeros":
        x = x.relu()
    elif kind == "narrow":
        x = 100 + x * 1e-3
    elif kind == "coarse":
        x = (x * 4).round() / 4
    elif kind in ("ascending", "descending"):
        x = x.sort(-1, descending=kind == "descending").values
    elif kind == "nan":
        x = torch.where(x > -1, torch.nan, x)
    elif kind == "infinite":
        x = torch.where(x > 1, torch.inf, torch.where(x < 0, -torch.inf, x))
    elif kind == "lone peak":
        x.fill_(-1e-38)
        x[:, width // 2] = 7.0
    return x


def sorted_topk(scores: Tensor, topk: int, starts: Tensor, ends: Tensor) -> Tensor:
    """int32 [rows, topk] by a stable sort of each row; positions from the window's start."""
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    for row in range(scores.shape[0]):
        start, end = int(starts[row]), min(int(ends[row]), scores.shape[1])
        x = scores[row, max(start, 0) : max(end, 0)].double()
        # NaN below -inf, as a number that fp32 does not have.
        x = torch.where(x == -torch.inf, -1e300, x)
        order = torch.sort(x.nan_to_num(nan=-torch.inf), descending=True, stable=True).indices
        picked = order[:topk].sort().values
        out[row, : picked.shape[0]] = picked.int()
    return out
