"""Merge the ranges of keys of split requests.

| | |
|---|---|
| a program computes | BLOCK_ROWS of the 64 rows of one consumer of one tile and head |
| reads | part_sums [slot, 64, d_v], part_state [slot, 2, 64] (row_max, row_sum), fp32 |
| writes | out, lse, for split requests only; the programs after the last tile exit early |

Ranges are added in their order, in fp32, so the bits are the same in every run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.requests import CHUNK, owner, sum_before
from openmla.kernels.gluon.scores import MINUS_INF, normalize
from openmla.kernels.hopper.accumulator import VECTOR
from openmla.kernels.hopper.dense.records import Requests
from openmla.kernels.hopper.dense.tiles import (
    head_group,
    last_slot,
    ranges,
    request_rows,
    work_items,
)

WARPS = gl.constexpr(4)


@gluon.jit
def split_tile(x, requests, BM: gl.constexpr, SPLIT: gl.constexpr, SMS: gl.constexpr):
    """(request, number of the tile in it, its first workspace slot) of tile x of split requests.

    A tile is one head and BM queries with all ranges of keys. The request is batch + 1 where there
    is no tile x. requests: Requests.
    """
    batch = requests.batch
    first = x * 0
    slots = x * 0
    base = x * 0
    split, whole = tiles_of_split(first, requests, BM, SPLIT, SMS)
    size = gl.sum(whole, 0)
    while (x >= base + size) & (first + CHUNK <= batch):
        base += size
        slots += gl.sum(split, 0)
        first += CHUNK
        split, whole = tiles_of_split(first, requests, BM, SPLIT, SMS)
        size = gl.sum(whole, 0)
    lane = owner(x - base, whole, WARPS)
    before = slots + sum_before(lane, split, WARPS)
    request = gl.where(x < base + size, first + lane, batch + 1)
    return request, x - base - sum_before(lane, whole, WARPS), before


@gluon.jit
def tiles_of_split(first, requests, BM: gl.constexpr, SPLIT: gl.constexpr, SMS: gl.constexpr):
    """Numbers of work items of split requests, one request per lane, and of their tiles."""
    _, split = work_items(first, requests, BM, SPLIT, SMS, WARPS)
    alone, _ = work_items(first, requests, BM, 0, SMS, WARPS)
    return split, gl.where(split > 0, alone, 0)


COUNTS = ["batch", "total_q", "total_k", "heads", "window"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "starts_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def merge_kernel(  # noqa: PLR0913
    part_sums_ptr,
    part_state_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    starts_ptr,
    batch,
    total_q,
    total_k,
    heads,
    window,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    D_V: gl.constexpr,
    NC: gl.constexpr,
    GROUP_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    SM_COUNT: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
):
    """Add up the ranges of split requests and normalize; see the head of this file."""
    BM: gl.constexpr = 64 * NC
    STEPS: gl.constexpr = BM // BLOCK_ROWS
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    program = gl.program_id(0)
    requests = Requests(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        rest_q=0,
        total_k=total_k,
        heads=heads,
        k_start=starts_ptr,
        window=window,
    )
    request, tile, before = split_tile(program // STEPS, requests, BM, SPLIT, SM_COUNT)
    if request < batch:
        own = request_rows(request, requests)
        parts, _ = ranges(own.q_len, own.k_len, heads, SPLIT, SM_COUNT)
        tiles = (own.q_len + BM - 1) // BM
        head = tile // tiles
        number = tile % tiles
        step = program % STEPS * BLOCK_ROWS
        row = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, L)) + step % 64
        column = gl.arange(0, D_V, gl.SliceLayout(0, L))
        acc = gl.zeros([BLOCK_ROWS, D_V], gl.float32, L)
        row_max = gl.full([BLOCK_ROWS], MINUS_INF, gl.float32, gl.SliceLayout(1, L))
        row_sum = gl.zeros([BLOCK_ROWS], gl.float32, gl.SliceLayout(1, L))
        place = number * BM + step + (row - step % 64)
        ok = place < own.q_len
        # The inverse of tiles.work_item: from head and tile to the number of the first range.
        group = head_group(own.k_len, heads, GROUP_KEYS)
        work = head // group * (tiles * parts * group) + (tiles - 1 - number) * group + head % group
        last = last_slot(requests, SPLIT, SM_COUNT)
        for part in range(0, parts):
            slot = gl.minimum(before + work + part * (tiles * group), last)
            slot = slot.to(gl.int64) * NC + step // 64
            part_max = gl.load(part_state_ptr + slot * 128 + row, mask=ok, other=MINUS_INF)
            part_sum = gl.load(part_state_ptr + slot * 128 + 64 + row, mask=ok, other=0.0)
            here = (part_sums_ptr + slot * (64 * D_V)) + (row[:, None] * D_V + column[None, :])
            sums = gl.load(here, mask=ok[:, None], other=0.0)
            new_max = gl.maximum(row_max, part_max)
            shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
            mine = gl.exp2(row_max - shift)
            theirs = gl.exp2(part_max - shift)
            acc = acc * mine[:, None] + sums * theirs[:, None]
            row_sum = row_sum * mine + part_sum * theirs
            row_max = new_max
        inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
        result = gl.where(empty[:, None], 0.0, acc * inverse[:, None])
        token = (own.q_start + place).to(gl.int64)
        first = out_ptr + head * (out_stride_h.to(gl.int64) * VECTOR)
        at = (first + token * (out_stride_t.to(gl.int64) * VECTOR))[:, None] + column[None, :]
        gl.store(at, result.to(out_ptr.dtype.element_ty), mask=ok[:, None])
        if lse_ptr is not None:
            at_lse = lse_ptr + token * lse_stride_t.to(gl.int64) + head * lse_stride_h.to(gl.int64)
            gl.store(at_lse, lse, mask=ok)
