"""The score pass of an indexer's loss: what attention looked at, and what the indexer scores.

| | |
|---|---|
| a program computes | BM queries of one sequence x BN of its keys |
| it keeps | the index keys [BN, WIDTH] |
| a step reads | Q and K of one head of attention, with its lse; then Q of one index head |
| writes | sums: weights, added over the heads in order; scores: the indexer's; both in fp32 |

A key that a query does not see has a sum of 0 and a score of -inf. Blocks of keys that no row of a
tile sees are neither written nor read. The lines of both workspaces are those of a launch's tiles.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.rows import row_statistics, weights_of
from openmla.kernels.portable.dense import bits_of
from openmla.kernels.portable.indexer_loss.query_tiles import query_tile
from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.softmax import MINUS_INF

COUNTS = [
    "factor",
    "total_q",
    "total_k",
    "batch",
    "heads",
    "index_heads",
    "words",
    "launch_tile",
    "key_blocks",
    "columns",
]


@triton.jit(do_not_specialize=COUNTS)
def loss_score_pass_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    lse_ptr,
    sink_ptr,
    mask_ptr,
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    cu_q_ptr,
    cu_k_ptr,
    sums_ptr,
    scores_ptr,
    factor,
    total_q,
    total_k,
    batch,
    heads,
    index_heads,
    words,
    launch_tile,
    key_blocks,
    columns,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    lse_stride_t,
    lse_stride_h,
    index_q_stride_t,
    index_q_stride_h,
    index_k_stride,
    index_w_stride_t,
    index_w_stride_h,
    mask_stride,
    CAUSAL: tl.constexpr,
    D_NOPE: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_INDEX: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of queries and one block of keys; see the top of the file."""
    program = tl.program_id(0)
    local = program // key_blocks
    start = program % key_blocks * BN
    tile = query_tile(launch_tile + local, cu_q_ptr, cu_k_ptr, batch, total_q, total_k, CAUSAL, BM)
    if start >= tile.stop:
        return
    line = tl.arange(0, BM)
    row = tile.first + line
    row_ok = row < tile.q_len
    token = (tile.q_start + row).to(tl.int64)
    key = start + tl.arange(0, BN)
    key_ok = key < tile.k_len
    k_token = (tile.k_start + key).to(tl.int64)
    visible = row_ok[:, None] & key_ok[None, :]
    if CAUSAL:
        visible = visible & (key[None, :] <= (row + tile.k_len - tile.q_len)[:, None])
    if mask_ptr is not None:
        visible = visible & bits_of(mask_ptr + token * mask_stride, start, row_ok, words, BN)

    # Attention's weights, head after head.
    nope = tl.arange(0, NOPE)
    q_row = q_ptr + (token * q_stride_t)[:, None]
    k_row = k_ptr + (k_token * k_stride_t)[:, None]
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        rope_row = rope_ptr + (k_token * rope_stride_t)[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for head in tl.range(0, heads):
        lse_rows = lse_ptr + token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
        stats = row_statistics(lse_rows, row_ok, sink_ptr, head)
        q_head = q_row + head * tl.cast(q_stride_h, tl.int64)
        k_head = k_row + head * tl.cast(k_stride_h, tl.int64)
        q = load_tile(q_head + nope[None, :], row_ok, nope < D_NOPE, True, NOPE != D_NOPE)
        k = load_tile(k_head + nope[None, :], key_ok, nope < D_NOPE, True, NOPE != D_NOPE)
        s = tl.dot(q, tl.trans(k))
        if ROPE > 0:
            rope_head = rope_row + head * tl.cast(rope_stride_h, tl.int64)
            q_rope = load_tile(
                q_head + D_NOPE + rope[None, :], row_ok, rope < D_ROPE, True, ROPE != D_ROPE
            )
            k_rope = load_tile(
                rope_head + rope[None, :], key_ok, rope < D_ROPE, True, ROPE != D_ROPE
            )
            s = tl.dot(q_rope, tl.trans(k_rope), s)
        total += weights_of(s * factor, stats.total[:, None], visible, True)
    at = (tl.cast(local, tl.int64) * BM + line).to(tl.int64) * columns
    tl.store(sums_ptr + at[:, None] + key[None, :], total)

    # The indexer's scores, head after head. A product that is NaN stays one.
    column = tl.arange(0, WIDTH)
    index_k = load_tile(
        index_k_ptr + (k_token * index_k_stride)[:, None] + column[None, :],
        key_ok,
        column < D_INDEX,
        True,
        WIDTH != D_INDEX,
    )
    index_row = index_q_ptr + (token * index_q_stride_t)[:, None] + column[None, :]
    scores = tl.zeros([BM, BN], tl.float32)
    for head in tl.range(0, index_heads):
        index_q = load_tile(
            index_row + head * tl.cast(index_q_stride_h, tl.int64),
            row_ok,
            column < D_INDEX,
            True,
            WIDTH != D_INDEX,
        )
        z = tl.dot(index_q, tl.trans(index_k))
        w_rows = index_w_ptr + token * index_w_stride_t
        w_rows += head * tl.cast(index_w_stride_h, tl.int64)
        w = tl.load(w_rows, mask=row_ok, other=0.0)
        scores += tl.where(z < 0.0, 0.0, z) * w[:, None]
    scores = tl.where(visible, scores, MINUS_INF)
    tl.store(scores_ptr + at[:, None] + key[None, :], scores)
