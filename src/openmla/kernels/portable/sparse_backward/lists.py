"""Entries of a query's list, as both passes of the sparse backward read them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entries_that_count(lengths_ptr, token, topk):
    """How many entries of a list are looked at: all, or as many as its length says."""
    count = topk
    if lengths_ptr is not None:
        count = tl.minimum(tl.maximum(tl.load(lengths_ptr + token), 0), topk)
    return count


@triton.jit
def entries_of(list_ptr, entry, count, rows):
    """(row, whether it counts) of entries; an entry that does not count has row 0, which nobody
    reads."""
    index = tl.load(list_ptr + entry, mask=entry < count, other=-1)
    ok = (index >= 0) & (index < rows)
    return tl.where(ok, index, 0).to(tl.int64), ok
