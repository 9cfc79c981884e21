"""Selections of groups of keys: pools that are scored by one key, and blocks of candidates.

Pools (GLM-5.3-Flash). A key stands for 4 consecutive tokens, and the best pools are selected with
`ends` counted in pools. `expand_pools` makes tokens of them, and adds those of the pool that is not
complete yet, which nothing scored:

    14 tokens so far, pools 0 and 2 of three selected    0 1 2 3   8 9 10 11   12 13

Blocks (DeepSeek-V4.1). One layer's scores name, for each query, the best blocks of 8 keys
(`select_blocks`); layers after it choose their keys inside these only (`select_in_blocks`), from
scores of their own. The last block is always one of them.

Definitions in plain Python are in openmla.indexer.groups_reference. Here they are torch operations
around `select_topk`, which has a kernel for every chip; equal scores go to the smaller position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from openmla.checks import tensor
from openmla.errors import InvalidArgument
from openmla.indexer import checks
from openmla.indexer.api import select_topk
from openmla.problem import Backend


def expand_pools(pools: Tensor, lengths: Tensor, pool: int) -> Tensor:
    """int32 [total_q, n * pool + pool - 1]: the tokens of selected pools, and the unfinished one's.

    Tokens count from the sequence's first, ascending where pools are, then -1.

    Args:
        pools: int32 [total_q, n], which complete pools each query selected, -1 after the last of
            them, as select_topk and index_topk(rows="relative") write them.
        lengths: int32 [total_q], how many tokens a query sees, its own included.
        pool: tokens of a complete pool.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.

    >>> expand_pools(torch.tensor([[0, 2, -1]]).int(), torch.tensor([14]).int(), 4).tolist()
    [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1, -1]]
    """
    pool = checks.count("pool", pool, 1)
    tensor("pools", pools, ("total_q", "n"), (torch.int32,))
    tensor("lengths", lengths, (pools.shape[0],), (torch.int32,), pools.device)
    width = pools.shape[1] * pool
    column = torch.arange(width + pool - 1, dtype=torch.int32, device=pools.device)
    of_pools = (pools >= 0).sum(1, keepdim=True, dtype=torch.int32) * pool
    places = torch.arange(pool, dtype=torch.int32, device=pools.device)
    tokens = (pools[:, :, None] * pool + places).flatten(1)
    tokens = pad(tokens, (0, pool - 1), value=-1)
    behind, left = column - of_pools, (lengths % pool)[:, None]
    tail = lengths[:, None] - left + behind
    tail = torch.where(behind < left, tail, -1)
    return torch.where(behind < 0, tokens, tail)


def select_blocks(
    scores: Tensor,
    count: int,
    *,
    block: int = 8,
    ends: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """int32 [total_q, count]: the best blocks of `block` keys of each query, ascending, then -1.

    A block scores as its best key that is seen, NaN counting as -inf; the last block that has such
    a key is selected whatever it scores, and counts among `count`.

    Args:
        scores: fp32 [total_q, width], a score per key, without gradients.
        count: how many blocks at most, at least 1.
        block: keys of a block.
        ends: int32 [total_q], how many keys each query sees; all if None.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> select_blocks(torch.tensor([[1.0, 5.0, 0.0, 2.0, 9.0, 0.0]]), 2, block=2).tolist()
    [[0, 2]]
    """
    scores, ends = _scores("scores", scores, ends)
    block, count = checks.count("block", block, 1), checks.count("count", count, 1)
    key = torch.arange(scores.shape[1], device=scores.device)
    seen = (key < ends[:, None]) & ~scores.isnan()
    best = torch.where(seen, scores, -torch.inf)
    best = pad(best, (0, -best.shape[1] % block), value=-torch.inf)
    blocks = -(-scores.shape[1] // block)
    best = best.view(-1, blocks, block).amax(2) if blocks else best
    # The last block of a query comes after all others, and is not compared with them.
    last = (ends + block - 1) // block - 1
    chosen = last.new_full((len(last), count), -1)
    if count > 1:
        others = select_topk(best, count - 1, ends=last, backend=backend)
        assert isinstance(others, Tensor)
        chosen[:, :-1] = others
    behind = (chosen >= 0).sum(1, keepdim=True)
    return chosen.scatter_(1, behind, last[:, None])


def select_in_blocks(
    scores: Tensor,
    blocks: Tensor,
    topk: int,
    *,
    block: int = 8,
    ends: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """int32 [total_q, topk]: the best keys of each query inside its blocks, ascending, then -1.

    Scores outside of the blocks are not read.

    Args:
        scores: fp32 [total_q, width], a score per key, without gradients.
        blocks: int32 [total_q, count], as select_blocks writes them: ascending, then -1.
        topk: how many keys at most, at least 1.
        block: keys of a block, as select_blocks was given.
        ends: int32 [total_q], how many keys each query sees; all if None.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> scores = torch.tensor([[1.0, 5.0, 7.0, 8.0, 9.0, 0.0]])
    >>> select_in_blocks(scores, torch.tensor([[0, 2]]).int(), 2, block=2).tolist()
    [[1, 4]]
    """
    scores, ends = _scores("scores", scores, ends)
    block, topk = checks.count("block", block, 1), checks.count("topk", topk, 1)
    tensor("blocks", blocks, (scores.shape[0], "count"), (torch.int32,), scores.device)
    if not scores.shape[1]:
        return blocks.new_full((scores.shape[0], topk), -1)
    places = torch.arange(block, device=scores.device)
    keys = (blocks.long()[:, :, None] * block + places).flatten(1)
    there = (blocks >= 0).repeat_interleave(block, 1) & (keys < ends[:, None])
    inside = scores.gather(1, keys.clamp(0, scores.shape[1] - 1))
    # Blocks ascend and only the last can be cut short: what a query may choose comes first.
    chosen = select_topk(inside, topk, ends=there.sum(1, dtype=torch.int32), backend=backend)
    assert isinstance(chosen, Tensor)
    named = keys.gather(1, chosen.clamp(min=0).long()).int()
    return torch.where(chosen < 0, -1, named)


def _scores(name: str, scores: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores fp32 [total_q, width], and how many of them each query sees, within the width."""
    tensor(name, scores, ("total_q", "width"), (torch.float32,))
    total_q, width = scores.shape
    if scores.requires_grad:
        raise InvalidArgument(name, "no gradient: a selection has none", "one that requires it")
    seen = checks.window("ends", ends, total_q, scores.device)
    if seen is None:
        seen = torch.full((total_q,), width, dtype=torch.int32, device=scores.device)
    return scores, seen.clamp(0, width)
