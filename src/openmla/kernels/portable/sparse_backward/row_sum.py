"""Ordered sums of what entries of lists give to rows, plain Triton.

| | |
|---|---|
| a program computes | one row |
| reads | part [entries, width], order and starts: which entries name the row, in ascending order |
| writes | total [rows, width] in fp32; in the last launch d_rows, rounded once |

A row adds its entries one after the other, query by query, and the sum so far goes on in the next
launch: bits are the same every time, and do not depend on how many queries a launch has. A row that
no list names gets +0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sparse_row_sum_kernel(
    part_ptr,
    order_ptr,
    starts_ptr,
    total_ptr,
    d_rows_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """One row; FIRST and LAST: whether sums begin and end with this launch."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    ok = column < WIDTH
    if FIRST:
        total = tl.zeros([COLUMNS], tl.float32)
    else:
        total = tl.load(total_ptr + row * WIDTH + column, mask=ok, other=0.0)
    for i in tl.range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        entry = tl.load(order_ptr + i)
        total += tl.load(part_ptr + entry * WIDTH + column, mask=ok, other=0.0)
    if LAST:
        at = d_rows_ptr + row * WIDTH + column
        tl.store(at, total.to(d_rows_ptr.dtype.element_ty), mask=ok)
    else:
        tl.store(total_ptr + row * WIDTH + column, total, mask=ok)
