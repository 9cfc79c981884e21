"""Dense MLA prefill in latent form over a paged cache, plain Triton.

| | |
|---|---|
| a program computes | BM rows of one sequence; with SPLIT, for one range of keys |
| a row | one head of one token, heads fastest: 8 or 16 heads fill a tile with several tokens |
| programs run | longest causal tiles first |
| Q tile | [BM, LATENT] + [BM, ROPE], read once |
| a step reads | BN entries of the block table, then those cache rows (row_block.py) |
| window | None, or how many keys a row sees: those before the tile's first are not read |
| writes | out, lse; with SPLIT the unnormalized tile, row_max and row_sum, for split.py |

With FIXED, which is an invariant call's, ranges are numbered inside tiles, and range p of row r of
the launch (over all sequences) is row p * (rows of the launch) + r of the partial results.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import Factors, RowBlock, SoftmaxState, TableLine
from openmla.kernels.portable.row_block import row_step
from openmla.kernels.portable.rows import load_query_tile, page_of
from openmla.kernels.portable.softmax import MINUS_INF, PARTS, normalize
from openmla.kernels.portable.tiles import (
    cut,
    first_key,
    first_row,
    latent_ranges,
    sequence_of,
    span,
    window_origin,
)

COUNTS = [
    "factor",
    "total_q",
    "most_keys",
    "batch",
    "tiles",
    "heads",
    "first_sequence",
    "slots",
    "last_page",
    "window",
]


@triton.jit(do_not_specialize=COUNTS)
def latent_kernel(
    q_ptr,
    data_ptr,
    scale_ptr,
    table_ptr,
    lengths_ptr,
    cu_q_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    q_scale_ptr,
    k_scale_ptr,
    part_out_ptr,
    part_state_ptr,
    factor,
    total_q,
    most_keys,
    batch,
    tiles,
    heads,
    first_sequence,
    slots,
    last_page,
    window,
    q_stride_t,
    q_stride_h,
    data_stride_page,
    data_stride_t,
    scale_stride_page,
    scale_stride_t,
    table_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    SPLIT: tl.constexpr,
    RULE: tl.constexpr,
    KEY_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    BRANCH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of packed rows; see the top of the file."""
    # Locate the request and the tile's first row.
    FIXED: tl.constexpr = RULE is not None and RULE.fixed > 0
    program = tl.program_id(0)
    if SPLIT and not FIXED:
        sequence = first_sequence + program // slots
        tile = 0
    else:
        tile = tiles - 1 - (program // slots if SPLIT else program)
        sequence = sequence_of(tile, cu_q_ptr, batch, total_q, heads, BM)
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    k_len = tl.load(lengths_ptr + sequence, mask=sequence < batch, other=0)
    k_len = cut(k_len, most_keys)
    rows = q_len * heads
    # Ranges of an invariant call begin where they do whatever its queries are.
    MOVED: tl.constexpr = (window is not None and RULE is not None) and not FIXED
    if MOVED:
        origin = window_origin(q_len, k_len, window, KEY_STEP)
        parts, keys_of_range = latent_ranges(rows, k_len - origin, RULE)
    else:
        parts, keys_of_range = latent_ranges(rows, k_len, RULE)
    part = 0
    if SPLIT:
        slot = program % slots
        if FIXED:
            row_start = first_row(tile, sequence, cu_q_ptr, total_q, heads, BM)
            part = slot
        else:
            row_start = slot // parts * BM
            part = slot % parts
        if (parts == 1) | (row_start >= rows) | (part >= parts):
            return
        k_first = part * keys_of_range
        if MOVED:
            k_first += origin
        k_stop = tl.minimum(k_first + keys_of_range, k_len)
    else:
        row_start = first_row(tile, sequence, cu_q_ptr, total_q, heads, BM)
        if (parts > 1) | (row_start >= rows):
            return
        k_first = 0
        k_stop = k_len
    row = row_start + tl.arange(0, BM)
    row_ok = row < rows
    query = row // heads
    head = row % heads
    token = (q_start + query).to(tl.int64)

    # Which keys: all rows see those before `middle`; `stop` is past the last that any row sees.
    offset = k_len - q_len + 1
    if CAUSAL:
        seen = tl.minimum(query + offset, k_len)
        middle = tl.minimum(row_start // heads + offset, k_stop)
        last = (tl.minimum(row_start + BM, rows) - 1) // heads
        stop = tl.minimum(last + offset, k_stop)
    else:
        seen = tl.zeros([BM], tl.int32) + k_len
        middle = k_stop
        stop = k_stop
    middle = tl.maximum(middle // BN * BN, k_first)
    if window is not None:
        # No row sees keys before `earliest`; between `edge` and `middle` every row sees all.
        since = first_key(query + offset, window)
        earliest = first_key(row_start // heads + offset, window)
        last_query = (tl.minimum(row_start + BM, rows) - 1) // heads
        latest = first_key(last_query + offset, window)
        k_first = tl.maximum(earliest // BN * BN, k_first)
        edge = tl.maximum(tl.minimum((latest + BN - 1) // BN * BN, stop), k_first)
        middle = tl.maximum(middle, edge)

    column = tl.arange(0, LATENT)
    q_row = q_ptr + (token * q_stride_t + head * tl.cast(q_stride_h, tl.int64))[:, None]
    q = load_query_tile(q_row, row_ok, D_LATENT, D_ROPE, LATENT, ROPE, TYPE, SIGN, TWO_TERMS)
    row_factor = None
    if q_scale_ptr is not None:
        row_factor = tl.load(q_scale_ptr + token, mask=row_ok, other=0.0)

    line = TableLine(
        ptr=table_ptr + tl.cast(sequence, tl.int64) * table_stride,
        entries=table_stride,
        last_page=last_page,
    )
    key = tl.arange(0, BN)
    state = SoftmaxState(
        acc=tl.zeros([BM, LATENT], tl.float32),
        row_max=tl.full([BM], MINUS_INF, tl.float32),
        row_sum=tl.zeros([BM, PARTS], tl.float32),
    )
    # Loop 0 is where the window begins, loop 1 the keys that all rows see, loop 2 the rest.
    for loop in tl.static_range(1 if window is None else 0, 3):
        if loop == 0:
            begin = k_first
            end = edge
        elif loop == 1:
            begin = k_first if window is None else edge
            end = middle
        else:
            begin = middle
            end = stop
        for start in tl.range(begin, end, BN, num_stages=STAGES):
            here = start + key
            here_ok = here < stop
            if loop == 0:
                here_ok = here_ok & (here >= earliest)
            page, place = page_of(line, here, here_ok, PAGE, loop != 1)
            key_factor = None
            if k_scale_ptr is not None:
                key_factor = tl.load(k_scale_ptr + page * PAGE + place, mask=here_ok, other=0.0)
            rows_here = RowBlock(
                data_ptr=data_ptr,
                scale_ptr=scale_ptr,
                data_row=page * data_stride_page + place * data_stride_t,
                scale_row=page * scale_stride_page + place * scale_stride_t,
                ok=here_ok,
            )
            visible = here[None, :] < seen[:, None]
            if loop == 0:
                visible = visible & (here[None, :] >= since[:, None])
            factors = Factors(factor=factor, key=key_factor, row=row_factor)
            state = row_step(
                state,
                q,
                rows_here,
                visible,
                factors,
                start < end,
                heads > 0,
                D_LATENT,
                D_ROPE,
                LATENT,
                ROPE,
                TYPE,
                ROW,
                TWO_TERMS,
                BN,
                BRANCH,
                loop != 1,
                loop != 1,
            )

    row_sum = tl.sum(state.row_sum, 1)
    if SPLIT:
        if FIXED:
            at = (part * tl.cast(total_q, tl.int64) + q_start) * heads + row
            stored = row_ok
        else:
            at = tl.cast(program, tl.int64) * BM + tl.arange(0, BM)
            stored = None
        all_columns = None if stored is None else stored[:, None]
        here = part_out_ptr + at[:, None] * LATENT + column[None, :]
        tl.store(here, state.acc, mask=all_columns)
        tl.store(part_state_ptr + at * 2, state.row_max, mask=stored)
        tl.store(part_state_ptr + at * 2 + 1, row_sum, mask=stored)
    else:
        sink = None
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head)
        out, lse = normalize(state.acc, state.row_max, row_sum, sink)
        out_row = out_ptr + (token * out_stride_t + head * tl.cast(out_stride_h, tl.int64))[:, None]
        tl.store(
            out_row + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (column < D_V)[None, :],
        )
        if lse_ptr is not None:
            at = token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
            tl.store(lse_ptr + at, lse, mask=row_ok)
