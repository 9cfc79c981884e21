"""Scores of the indexer, plain Triton.

| | |
|---|---|
| a program computes | QUERIES queries against one chunk of CHUNK columns |
| Q tile | [QUERIES * HEADS, 128], read once per sequence in it |
| a step reads | K [BN, 128] and its scales, from a tensor or from pages in place |
| product | [BN, 128] x [128, QUERIES * HEADS]: the heads of a query lie side by side |
| writes | BN scores of every query, inside its window only |

Queries of several sequences are computed one sequence after another: their keys differ. HEADS is
the number of heads padded to a power of two; padded heads have weight 0.
"""

# Device code: Triton gives its values their types.
# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.rows import upcast
from openmla.kernels.portable.tiles import cut

DIM = tl.constexpr(128)


@triton.jit
def key_tile(
    values_ptr,
    scales_ptr,
    table,
    key,
    stop,
    last_page,
    values_stride,
    values_stride_page,
    scales_stride_page,
    PAGE: tl.constexpr,
):
    """BN keys [BN, 128] and their scales; those from `stop` on are 0 and never read."""
    ok = key < stop
    if PAGE > 0:
        page = cut(tl.load(table + key // PAGE, mask=ok, other=0), last_page).to(tl.int64)
        place = (key % PAGE).to(tl.int64)
        row = page * values_stride_page + place * values_stride
        at = page * scales_stride_page + place
    else:
        row = key.to(tl.int64) * values_stride
        at = key.to(tl.int64)
    column = tl.arange(0, DIM)
    k = tl.load(values_ptr + row[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    return k, tl.load(scales_ptr + at, mask=ok, other=0.0)


@triton.jit(do_not_specialize=["total_q", "columns", "chunks", "heads", "last_page"])
def scores_kernel(
    q_ptr,
    weights_ptr,
    values_ptr,
    scales_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    table_ptr,
    out_ptr,
    total_q,
    columns,
    chunks,
    heads,
    last_page,
    q_stride_t,
    q_stride_h,
    weights_stride,
    values_stride,
    values_stride_page,
    scales_stride_page,
    table_stride,
    out_stride,
    TYPE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
):
    """One block of queries and one chunk of columns; see the top of the file."""
    program = tl.program_id(0)
    first_query = program // chunks * QUERIES
    chunk = program % chunks * CHUNK
    query = first_query + tl.arange(0, QUERIES)
    live = query < total_q
    start = tl.maximum(tl.load(starts_ptr + query, mask=live, other=0), 0)
    end = tl.minimum(tl.load(ends_ptr + query, mask=live, other=0), columns)
    sequence = tl.zeros([QUERIES], tl.int32)
    if PAGE > 0:
        sequence = tl.load(sequences_ptr + query, mask=live, other=0)
    waiting = live & (start < end) & (start < chunk + CHUNK) & (end > chunk)

    line = tl.arange(0, QUERIES * HEADS)
    token = (first_query + line // HEADS).to(tl.int64)
    head = line % HEADS
    line_ok = (head < heads) & (token < total_q)
    weights = tl.load(weights_ptr + token * weights_stride + head, mask=line_ok, other=0.0)
    column = tl.arange(0, DIM)
    q_row = q_ptr + token * q_stride_t + head * tl.cast(q_stride_h, tl.int64)
    q = tl.load(q_row[:, None] + column[None, :], mask=line_ok[:, None], other=0.0)
    q = tl.trans(upcast(q, TYPE))
    out_row = out_ptr + query.to(tl.int64) * out_stride

    while tl.max(waiting.to(tl.int32), 0) > 0:
        this = tl.min(tl.where(waiting, sequence, 0x7FFFFFFF), 0)
        mine = waiting & (sequence == this)
        waiting = waiting & (sequence != this)
        table = table_ptr
        if PAGE > 0:
            table = table_ptr + tl.cast(this, tl.int64) * table_stride
        begin = tl.maximum(tl.min(tl.where(mine, start, 0x7FFFFFFF), 0), chunk) // BN * BN
        stop = tl.minimum(tl.max(tl.where(mine, end, 0), 0), chunk + CHUNK)
        for at in tl.range(begin, stop, BN):
            key = at + tl.arange(0, BN)
            k, scale = key_tile(
                values_ptr,
                scales_ptr,
                table,
                key,
                stop,
                last_page,
                values_stride,
                values_stride_page,
                scales_stride_page,
                PAGE,
            )
            s = tl.maximum(tl.dot(upcast(k, TYPE), q), 0.0) * weights[None, :]
            sums = tl.sum(tl.reshape(s, [BN, QUERIES, HEADS]), 2) * scale[:, None]
            inside = mine[None, :] & (key[:, None] >= start[None, :])
            inside = inside & (key[:, None] < tl.minimum(end, stop)[None, :])
            tl.store(out_row[None, :] + key[:, None], sums, mask=inside)
