"""Merge the ranges of keys of split requests, in latent form.

| | |
|---|---|
| a program computes | ROWS rows (heads of tokens) of one request, one after another |
| reads | part_sums [row, d_v], part_state [row, 2] (row_max, row_sum), fp32; see pages.py |
| writes | out, lse, for split requests only; programs left over do nothing |

Ranges are added 16 at a time, in one order, in fp32, so the bits are the same in every run. It is a
launch of its own: all SMs read the ranges of a request, 2 MB for one query of 16 heads and 32768
keys, which the one program that comes last would take longer for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, normalize
from openmla.kernels.hopper.dense.epilogue import VECTOR
from openmla.kernels.hopper.dense.tiles import CHUNK, owner, sum_before
from openmla.kernels.hopper.latent.pages import ranges_of, request_of

WARPS = gl.constexpr(4)
TOGETHER = gl.constexpr(16)  # ranges whose loads are in flight together


@gluon.jit
def split_blocks(first, source, ROWS: gl.constexpr):
    """Of requests first … first + CHUNK - 1, one per lane: blocks of ROWS rows of those that are
    split, and rows of all their ranges."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    _start, tokens, keys = request_of(first + gl.arange(0, CHUNK, LANES), source)
    rows = tokens * source[8]
    parts, _each = ranges_of(rows, keys, True)
    rows = gl.where(parts > 1, rows, 0)
    return (rows + (ROWS - 1)) // ROWS, rows * parts


@gluon.jit
def find(x, source, ROWS: gl.constexpr):
    """(request, first row in it, first row of its ranges) of block x; request -1 past the last."""
    batch = source[6]
    first = x * 0
    base = x * 0
    slots = x * 0
    blocks, parted = split_blocks(first, source, ROWS)
    size = gl.sum(blocks, 0)
    while (x >= base + size) & (first + CHUNK <= batch):
        base += size
        slots += gl.sum(parted, 0)
        first += CHUNK
        blocks, parted = split_blocks(first, source, ROWS)
        size = gl.sum(blocks, 0)
    lane = owner(x - base, blocks, WARPS)
    row = (x - base - sum_before(lane, blocks, WARPS)) * ROWS
    request = gl.where(x < base + size, first + lane, -1)
    return request, row, slots + sum_before(lane, parted, WARPS)


@gluon.jit
def merged_row(start, rows, parts, spaces, D_V: gl.constexpr):
    """(sums, reference, sum of weights) of a row, whose ranges begin at rows start, start + rows …
    of the workspace."""
    part_sums_ptr, part_state_ptr = spaces
    L: gl.constexpr = gl.BlockedLayout([TOGETHER, 4], [1, 32], [1, WARPS], [1, 0])
    column = gl.arange(0, D_V, gl.SliceLayout(0, L))
    acc = gl.zeros([D_V], gl.float32, gl.SliceLayout(0, L))
    row_sum = (start * 0).to(gl.float32)
    row_max = row_sum + MINUS_INF
    for first in range(0, parts, TOGETHER):
        part = gl.arange(0, TOGETHER, gl.SliceLayout(1, L)) + first
        at = start + part * rows  # the workspace has fewer than 2^31 elements
        ok = part < parts
        sums = gl.load(
            part_sums_ptr + (at * D_V)[:, None] + column[None, :], mask=ok[:, None], other=0.0
        )
        part_max = gl.load(part_state_ptr + at * 2, mask=ok, other=MINUS_INF)
        part_sum = gl.load(part_state_ptr + at * 2 + 1, mask=ok, other=0.0)
        new_max = gl.maximum(row_max, gl.max(part_max, 0))
        shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
        weights = gl.exp2(part_max - shift)
        mine = gl.exp2(row_max - shift)
        acc = acc * mine + gl.sum(sums * weights[:, None], 0)
        row_sum = row_sum * mine + gl.sum(part_sum * weights, 0)
        row_max = new_max
    return acc, row_max, row_sum


COUNTS = ["batch", "total_q", "rest_q", "heads", "topk"]
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
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    D_V: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Add up the ranges of some rows of a split request and normalize; see the head of the file."""
    source = (None, lengths_ptr, topk, 0, 0, cu_ptr, batch, total_q, heads, 0, 0, None, rest_q)
    spaces = (part_sums_ptr, part_state_ptr)
    request, first, slot = find(gl.program_id(0), source, ROWS)
    if request >= 0:
        start, tokens, keys = request_of(request, source)
        rows = tokens * heads
        parts, _each = ranges_of(rows, keys, True)
        for row in range(first, gl.minimum(first + ROWS, rows)):
            acc, row_max, row_sum = merged_row(slot + row, rows, parts, spaces, D_V)
            head = row % heads
            inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
            result = gl.where(empty, 0.0, acc * inverse)
            token = (start + row // heads).to(gl.int64)
            here = out_ptr + token * (out_stride_t.to(gl.int64) * VECTOR)
            here += head * (out_stride_h.to(gl.int64) * VECTOR)
            column = gl.arange(0, D_V, acc.type.layout)
            gl.store(here + column, result.to(out_ptr.dtype.element_ty))
            if lse_ptr is not None:
                at_lse = token * lse_stride_t.to(gl.int64) + head * lse_stride_h.to(gl.int64)
                gl.store(lse_ptr + at_lse, lse)
