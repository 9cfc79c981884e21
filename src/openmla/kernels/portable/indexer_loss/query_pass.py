"""The query pass of an indexer's loss: gradients of its queries and weights.

| | |
|---|---|
| a program computes | BM queries of one sequence, one index head |
| it keeps | Q [BM, WIDTH], the accumulator of d_q |
| a step reads | index keys [BN, WIDTH], dI [BM, BN] of the row pass |
| writes | d_q, d_weights |

dz = dI * weight where z = q . k is positive, rounded to the keys' type before it is multiplied.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.indexer_loss.query_tiles import query_tile
from openmla.kernels.portable.rows import load_tile

COUNTS = ["total_q", "total_k", "batch", "index_heads", "launch_tile", "columns"]


@triton.jit(do_not_specialize=COUNTS)
def loss_query_pass_kernel(
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    cu_q_ptr,
    cu_k_ptr,
    d_scores_ptr,
    d_q_ptr,
    d_w_ptr,
    total_q,
    total_k,
    batch,
    index_heads,
    launch_tile,
    columns,
    index_q_stride_t,
    index_q_stride_h,
    index_k_stride,
    index_w_stride_t,
    index_w_stride_h,
    d_q_stride_t,
    d_q_stride_h,
    CAUSAL: tl.constexpr,
    D_INDEX: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of queries and one index head; see the top of the file."""
    program = tl.program_id(0)
    head = program % index_heads
    local = program // index_heads
    tile = query_tile(launch_tile + local, cu_q_ptr, cu_k_ptr, batch, total_q, total_k, CAUSAL, BM)
    if tile.first >= tile.q_len:
        return
    line = tl.arange(0, BM)
    row = tile.first + line
    row_ok = row < tile.q_len
    token = (tile.q_start + row).to(tl.int64)
    column = tl.arange(0, WIDTH)
    q_row = index_q_ptr + (token * index_q_stride_t)[:, None]
    q_row += head * tl.cast(index_q_stride_h, tl.int64)
    q = load_tile(q_row + column[None, :], row_ok, column < D_INDEX, True, WIDTH != D_INDEX)
    w_rows = index_w_ptr + token * index_w_stride_t + head * tl.cast(index_w_stride_h, tl.int64)
    w = tl.load(w_rows, mask=row_ok, other=0.0)
    at = (tl.cast(local, tl.int64) * BM + line).to(tl.int64) * columns

    acc = tl.zeros([BM, WIDTH], tl.float32)
    d_w = tl.zeros([BM], tl.float32)
    for start in tl.range(0, tile.stop, BN):
        key = start + tl.arange(0, BN)
        k_row = index_k_ptr + ((tile.k_start + key).to(tl.int64) * index_k_stride)[:, None]
        k = load_tile(
            k_row + column[None, :], key < tile.k_len, column < D_INDEX, True, WIDTH != D_INDEX
        )
        z = tl.dot(q, tl.trans(k))
        d = tl.load(d_scores_ptr + at[:, None] + key[None, :], mask=row_ok[:, None], other=0.0)
        d_w += tl.sum(d * tl.maximum(z, 0.0), 1)
        d_z = tl.where(z > 0.0, d * w[:, None], 0.0)
        acc = tl.dot(d_z.to(k.dtype), k, acc)

    d_q_row = d_q_ptr + (token * d_q_stride_t)[:, None] + head * tl.cast(d_q_stride_h, tl.int64)
    tl.store(
        d_q_row + column[None, :],
        (acc + 0.0).to(d_q_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (column < D_INDEX)[None, :],
    )
    tl.store(d_w_ptr + token * index_heads + head, d_w + 0.0, mask=row_ok)
