"""Merge the ranges of keys of split requests, in latent form.

| | |
|---|---|
| a program computes | some rows (heads of tokens) of one request at a time, COLUMNS columns |
| reads | part_sums [row, d_v], part_state [row, 2] (row_max, row_sum), fp32; see rule.py |
| range_bits | logarithm of the keys of a range of an invariant call, else None |
| writes | out, lse, for split requests only; programs left over do nothing |

A request has `blocks` programs for each COLUMNS columns, which take turns. Range p goes to slot
p modulo 16, in order; then the slots are added, in order, in fp32. Where ranges are many the warps
share the slots of one row, and each loads the sums of 16 ranges at once. Where there are never more
than TOGETHER < 16 ranges, as many slots do, and each warp has rows of its own: a missing slot adds
0, and the bits are the same. The merge is a launch of its own, so that all SMs read the ranges of a
request: 2 MB for one query of 16 heads and 32768 keys, which one program would take longer for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.barriers import wait_for_kernel_before
from openmla.kernels.gluon.ranges.records import (
    MergedRows,
    MergeTile,
    Output,
    Parts,
    Requests,
    Slots,
    SplitRequest,
)
from openmla.kernels.gluon.ranges.rule import ranges_of, request_of
from openmla.kernels.gluon.scores import MINUS_INF, normalize

WARPS = gl.constexpr(4)
MOST_SLOTS = gl.constexpr(16)
PIECE_BITS = gl.constexpr(128)  # strides of out come in this unit


@gluon.constexpr_function
def layout(tile, added=False):
    """Layout of a MergeTile's [rows, slots, columns] as they are loaded; or `added`, with all slots
    of an element in one thread, which adds them in order."""
    slots, columns = tile.slots, tile.columns // tile.lanes
    each, warps = [MOST_SLOTS // slots, slots, columns], [WARPS, 1, 1]
    if slots == MOST_SLOTS:
        each, warps = [1, slots // WARPS, columns], [1, WARPS, 1]
        if added:
            each, warps = [1, slots, 1], [1, 1, WARPS]
    return gl.BlockedLayout(each, [1, 1, tile.lanes], warps, [2, 1, 0])


@gluon.jit
def load_parts(first, merged, column, parts, D_V: gl.constexpr, TILE: gl.constexpr):
    """`Slots` with one range each of `MergedRows`, from range `first` on. TILE: MergeTile."""
    L: gl.constexpr = layout(TILE)
    part = gl.arange(0, TILE.slots, gl.SliceLayout(0, gl.SliceLayout(2, L))) + first
    # The workspace has fewer than 2^31 elements.
    at = merged.first_row[:, None] + part[None, :] * merged.step
    ok = merged.exists[:, None] & (part < merged.ranges)[None, :]
    here = parts.sums + (at * D_V)[:, :, None] + column[None, None, :]
    sums = gl.load(here, mask=ok[:, :, None], other=0.0, eviction_policy="evict_first")
    row_max = gl.load(parts.state + at * 2, mask=ok, other=MINUS_INF)
    row_sum = gl.load(parts.state + at * 2 + 1, mask=ok, other=0.0)
    return Slots(sums=sums, row_max=row_max, row_sum=row_sum)


@gluon.jit
def with_parts(slots, loaded):
    """`Slots`, each with one range more."""
    row_max = gl.maximum(slots.row_max, loaded.row_max)
    shift = gl.where(row_max == MINUS_INF, 0.0, row_max)
    mine, theirs = gl.exp2(slots.row_max - shift), gl.exp2(loaded.row_max - shift)
    sums = slots.sums * mine[:, :, None] + loaded.sums * theirs[:, :, None]
    row_sum = slots.row_sum * mine + loaded.row_sum * theirs
    return Slots(sums=sums, row_max=row_max, row_sum=row_sum)


@gluon.jit
def slots_of(merged, column, parts, D_V: gl.constexpr, TILE: gl.constexpr):
    """The `Slots` of `MergedRows`, with all of their ranges. TILE: MergeTile."""
    SLOTS: gl.constexpr = TILE.slots
    slots = load_parts(0, merged, column, parts, D_V, TILE)
    if SLOTS == MOST_SLOTS:
        for first in range(SLOTS, merged.ranges, 3 * SLOTS):
            a = load_parts(first, merged, column, parts, D_V, TILE)
            b = load_parts(first + SLOTS, merged, column, parts, D_V, TILE)
            c = load_parts(first + 2 * SLOTS, merged, column, parts, D_V, TILE)
            slots = with_parts(with_parts(with_parts(slots, a), b), c)
    return slots


@gluon.jit
def added(slots, L: gl.constexpr):
    """(sums, reference, sum of weights) of rows: their `Slots`, added in order."""
    SL: gl.constexpr = gl.SliceLayout(2, L)
    acc, slot_max = gl.convert_layout(slots.sums, L), gl.convert_layout(slots.row_max, SL)
    row_max = gl.max(slot_max, 1)
    weights = gl.exp2(slot_max - gl.where(row_max == MINUS_INF, 0.0, row_max)[:, None])
    row_sum = gl.sum(gl.convert_layout(slots.row_sum, SL) * weights, 1)
    return gl.sum(acc * weights[:, :, None], 1), row_max, row_sum


@gluon.jit
def write_merged(
    row,
    request,
    first_column,
    parts,
    out,
    lse_out,
    sink_ptr,
    heads,
    D_V: gl.constexpr,
    TILE: gl.constexpr,
):
    """Merge and write rows of a `SplitRequest`. parts: the workspace; out, lse_out: `Output`s;
    TILE: MergeTile."""
    COLUMNS: gl.constexpr = TILE.columns
    L: gl.constexpr = layout(TILE)
    there = gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, L))) + first_column
    merged = MergedRows(
        first_row=request.first_row + there,
        exists=there < request.rows,
        step=request.step,
        ranges=request.ranges,
    )
    slots = slots_of(merged, column, parts, D_V, TILE)
    acc, row_max, row_sum = added(slots, layout(TILE, True))
    head = row % heads
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    OL: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    inverse = gl.convert_layout(gl.where(empty, 0.0, inverse), OL)[:, None]
    result = gl.where(inverse == 0.0, 0.0, acc * inverse).to(out.base.dtype.element_ty)
    token = (request.first_token + row // heads).to(gl.int64)
    PIECE: gl.constexpr = PIECE_BITS // out.base.dtype.element_ty.primitive_bitwidth
    here = token * (out.token_stride.to(gl.int64) * PIECE)
    here += head * (out.head_stride.to(gl.int64) * PIECE)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout)) + first_column
    here = gl.convert_layout(here, OL)[:, None] + column[None, :]
    gl.store(out.base + here, result, mask=gl.convert_layout(row < request.rows, OL)[:, None])
    if lse_out.base is not None:
        at_lse = token * lse_out.token_stride.to(gl.int64)
        at_lse += head * lse_out.head_stride.to(gl.int64)
        gl.store(lse_out.base + at_lse, lse, mask=(row < request.rows) & (first_column == 0))


COUNTS = ["batch", "total_q", "rest_q", "heads", "topk", "part_rows", "range_bits", "blocks"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]
VECTORS = ["lse_ptr", "sink_ptr", "cu_ptr", "lengths_ptr", "part_state_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def merge_kernel(  # noqa: PLR0913
    part_sums_ptr,
    part_state_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_ptr,
    lengths_ptr,
    topk,
    batch,
    total_q,
    rest_q,
    heads,
    part_rows,
    range_bits,
    blocks,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    D_V: gl.constexpr,
    TOGETHER: gl.constexpr,
    COLUMNS: gl.constexpr,
    LANES: gl.constexpr,
    AFTER: gl.constexpr,
):
    """Program (request x blocks + block of rows) x (D_V / COLUMNS) + columns; see the head. LANES:
    threads of a warp. AFTER: whether the launch may begin before the one in front has ended."""
    TILE: gl.constexpr = MergeTile(slots=TOGETHER, columns=COLUMNS, lanes=LANES)
    ROWS: gl.constexpr = WARPS * MOST_SLOTS // TOGETHER if TOGETHER < MOST_SLOTS else 1
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout(TILE, True)))
    requests = Requests(
        cu_seqlens_q=cu_ptr,
        lengths=lengths_ptr,
        most_keys=topk,
        batch=batch,
        total_q=total_q,
        rest_q=rest_q,
    )
    parts = Parts(sums=part_sums_ptr, state=part_state_ptr)
    out = Output(base=out_ptr, token_stride=out_stride_t, head_stride=out_stride_h)
    lse = Output(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h)
    first_column = gl.program_id(0) % (D_V // COLUMNS) * COLUMNS
    number = gl.program_id(0) // (D_V // COLUMNS)
    request = number // blocks
    first = number % blocks * ROWS
    start, tokens, keys = request_of(request, requests)
    rows = tokens * heads
    ranges, _bits = ranges_of(rows, keys, range_bits, True)
    first_row = request * part_rows
    step = rows
    if range_bits is not None:
        first_row = start * heads
        step = part_rows
    if AFTER:
        wait_for_kernel_before()
    if ranges > 1:
        for block in range(first, rows, blocks * ROWS):
            row = gl.arange(0, ROWS, RL) + block
            split = SplitRequest(
                first_row=first_row, first_token=start, rows=rows, step=step, ranges=ranges
            )
            write_merged(row, split, first_column, parts, out, lse, sink_ptr, heads, D_V, TILE)
