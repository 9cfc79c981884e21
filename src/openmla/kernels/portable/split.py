"""Merging the ranges of keys of a split request, plain Triton.

| | |
|---|---|
| a program computes | ROWS rows of a tile from the partial tiles of dense.py or latent.py |
| reads | part_out [slot, BM, VALUE] fp32, part_state [slot, BM, 2] (row_max, row_sum) |
| slot | (sequence in the group) * slots + unit * parts + part |
| unit | dense: tile * heads + head; latent (PACKED): tile |
| rows of an invariant call | part * (rows of the launch) + row, instead of slots |
| writes | out, lse, for split requests only |

Parts are added in their order, in fp32, so the bits are the same in every run.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.softmax import MINUS_INF, normalize
from openmla.kernels.portable.tiles import (
    cut,
    first_row,
    key_span,
    latent_ranges,
    sequence_of,
    span,
    split_count,
    window_origin,
)

COUNTS = [
    *("total_q", "most_keys", "batch", "heads", "first_sequence", "slots", "most_units", "tiles"),
    "window",
]


@triton.jit(do_not_specialize=COUNTS)
def merge_kernel(
    part_out_ptr,
    part_state_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    k_start_ptr,
    lengths_ptr,
    total_q,
    most_keys,
    batch,
    heads,
    first_sequence,
    slots,
    most_units,
    tiles,
    window,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    D_V: tl.constexpr,
    VALUE: tl.constexpr,
    PACKED: tl.constexpr,
    RULE: tl.constexpr,
    KEY_STEP: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one split tile; see the top of the file. RULE: RuleConstants of the latent form,
    DenseRule of the dense form."""
    FIXED: tl.constexpr = PACKED and RULE.fixed > 0
    blocks: tl.constexpr = BM // ROWS
    program = tl.program_id(0)
    if FIXED:
        local = 0
        unit = 0
        tile = tiles - 1 - program // blocks
        sequence = sequence_of(tile, cu_q_ptr, batch, total_q, heads, BM)
    else:
        local = program // (most_units * blocks)
        unit = program // blocks % most_units
        tile = 0
        sequence = first_sequence + local
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    if lengths_ptr is not None:
        k_len = cut(tl.load(lengths_ptr + sequence, mask=sequence < batch, other=0), most_keys)
    else:
        _, k_len = key_span(sequence, cu_k_ptr, k_start_ptr, batch, most_keys)
    if window is not None and not FIXED:
        k_len -= window_origin(q_len, k_len, window, KEY_STEP)
    if PACKED:
        rows = q_len * heads
        units = (rows + BM - 1) // BM
        row_start = unit * BM
        if FIXED:
            row_start = first_row(tile, sequence, cu_q_ptr, total_q, heads, BM)
            units = tl.where(row_start < rows, 1, 0)
        parts, _ = latent_ranges(rows, k_len, RULE)
    else:
        rows = q_len
        units = (q_len + BM - 1) // BM * heads
        row_start = unit // heads * BM
        parts = split_count(units, k_len, RULE.programs, RULE.min_keys)
    if (parts == 1) | (unit >= units):
        return

    place = program % blocks * ROWS + tl.arange(0, ROWS)
    row = row_start + place
    row_ok = row < rows
    value = tl.arange(0, VALUE)
    if FIXED:
        step = tl.cast(total_q, tl.int64) * heads
        first = tl.cast(q_start, tl.int64) * heads + row
        exists = row_ok
    else:
        step = tl.cast(BM, tl.int64)
        first = (tl.cast(local, tl.int64) * slots + unit * parts) * BM + place
        exists = None
    columns_exist = None if exists is None else exists[:, None]
    acc = tl.zeros([ROWS, VALUE], tl.float32)
    row_max = tl.full([ROWS], MINUS_INF, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, parts):
        at = first + part * step
        part_max = tl.load(part_state_ptr + at * 2, mask=exists)
        part_sum = tl.load(part_state_ptr + at * 2 + 1, mask=exists)
        here = part_out_ptr + at[:, None] * VALUE + value[None, :]
        part_acc = tl.load(here, mask=columns_exist)
        new_max = tl.maximum(row_max, part_max)
        shift = tl.where(new_max == MINUS_INF, 0.0, new_max)
        mine = tl.exp2(row_max - shift)
        theirs = tl.exp2(part_max - shift)
        acc = acc * mine[:, None] + part_acc * theirs[:, None]
        row_sum = row_sum * mine + part_sum * theirs
        row_max = new_max

    if PACKED:
        token = (q_start + row // heads).to(tl.int64)
        head = row % heads
    else:
        token = (q_start + row).to(tl.int64)
        head = unit % heads + tl.zeros([ROWS], tl.int32)
    sink = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head)
    out, lse = normalize(acc, row_max, row_sum, sink)
    out_row = out_ptr + (token * out_stride_t + head * tl.cast(out_stride_h, tl.int64))[:, None]
    tl.store(
        out_row + value[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (value < D_V)[None, :],
    )
    if lse_ptr is not None:
        at = token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
        tl.store(lse_ptr + at, lse, mask=row_ok)
