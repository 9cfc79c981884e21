"""Scores of the indexer, plain Triton.

| | |
|---|---|
| a program computes | QUERIES queries against one chunk of CHUNK columns |
| Q tile | [QUERIES * HEADS, 128], read once per sequence in it |
| a step reads | K [BN, 128] and its scales, from a tensor or from pages in place |
| product | [BN, 128] x [128, QUERIES * HEADS]: the heads of a query lie side by side |
| FP4 keys | bytes [BN, 64] with 4 exponents a row: even columns are the low halves of bytes, odd |
| | ones the high; each half is multiplied by its columns of Q, and nothing is put together |
| writes | BN scores of every query, inside its window only |

Queries of several sequences are computed one sequence after another: their keys differ. HEADS is
the number of heads padded to a power of two; padded heads have weight 0.
"""

# Device code: Triton gives its values their types.
# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.indexer.cache import MXFP4_BLOCK
from openmla.indexer.problem import DIM as KEY_COLUMNS
from openmla.kernels.portable.rows import e2m1, power_of_two, scaled, upcast
from openmla.kernels.portable.tiles import cut

DIM = tl.constexpr(KEY_COLUMNS)
FP4_BLOCKS = tl.constexpr(KEY_COLUMNS // MXFP4_BLOCK)
"""Exponents of an FP4 key."""


@triton.jit
def key_place(table, key, ok, last_page, PAGE: tl.constexpr):
    """(page, row in the page) of keys; table entries of keys that are not ok are never read."""
    page = cut(tl.load(table + key // PAGE, mask=ok, other=0), last_page).to(tl.int64)
    return page, (key % PAGE).to(tl.int64)


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
        page, place = key_place(table, key, ok, last_page, PAGE)
        row = page * values_stride_page + place * values_stride
        at = page * scales_stride_page + place
    else:
        row = key.to(tl.int64) * values_stride
        at = key.to(tl.int64)
    column = tl.arange(0, DIM)
    k = tl.load(values_ptr + row[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    return k, tl.load(scales_ptr + at, mask=ok, other=0.0)


@triton.jit
def fp4_tile(
    codes_ptr,
    exponents_ptr,
    table,
    key,
    stop,
    last_page,
    codes_stride,
    codes_stride_page,
    exponents_stride_page,
    PAGE: tl.constexpr,
):
    """Even and odd columns of BN FP4 keys, bf16 [BN, 64] each, which e2m1 times a power of two is
    exactly; keys from `stop` on are 0 and never read."""
    ok = key < stop
    page, place = key_place(table, key, ok, last_page, PAGE)
    byte = tl.arange(0, DIM // 2)
    row = page * codes_stride_page + place * codes_stride
    packed = tl.load(codes_ptr + row[:, None] + byte[None, :], mask=ok[:, None], other=0)
    block = tl.arange(0, FP4_BLOCKS)
    at = page * exponents_stride_page + place * FP4_BLOCKS
    stored = tl.load(exponents_ptr + at[:, None] + block[None, :], mask=ok[:, None], other=0)
    scales = power_of_two(stored)
    even = scaled(e2m1(packed & 15), scales).to(tl.bfloat16)
    return even, scaled(e2m1(packed >> 4), scales).to(tl.bfloat16)


@triton.jit
def query_columns(q_row, line_ok, FIRST: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr):
    """Columns FIRST, FIRST+STEP, … of the Q tile as TYPE, [128 / STEP, QUERIES * HEADS]."""
    column = FIRST + STEP * tl.arange(0, DIM // STEP)
    q = tl.load(q_row[:, None] + column[None, :], mask=line_ok[:, None], other=0.0)
    return tl.trans(upcast(q, TYPE))


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
    FP4: tl.constexpr,
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
    q_row = q_ptr + token * q_stride_t + head * tl.cast(q_stride_h, tl.int64)
    q = query_columns(q_row, line_ok, 0, 2 if FP4 else 1, TYPE)
    q_odd = q
    if FP4:
        q_odd = query_columns(q_row, line_ok, 1, 2, TYPE)
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
            if FP4:
                even, odd = fp4_tile(
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
                products = tl.dot(odd, q_odd, tl.dot(even, q))
                scale = tl.full([BN], 1.0, tl.float32)
            else:
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
                products = tl.dot(upcast(k, TYPE), q)
            s = tl.maximum(products, 0.0) * weights[None, :]
            sums = tl.sum(tl.reshape(s, [BN, QUERIES, HEADS]), 2) * scale[:, None]
            inside = mine[None, :] & (key[:, None] >= start[None, :])
            inside = inside & (key[:, None] < tl.minimum(end, stop)[None, :])
            tl.store(out_row[None, :] + key[:, None], sums, mask=inside)
