"""Merge the ranges of keys of split requests, in latent form.

| | |
|---|---|
| a program computes | 4 x EACH rows (heads of tokens) of one request at a time, COLUMNS columns |
| reads | part_sums [row, d_v], part_state [row, 2] (row_max, row_sum), fp32; see pages.py |
| writes | out, lse, for split requests only; programs left over do nothing |

A request has `blocks` programs for each COLUMNS columns, which take turns. Ranges are added in one
order, in fp32, 16 at a time; where there are never so many, TOGETHER at a time: what is not there
is 0, and the bits are the same. It is a launch of its own: all SMs read the ranges of a request,
2 MB for one query of 16 heads and 32768 keys, which one program would take longer for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dependent import wait_for_kernel_before
from openmla.kernels.gluon.scores import MINUS_INF, normalize
from openmla.kernels.hopper.dense.epilogue import VECTOR
from openmla.kernels.hopper.latent.pages import ranges_of, request_of

WARPS = gl.constexpr(4)
MOST_TOGETHER = gl.constexpr(16)


@gluon.jit
def load_parts(first, places, column, spaces, D_V: gl.constexpr, L: gl.constexpr):
    """(sums, references, sums of weights) of ranges first … of rows; places: see `merged_rows`."""
    part_sums_ptr, part_state_ptr = spaces
    start, seen, rows, parts = places
    part = gl.arange(0, L.size_per_thread[1], gl.SliceLayout(0, gl.SliceLayout(2, L))) + first
    at = start[:, None] + part[None, :] * rows  # the workspace has fewer than 2^31 elements
    ok = seen[:, None] & (part < parts)[None, :]
    here = part_sums_ptr + (at * D_V)[:, :, None] + column[None, None, :]
    sums = gl.load(here, mask=ok[:, :, None], other=0.0)
    part_max = gl.load(part_state_ptr + at * 2, mask=ok, other=MINUS_INF)
    part_sum = gl.load(part_state_ptr + at * 2 + 1, mask=ok, other=0.0)
    return sums, part_max, part_sum


@gluon.jit
def with_parts(state, loaded):
    """(sums, reference, sum of weights), with some ranges more."""
    acc, row_max, row_sum = state
    sums, part_max, part_sum = loaded
    new_max = gl.maximum(row_max, gl.max(part_max, 1))
    shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
    weights = gl.exp2(part_max - shift[:, None])
    mine = gl.exp2(row_max - shift)
    old = gl.convert_layout(mine, gl.SliceLayout(1, acc.type.layout))[:, None]
    acc = acc * old + gl.sum(sums * weights[:, :, None], 1)
    row_sum = row_sum * mine + gl.sum(part_sum * weights, 1)
    return acc, new_max, row_sum


@gluon.jit
def merged_rows(places, column, spaces, D_V: gl.constexpr, L: gl.constexpr):
    """(sums, reference, sum of weights) of rows whose ranges begin at rows start, start + rows … of
    the workspace, where `seen`; places: start, seen, rows, ranges."""
    start, _seen, _rows, parts = places
    TOGETHER: gl.constexpr = L.size_per_thread[1]
    acc = gl.zeros([start.shape[0], column.shape[0]], gl.float32, gl.SliceLayout(1, L))
    row_sum = gl.zeros([start.shape[0]], gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    state = (acc, row_sum + MINUS_INF, row_sum)
    if L.size_per_thread[2] == 1:  # registers for what comes next
        ahead = load_parts(0, places, column, spaces, D_V, L)
        for first in range(TOGETHER, parts + TOGETHER, TOGETHER):
            loaded = ahead
            ahead = load_parts(first, places, column, spaces, D_V, L)
            state = with_parts(state, loaded)
    else:
        for first in range(0, parts, TOGETHER):
            state = with_parts(state, load_parts(first, places, column, spaces, D_V, L))
    return state


@gluon.jit
def write_merged(
    row, places, parts, columns, spaces, results, heads, D_V: gl.constexpr, L: gl.constexpr
):
    """Rows of a request. places: its first row in the workspace, its first token, its rows."""
    slot, start, rows = places
    out, lse_out, sink_ptr = results
    column = columns[0] + columns[1]
    here = (slot + row, row < rows, rows, parts)
    acc, row_max, row_sum = merged_rows(here, column, spaces, D_V, L)
    head = row % heads
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    OL: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    inverse = gl.convert_layout(gl.where(empty, 0.0, inverse), OL)[:, None]
    result = gl.where(inverse == 0.0, 0.0, acc * inverse).to(out[0].dtype.element_ty)
    token = (start + row // heads).to(gl.int64)
    here = token * (out[1].to(gl.int64) * VECTOR)
    here += head * (out[2].to(gl.int64) * VECTOR)
    here = gl.convert_layout(here, OL)[:, None] + column[None, :]
    gl.store(out[0] + here, result, mask=gl.convert_layout(row < rows, OL)[:, None])
    if lse_out[0] is not None:
        at_lse = token * lse_out[1].to(gl.int64) + head * lse_out[2].to(gl.int64)
        gl.store(lse_out[0] + at_lse, lse, mask=(row < rows) & (columns[1] == 0))


COUNTS = ["batch", "total_q", "rest_q", "heads", "topk", "part_rows", "blocks"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]
VECTORS = ["lse_ptr", "sink_ptr", "cu_ptr", "lengths_ptr", "part_state_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def merge_kernel(  # noqa: PLR0913
    part_sums_ptr, part_state_ptr, out_ptr, lse_ptr, sink_ptr, cu_ptr, lengths_ptr, topk, batch,
    total_q, rest_q, heads, part_rows, blocks, out_stride_t, out_stride_h, lse_stride_t,
    lse_stride_h, D_V: gl.constexpr, TOGETHER: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Program (request x blocks + block of rows) x (D_V / COLUMNS) + columns; see the head."""
    EACH: gl.constexpr = MOST_TOGETHER // TOGETHER
    ROWS: gl.constexpr = WARPS * EACH
    L: gl.constexpr = gl.BlockedLayout(
        [EACH, TOGETHER, COLUMNS // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0]
    )
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    source = (None, lengths_ptr, topk, 0, 0, cu_ptr, batch, total_q, heads, 0, 0, None, rest_q)
    spaces = (part_sums_ptr, part_state_ptr)
    out = (out_ptr, out_stride_t, out_stride_h)
    results = (out, (lse_ptr, lse_stride_t, lse_stride_h), sink_ptr)
    first_column = gl.program_id(0) % (D_V // COLUMNS) * COLUMNS
    number = gl.program_id(0) // (D_V // COLUMNS)
    request = number // blocks
    first = number % blocks * ROWS
    start, tokens, keys = request_of(request, source)
    rows = tokens * heads
    parts, _each = ranges_of(rows, keys, True)
    wait_for_kernel_before()
    if parts > 1:
        for block in range(first, rows, blocks * ROWS):
            row = gl.arange(0, ROWS, RL) + block
            places = (request * part_rows, start, rows)
            columns = (column, first_column)
            write_merged(row, places, parts, columns, spaces, results, heads, D_V, L)
