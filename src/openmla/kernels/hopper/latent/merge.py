"""Merge the ranges of keys of split requests, in latent form.

| | |
|---|---|
| a program computes | some rows (heads of tokens) of one request at a time, COLUMNS columns |
| reads | part_sums [row, d_v], part_state [row, 2] (row_max, row_sum), fp32; see pages.py |
| writes | out, lse, for split requests only; programs left over do nothing |

A request has `blocks` programs for each COLUMNS columns, which take turns. Range p goes to slot
p modulo 16, in order; then the slots are added, in order, in fp32. Where ranges are many the warps
share the slots of one row, and each has the sums of 16 ranges on their way at once. Where there are
never more than TOGETHER < 16, as many slots do, and each warp has rows of its own: what is not
there is 0, and the bits are the same. It is a launch of its own: all SMs read the ranges of a
request, 2 MB for one query of 16 heads and 32768 keys, which one program would take longer for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dependent import wait_for_kernel_before
from openmla.kernels.gluon.scores import MINUS_INF, normalize
from openmla.kernels.hopper.dense.epilogue import VECTOR
from openmla.kernels.hopper.latent.pages import ranges_of, request_of

WARPS = gl.constexpr(4)
MOST_SLOTS = gl.constexpr(16)


@gluon.constexpr_function
def layout(slots, columns, added=False):
    """[rows, slots, columns] as they are loaded; or `added`, with all slots of an element in one
    thread, which adds them in order."""
    each, warps = [MOST_SLOTS // slots, slots, columns // 32], [WARPS, 1, 1]
    if slots == MOST_SLOTS:
        each, warps = [1, slots // WARPS, columns // 32], [1, WARPS, 1]
        if added:
            each, warps = [1, slots, 1], [1, 1, WARPS]
    return gl.BlockedLayout(each, [1, 1, 32], warps, [2, 1, 0])


@gluon.jit
def load_parts(first, places, column, spaces, D_V: gl.constexpr, SLOTS: gl.constexpr):
    """(sums, references, sums of weights) of one range per slot, from number `first` on; places:
    see `slots_of`."""
    part_sums_ptr, part_state_ptr = spaces
    start, seen, rows, parts = places
    L: gl.constexpr = layout(SLOTS, column.shape[0])
    part = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(2, L))) + first
    at = start[:, None] + part[None, :] * rows  # the workspace has fewer than 2^31 elements
    ok = seen[:, None] & (part < parts)[None, :]
    here = part_sums_ptr + (at * D_V)[:, :, None] + column[None, None, :]
    sums = gl.load(here, mask=ok[:, :, None], other=0.0)
    part_max = gl.load(part_state_ptr + at * 2, mask=ok, other=MINUS_INF)
    part_sum = gl.load(part_state_ptr + at * 2 + 1, mask=ok, other=0.0)
    return sums, part_max, part_sum


@gluon.jit
def with_parts(state, loaded):
    """(sums, references, sums of weights) of the slots, each with one range more."""
    acc, slot_max, slot_sum = state
    sums, part_max, part_sum = loaded
    new_max = gl.maximum(slot_max, part_max)
    shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
    mine, theirs = gl.exp2(slot_max - shift), gl.exp2(part_max - shift)
    acc = acc * mine[:, :, None] + sums * theirs[:, :, None]
    return acc, new_max, slot_sum * mine + part_sum * theirs


@gluon.jit
def slots_of(places, column, spaces, D_V: gl.constexpr, SLOTS: gl.constexpr):
    """The slots of rows whose ranges begin at rows start, start + rows … of the workspace, where
    `seen`; places: start, seen, rows, ranges."""
    state = load_parts(0, places, column, spaces, D_V, SLOTS)
    if SLOTS == MOST_SLOTS:
        for first in range(SLOTS, places[3], 3 * SLOTS):
            a = load_parts(first, places, column, spaces, D_V, SLOTS)
            b = load_parts(first + SLOTS, places, column, spaces, D_V, SLOTS)
            c = load_parts(first + 2 * SLOTS, places, column, spaces, D_V, SLOTS)
            state = with_parts(with_parts(with_parts(state, a), b), c)
    return state


@gluon.jit
def added(state, L: gl.constexpr):
    """(sums, reference, sum of weights) of rows, from those of their slots."""
    SL: gl.constexpr = gl.SliceLayout(2, L)
    acc, slot_max = gl.convert_layout(state[0], L), gl.convert_layout(state[1], SL)
    row_max = gl.max(slot_max, 1)
    weights = gl.exp2(slot_max - gl.where(row_max == MINUS_INF, 0.0, row_max)[:, None])
    row_sum = gl.sum(gl.convert_layout(state[2], SL) * weights, 1)
    return gl.sum(acc * weights[:, :, None], 1), row_max, row_sum


@gluon.jit
def write_merged(
    row, places, first_column, spaces, results, heads, D_V: gl.constexpr, SLOTS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Rows of a request. places: its first row in the workspace, its first token, its rows, its
    ranges."""
    slot, start, rows, parts = places
    out, lse_out, sink_ptr = results
    L: gl.constexpr = layout(SLOTS, COLUMNS)
    there = gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, L))) + first_column
    there = (slot + there, there < rows, rows, parts)
    state = slots_of(there, column, spaces, D_V, SLOTS)
    acc, row_max, row_sum = added(state, layout(SLOTS, COLUMNS, True))
    head = row % heads
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    OL: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    inverse = gl.convert_layout(gl.where(empty, 0.0, inverse), OL)[:, None]
    result = gl.where(inverse == 0.0, 0.0, acc * inverse).to(out[0].dtype.element_ty)
    token = (start + row // heads).to(gl.int64)
    here = token * (out[1].to(gl.int64) * VECTOR)
    here += head * (out[2].to(gl.int64) * VECTOR)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout)) + first_column
    here = gl.convert_layout(here, OL)[:, None] + column[None, :]
    gl.store(out[0] + here, result, mask=gl.convert_layout(row < rows, OL)[:, None])
    if lse_out[0] is not None:
        at_lse = token * lse_out[1].to(gl.int64) + head * lse_out[2].to(gl.int64)
        gl.store(lse_out[0] + at_lse, lse, mask=(row < rows) & (first_column == 0))


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
    ROWS: gl.constexpr = WARPS * MOST_SLOTS // TOGETHER if TOGETHER < MOST_SLOTS else 1
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout(TOGETHER, COLUMNS, True)))
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
            places = (request * part_rows, start, rows, parts)
            write_merged(row, places, first_column, spaces, results, heads, D_V, TOGETHER, COLUMNS)
