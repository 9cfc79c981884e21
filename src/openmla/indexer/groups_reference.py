"""Pools and blocks by their definitions: one query at a time, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def tokens_of_pools(pools: Sequence[int], length: int, pool: int) -> list[int]:
    """All tokens of the selected pools, then those of the pool that `length` tokens leave open."""
    whole = [p * pool + i for p in pools if p >= 0 for i in range(pool)]
    return whole + list(range(length - length % pool, length))


def best_blocks(scores: Sequence[float], count: int, block: int) -> list[int]:
    """The best blocks, by the largest score in them; the last is always among them."""
    starts = range(0, len(scores), block)

    def rank(at: int) -> tuple[bool, float, int]:
        values = [s for s in scores[at * block : (at + 1) * block] if not math.isnan(s)]
        return at != len(starts) - 1, -max(values, default=-math.inf), at

    return sorted(sorted(range(len(starts)), key=rank)[:count])


def best_in_blocks(
    scores: Sequence[float], blocks: Sequence[int], topk: int, block: int
) -> list[int]:
    """The best keys of those that lie in the blocks; NaN after -inf, earlier before later."""
    keys = [b * block + i for b in blocks if b >= 0 for i in range(block)]
    keys = [key for key in keys if key < len(scores)]

    def rank(key: int) -> tuple[bool, float, int]:
        is_nan = math.isnan(scores[key])
        return is_nan, 0.0 if is_nan else -scores[key], key

    return sorted(sorted(keys, key=rank)[:topk])
