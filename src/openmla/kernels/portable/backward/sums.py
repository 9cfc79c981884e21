"""Ordered sums of partial gradients: rope rows over heads, sinks over tiles of queries.

Parts are added in the order of their numbers, each by one thread, so that bits are the same every
time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["elements", "heads"])
def rope_sum_kernel(part_ptr, d_rope_ptr, elements, heads, BLOCK: tl.constexpr):
    """d_rope [elements] of part [heads, elements], fp32, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < elements
    total = tl.zeros([BLOCK], tl.float32)
    for head in tl.range(0, heads):
        total += tl.load(part_ptr + tl.cast(head, tl.int64) * elements + at, mask=ok, other=0.0)
    tl.store(d_rope_ptr + at, total.to(d_rope_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tiles", "heads"])
def sink_sum_kernel(part_ptr, d_sink_ptr, tiles, heads, BLOCK: tl.constexpr):
    """d_sink [heads] of part [tiles, heads], fp32."""
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = head < heads
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(0, tiles):
        total += tl.load(part_ptr + tl.cast(tile, tl.int64) * heads + head, mask=ok, other=0.0)
    tl.store(d_sink_ptr + head, total + 0.0, mask=ok)
