"""Attention over the rows of one or two sources in one softmax, plain Triton.

| | |
|---|---|
| a program computes | one token, BM of its heads, all rows of its sources, the first source first |
| a source | KIND 1: a list of rows; 2: a span, positions of a request's pages; 0: none |
| Q tile | [BM, LATENT] + [BM, ROPE], read once |
| a step reads | BN entries of a list or of a block table, then those rows (row_block.py) |
| writes | out, lse; where results are turned back, the last columns of out are |

Sources have their own format (ROW), page size and strides; the page size is a number of the launch,
not of the compiled kernel: pages of 2, 64 and 256 rows share one. One list alone is sparse.py's.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import Factors, QueryTile, RowBlock, SoftmaxState
from openmla.kernels.portable.row_block import row_step
from openmla.kernels.portable.rows import load_query
from openmla.kernels.portable.softmax import MINUS_INF, PARTS, normalize
from openmla.kernels.portable.tiles import cut

LIST = tl.constexpr(1)
SPAN = tl.constexpr(2)
COUNTS = ["factor", "heads", "head_blocks", "angle_lines"]
COUNTS += [f"{name}_{i}" for name in ("entries", "lines", "pages", "page_size") for i in (0, 1)]


@triton.jit
def take_source(
    state,
    q,
    factor,
    some,
    token,
    data_ptr,
    scale_ptr,
    entries_ptr,
    lengths_ptr,
    request_ptr,
    begin_ptr,
    end_ptr,
    entries,
    lines,
    pages,
    page_size,
    entries_stride,
    data_stride_page,
    data_stride_t,
    scale_stride_page,
    scale_stride_t,
    KIND: tl.constexpr,
    ROW: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    BRANCH: tl.constexpr,
    BN: tl.constexpr,
):
    """Take in all rows of a source that count for a token; returns the new SoftmaxState.

    entries: of a list, or pages in a line of the table; lines: requests of the table.
    """
    if KIND == LIST:
        first = 0
        stop = entries
        if lengths_ptr is not None:
            stop = cut(tl.load(lengths_ptr + token), entries)
        line = entries_ptr + token * entries_stride
    else:
        request = tl.load(request_ptr + token)
        there = (request >= 0) & (request < lines)
        first = tl.maximum(tl.load(begin_ptr + token), 0)
        stop = tl.where(there, tl.minimum(tl.load(end_ptr + token), entries * page_size), 0)
        line = entries_ptr + tl.where(there, request, 0).to(tl.int64) * entries_stride
    for start in tl.range(first, stop, BN):
        at = start + tl.arange(0, BN)
        if KIND == LIST:
            index = tl.load(line + at, mask=at < stop, other=-1)
            ok = (index >= 0) & (index < pages * page_size)
            index = tl.where(ok, index, 0)
            page = (index // page_size).to(tl.int64)
            place = (index % page_size).to(tl.int64)
        else:
            found = tl.load(line + at // page_size, mask=at < stop, other=-1)
            ok = (found >= 0) & (found < pages)
            page = tl.where(ok, found, 0).to(tl.int64)
            place = (at % page_size).to(tl.int64)
        rows = RowBlock(
            data_ptr=data_ptr,
            scale_ptr=scale_ptr,
            data_row=page * data_stride_page + place * data_stride_t,
            scale_row=page * scale_stride_page + place * scale_stride_t,
            ok=ok,
        )
        state = row_step(
            state,
            q,
            rows,
            ok[None, :],
            Factors(factor=factor, key=None, row=None),
            start < stop,
            some,
            D_LATENT,
            D_ROPE,
            LATENT,
            ROPE,
            TYPE,
            ROW,
            TWO_TERMS,
            BN,
            BRANCH,
            True,
            True,
        )
    return state


@triton.jit
def turned_back(
    out,
    empty,
    angles_ptr,
    position_ptr,
    angle_lines,
    angles_stride,
    D_V: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Rows of out with the last TURNED of their D_V columns turned by minus the angle of a token's
    position, but for `empty` rows; by 0 where the table of angles does not have the position."""
    ROWS: tl.constexpr = out.shape[0]
    COLUMNS: tl.constexpr = out.shape[1]
    position = tl.load(position_ptr)
    there = (position >= 0) & (position < angle_lines)
    line = angles_ptr + tl.where(there, position, 0).to(tl.int64) * angles_stride
    pair = tl.arange(0, COLUMNS // 2) - (D_V - TURNED) // 2
    turns = (pair >= 0) & (pair < TURNED // 2)
    cos = tl.load(line + pair, mask=turns & there, other=1.0)
    sin = tl.load(line + TURNED // 2 + pair, mask=turns & there, other=0.0)
    a, b = tl.split(tl.reshape(out, [ROWS, COLUMNS // 2, 2]))
    turned_a = tl.where(turns, tl.fma(a, cos, b * sin), a)
    turned_b = tl.where(turns, tl.fma(b, cos, -(a * sin)), b)
    turned = tl.reshape(tl.join(turned_a, turned_b), [ROWS, COLUMNS])
    return tl.where(empty[:, None], 0.0, turned)


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q_ptr,
    data_ptr_0,
    scale_ptr_0,
    entries_ptr_0,
    lengths_ptr_0,
    request_ptr_0,
    begin_ptr_0,
    end_ptr_0,
    data_ptr_1,
    scale_ptr_1,
    entries_ptr_1,
    lengths_ptr_1,
    request_ptr_1,
    begin_ptr_1,
    end_ptr_1,
    out_ptr,
    lse_ptr,
    sink_ptr,
    angles_ptr,
    positions_ptr,
    factor,
    heads,
    head_blocks,
    angle_lines,
    angles_stride,
    entries_0,
    lines_0,
    pages_0,
    page_size_0,
    entries_1,
    lines_1,
    pages_1,
    page_size_1,
    q_stride_t,
    q_stride_h,
    entries_stride_0,
    data_stride_page_0,
    data_stride_t_0,
    scale_stride_page_0,
    scale_stride_t_0,
    entries_stride_1,
    data_stride_page_1,
    data_stride_t_1,
    scale_stride_page_1,
    scale_stride_t_1,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    SIGN: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    KIND_0: tl.constexpr,
    KIND_1: tl.constexpr,
    ROW_0: tl.constexpr,
    ROW_1: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    BRANCH: tl.constexpr,
    TURNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One token and BM of its heads; see the top of the file. TURNED: columns of out that are
    turned back, 0 for none."""
    program = tl.program_id(0)
    token = (program // head_blocks).to(tl.int64)
    head = program % head_blocks * BM + tl.arange(0, BM)
    head_ok = head < heads
    column = tl.arange(0, LATENT)
    q_row = q_ptr + token * q_stride_t + (head * tl.cast(q_stride_h, tl.int64))[:, None]
    q_latent, q_latent_rest = load_query(
        q_row + column[None, :], head_ok, D_LATENT, LATENT, TYPE, SIGN, TWO_TERMS
    )
    q_rope = None
    q_rope_rest = None
    if ROPE > 0:
        q_rope, q_rope_rest = load_query(
            q_row + D_LATENT + tl.arange(0, ROPE)[None, :],
            head_ok,
            D_ROPE,
            ROPE,
            TYPE,
            SIGN,
            TWO_TERMS,
        )
    q = QueryTile(q_latent, q_latent_rest, q_rope, q_rope_rest)
    state = SoftmaxState(
        acc=tl.zeros([BM, LATENT], tl.float32),
        row_max=tl.full([BM], MINUS_INF, tl.float32),
        row_sum=tl.zeros([BM, PARTS], tl.float32),
    )
    state = take_source(
        state,
        q,
        factor,
        heads > 0,
        token,
        data_ptr_0,
        scale_ptr_0,
        entries_ptr_0,
        lengths_ptr_0,
        request_ptr_0,
        begin_ptr_0,
        end_ptr_0,
        entries_0,
        lines_0,
        pages_0,
        page_size_0,
        entries_stride_0,
        data_stride_page_0,
        data_stride_t_0,
        scale_stride_page_0,
        scale_stride_t_0,
        KIND_0,
        ROW_0,
        D_LATENT,
        D_ROPE,
        LATENT,
        ROPE,
        TYPE,
        TWO_TERMS,
        BRANCH,
        BN,
    )
    if KIND_1 > 0:
        state = take_source(
            state,
            q,
            factor,
            heads > 0,
            token,
            data_ptr_1,
            scale_ptr_1,
            entries_ptr_1,
            lengths_ptr_1,
            request_ptr_1,
            begin_ptr_1,
            end_ptr_1,
            entries_1,
            lines_1,
            pages_1,
            page_size_1,
            entries_stride_1,
            data_stride_page_1,
            data_stride_t_1,
            scale_stride_page_1,
            scale_stride_t_1,
            KIND_1,
            ROW_1,
            D_LATENT,
            D_ROPE,
            LATENT,
            ROPE,
            TYPE,
            TWO_TERMS,
            BRANCH,
            BN,
        )

    sink = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=head_ok, other=0.0)
    out, lse = normalize(state.acc, state.row_max, tl.sum(state.row_sum, 1), sink)
    if TURNED > 0:
        out = turned_back(
            out,
            lse == MINUS_INF,
            angles_ptr,
            positions_ptr + token,
            angle_lines,
            angles_stride,
            D_V,
            TURNED,
        )
    out_row = out_ptr + token * out_stride_t + (head * tl.cast(out_stride_h, tl.int64))[:, None]
    tl.store(
        out_row + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=head_ok[:, None] & (column < D_V)[None, :],
    )
    if lse_ptr is not None:
        at = token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
        tl.store(lse_ptr + at, lse, mask=head_ok)
