"""The key pass of an indexer's loss: what some index heads give to the gradient of its keys.

| | |
|---|---|
| a program computes | BN keys of one sequence, GROUP index heads |
| it keeps | K [BN, WIDTH], the accumulator of d_k |
| a step reads | dI [BM, BN] of the row pass, then Q [BM, WIDTH] of every head |
| writes | part [groups, total_k, D_INDEX] in fp32, which are added in order |

The tiles of a sequence follow one another, also over launches, whose sums go on where the last one
ended: bits do not depend on how many tiles a launch has.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.tiles import first_row, first_tile, sequence_of, span

COUNTS = [
    "total_q",
    "total_k",
    "batch",
    "index_heads",
    "groups",
    "launch_tile",
    "launch_tiles",
    "columns",
]


@triton.jit(do_not_specialize=COUNTS)
def loss_key_pass_kernel(
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    cu_q_ptr,
    cu_k_ptr,
    d_scores_ptr,
    part_ptr,
    total_q,
    total_k,
    batch,
    index_heads,
    groups,
    launch_tile,
    launch_tiles,
    columns,
    index_q_stride_t,
    index_q_stride_h,
    index_k_stride,
    index_w_stride_t,
    index_w_stride_h,
    CAUSAL: tl.constexpr,
    D_INDEX: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One tile of keys and GROUP heads; FIRST: sums begin. See the top of the file."""
    program = tl.program_id(0)
    group = program % groups
    key_tile = program // groups
    sequence = sequence_of(key_tile, cu_k_ptr, batch, total_k, 1, BN)
    k_start, k_len = span(sequence, cu_k_ptr, batch, total_k)
    key_start = first_row(key_tile, sequence, cu_k_ptr, total_k, 1, BN)
    if key_start >= k_len:
        return
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    q_len = tl.where(sequence < batch, q_len, 0)
    key = key_start + tl.arange(0, BN)
    key_ok = key < k_len
    k_token = (k_start + key).to(tl.int64)
    column = tl.arange(0, WIDTH)
    k_row = index_k_ptr + (k_token * index_k_stride)[:, None]
    k = load_tile(k_row + column[None, :], key_ok, column < D_INDEX, True, WIDTH != D_INDEX)
    part_row = part_ptr + ((tl.cast(group, tl.int64) * total_k + k_token) * D_INDEX)[:, None]
    if FIRST:
        acc = tl.zeros([BN, WIDTH], tl.float32)
    else:
        acc = load_tile(part_row + column[None, :], key_ok, column < D_INDEX, True, True)

    # Which tiles of the sequence: those of this launch that have a row which sees one of the keys.
    before = launch_tile - first_tile(sequence, cu_q_ptr, total_q, 1, BM)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(key_start - (k_len - q_len), 0) // BM
    begin = tl.maximum(begin, before)
    end = tl.minimum((q_len + BM - 1) // BM, before + launch_tiles)
    line = tl.arange(0, BM)
    first_head = group * GROUP
    last_head = tl.minimum(first_head + GROUP, index_heads)
    for tile in tl.range(begin, end):
        row = tile * BM + line
        row_ok = row < q_len
        token = (q_start + row).to(tl.int64)
        at = (tl.cast(tile - before, tl.int64) * BM + line).to(tl.int64) * columns
        d = tl.load(d_scores_ptr + at[:, None] + key[None, :], mask=row_ok[:, None], other=0.0)
        for head in tl.range(first_head, last_head):
            q_row = index_q_ptr + (token * index_q_stride_t)[:, None]
            q_row += head * tl.cast(index_q_stride_h, tl.int64)
            q = load_tile(q_row + column[None, :], row_ok, column < D_INDEX, True, WIDTH != D_INDEX)
            w_rows = index_w_ptr + token * index_w_stride_t
            w_rows += head * tl.cast(index_w_stride_h, tl.int64)
            w = tl.load(w_rows, mask=row_ok, other=0.0)
            z = tl.dot(q, tl.trans(k))
            d_z = tl.where(z > 0.0, d * w[:, None], 0.0)
            acc = tl.dot(tl.trans(d_z.to(q.dtype)), q, acc)
    tl.store(part_row + column[None, :], acc, mask=key_ok[:, None] & (column < D_INDEX)[None, :])
