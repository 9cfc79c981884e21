"""Scores of the indexer on CDNA4.

    score[t, s] = k_scale[s] * sum over heads of weight[t, h] * relu(q[t, h] . k[s])

A block of four waves has QUERIES = 128 / HEADS queries and a range of CHUNK keys, 128 at a time: 32
per wave. A product is 32 keys times 32 heads over 64 columns, and a lane has half the heads of one
key, so that the sum over heads takes one exchange with another lane. Queries stay in registers for
the whole range; keys go from memory to the registers of their operand, each read once for all
queries. There is no LDS and no barrier: waves are independent.

Queries of several sequences in a block are taken one sequence after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from openmla.kernels.cdna4.indexer.records import (
    Halves,
    Matrix,
    PagedRows,
    WindowPointers,
)
from openmla.kernels.cdna4.records import Queries
from openmla.kernels.gluon.requests import cut

WARPS = gl.constexpr(4)
BN = gl.constexpr(128)  # keys of a step
DEPTH = gl.constexpr(64)  # columns of one product
PIECE = gl.constexpr(16)  # strides of rows count pieces of 16 bytes
FAR = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def load_query(source, query, live, HEADS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Halves of one of the Queries `source`, as right operands [64, HEADS]."""
    LAYOUT: gl.constexpr = LAYOUTS.queries
    column = gl.arange(0, DEPTH, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    row = query.to(gl.int64) * source.token_stride + head.to(gl.int64) * source.head_stride
    at = source.ptr + (row * PIECE)[None, :] + column[:, None]
    seen = (column >= 0)[:, None] & live
    return Halves(
        low=gl.load(at, mask=seen, other=0.0),
        high=gl.load(at + DEPTH, mask=seen, other=0.0),
    )


@gluon.jit
def row_offset(keys, inside, table, rows, PAGE: gl.constexpr):
    """Where PagedRows `rows` of these keys begin, in units of their strides. `table`: the
    sequence's line of the block table, whose entries past the last key are never read."""
    if PAGE > 0:
        page = cut(gl.load(table + keys // PAGE, mask=inside, other=0), rows.last_page)
        return page.to(gl.int64) * rows.page_stride + (keys % PAGE).to(gl.int64) * rows.row_stride
    else:
        return keys.to(gl.int64) * rows.row_stride


@gluon.jit
def load_keys(rows, table, first, last, LAYOUTS: gl.constexpr, PAGE: gl.constexpr):
    """Halves of keys first … of PagedRows, as left operands [128, 64]."""
    LAYOUT: gl.constexpr = LAYOUTS.keys
    key = first + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
    inside = key < last
    row = row_offset(key, inside, table, rows, PAGE) * PIECE
    at = rows.ptr + row[:, None] + column[None, :]
    return Halves(
        low=gl.load(at, mask=inside[:, None], other=0.0),
        high=gl.load(at + DEPTH, mask=inside[:, None], other=0.0),
    )


@gluon.jit
def window_of(windows, query, line, total_q, columns, PAGE: gl.constexpr):
    """A query's first key and the one after its last; none if it is of another sequence than
    `line`. windows: WindowPointers."""
    live = query < total_q
    low = gl.load(windows.starts_ptr + query, mask=live, other=0)
    high = gl.minimum(gl.load(windows.ends_ptr + query, mask=live, other=0), columns)
    if PAGE > 0:
        own = gl.load(windows.sequences_ptr + query, mask=live, other=-1) == line
        high = gl.where(own, high, 0)
    return gl.maximum(low, 0), high


@gluon.jit
def score_range(  # noqa: PLR0913
    queries,
    weights,
    keys,
    scales,
    table,
    windows,
    out,
    first,
    last,
    line,
    query,
    total_q,
    columns,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Score keys first … last - 1 of a sequence against the queries that are of it.

    queries, weights: one per query of the block, queries as Halves. keys, scales: PagedRows; table:
    the sequence's line of the block table. windows: WindowPointers; out: Matrix.
    """
    ACC: gl.constexpr = LAYOUTS.products
    BY_KEY: gl.constexpr = gl.SliceLayout(1, ACC)
    QUERIES: gl.constexpr = 128 // HEADS
    for at in range(first, last, BN):
        k = load_keys(keys, table, at, last, LAYOUTS, PAGE)
        key = at + gl.arange(0, BN, BY_KEY)
        scale = gl.load(
            scales.ptr + row_offset(key, key < last, table, scales, PAGE),
            mask=key < last,
            other=0.0,
        )
        for i in gl.static_range(QUERIES):
            dots = gl.zeros([BN, HEADS], gl.float32, ACC)
            dots = cdna4.mfma_scaled(k.low, None, "e4m3", queries[i].low, None, "e4m3", dots)
            dots = cdna4.mfma_scaled(k.high, None, "e4m3", queries[i].high, None, "e4m3", dots)
            sums = gl.sum(gl.maximum(dots, 0.0) * weights[i][None, :], 1)
            begin, end = window_of(windows, query + i, line, total_q, columns, PAGE)
            row = out.ptr + (query + i).to(gl.int64) * out.row_stride
            gl.store(row + key, sums * scale, mask=(key >= begin) & (key < end))


COUNTS = ["total_q", "columns", "chunks", "last_page", "weights_stride", "table_stride"]
VECTORS = [
    "weights_ptr",
    "starts_ptr",
    "ends_ptr",
    "sequences_ptr",
    "table_ptr",
    "scales_ptr",
]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def scores_kernel(  # noqa: PLR0913
    q_ptr,
    k_ptr,
    scales_ptr,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    table_ptr,
    out_ptr,
    total_q,
    columns,
    chunks,
    last_page,
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_t,
    scales_stride_page,
    scales_stride_t,
    weights_stride,
    table_stride,
    out_stride,
    CHUNK: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Scores of QUERIES queries and CHUNK keys. LAYOUTS: ScoresLayouts."""
    QUERIES: gl.constexpr = 128 // HEADS
    query = gl.program_id(0) // chunks * QUERIES
    chunk = gl.program_id(0) % chunks
    windows = WindowPointers(starts_ptr, ends_ptr, sequences_ptr)
    keys = PagedRows(k_ptr, k_stride_page, k_stride_t, last_page)
    scales = PagedRows(scales_ptr, scales_stride_page, scales_stride_t, last_page)
    source = Queries(q_ptr, q_stride_t, q_stride_h)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUTS.products))
    queries = ()
    weights = ()
    for i in gl.static_range(QUERIES):
        live = query + i < total_q
        queries = queries + (load_query(source, query + i, live, HEADS, LAYOUTS),)  # noqa: RUF005
        at = weights_ptr + (query + i).to(gl.int64) * weights_stride + head
        weights = weights + (gl.load(at, mask=(head >= 0) & live, other=0.0),)  # noqa: RUF005

    lane = gl.arange(0, 64, gl.BlockedLayout([1], [64], [WARPS], [0]))
    live = (lane < QUERIES) & (query + lane < total_q)
    start = gl.maximum(gl.load(starts_ptr + query + lane, mask=live, other=0), 0)
    end = gl.minimum(gl.load(ends_ptr + query + lane, mask=live, other=0), columns)
    left = (live & (start < end)).to(gl.int32)
    lines = lane * 0
    if PAGE > 0:
        lines = gl.load(sequences_ptr + query + lane, mask=live, other=0)
    while gl.max(left, 0) > 0:
        line = gl.min(gl.where(left > 0, lines, FAR), 0)
        mine = (left > 0) & (lines == line)
        left = gl.where(lines == line, 0, left)
        first = gl.min(gl.where(mine, start, FAR), 0) // BN * BN + chunk * CHUNK
        last = gl.minimum(gl.max(gl.where(mine, end, 0), 0), first + CHUNK)
        table = table_ptr
        if PAGE > 0:
            table = table_ptr + line.to(gl.int64) * table_stride
        score_range(
            queries,
            weights,
            keys,
            scales,
            table,
            windows,
            Matrix(out_ptr, out_stride),
            first,
            last,
            line,
            query,
            total_q,
            columns,
            HEADS,
            PAGE,
            LAYOUTS,
        )
