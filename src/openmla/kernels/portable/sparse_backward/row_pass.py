"""The row pass of the sparse backward: what every entry of a list gives to its row, plain Triton.

| | |
|---|---|
| a program computes | BN entries of one query's list, all heads |
| it keeps | K [BN, LATENT] + [BN, ROPE], the accumulators of their gradients |
| a step reads | Q and d_out of BM heads, their lse and delta |
| writes | part [tokens of the launch, topk, width] in fp32, entries that count alone |

row_sum.py adds the entries of a row. Scores are [heads, entries], as in the query pass, and their
gradients are transposed: as a left operand, K would take more registers than there are.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.rows import row_statistics, score_gradients, weights_of
from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.sparse_backward.lists import entries_of, entries_that_count

COUNTS = ["factor", "scale", "topk", "rows", "heads", "blocks", "first_token"]


@triton.jit(do_not_specialize=COUNTS)
def sparse_row_pass_kernel(
    q_ptr,
    rows_ptr,
    indices_ptr,
    lengths_ptr,
    lse_ptr,
    d_out_ptr,
    d_lse_ptr,
    sink_ptr,
    delta_ptr,
    part_ptr,
    factor,
    scale,
    topk,
    rows,
    heads,
    blocks,
    first_token,
    q_stride_t,
    q_stride_h,
    rows_stride,
    indices_stride,
    lse_stride_t,
    lse_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    d_lse_stride_t,
    d_lse_stride_h,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """BN entries of one query; see the top of the file."""
    program = tl.program_id(0)
    local = (program // blocks).to(tl.int64)
    token = local + first_token
    first = program % blocks * BN
    count = entries_that_count(lengths_ptr, token, topk)
    if first >= count:
        return
    entry = first + tl.arange(0, BN)
    index, ok = entries_of(indices_ptr + token * indices_stride, entry, count, rows)
    column = tl.arange(0, LATENT)
    row = rows_ptr + (index * rows_stride)[:, None]
    k = load_tile(row + column[None, :], ok, column < D_LATENT, True, LATENT != D_LATENT)
    acc = tl.zeros([BN, LATENT], tl.float32)
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        k_rope = load_tile(row + D_LATENT + rope[None, :], ok, rope < D_ROPE, True, ROPE != D_ROPE)
        acc_rope = tl.zeros([BN, ROPE], tl.float32)
    for start in tl.range(0, heads, BM):
        head = start + tl.arange(0, BM)
        head_ok = head < heads
        far = head.to(tl.int64)
        lse_rows = lse_ptr + token * lse_stride_t + far * lse_stride_h
        stats = row_statistics(lse_rows, head_ok, sink_ptr, tl.minimum(head, heads - 1))
        delta = tl.load(delta_ptr + token * heads + head, mask=head_ok, other=0.0)
        d_lse = None
        if d_lse_ptr is not None and sink_ptr is not None:
            d_lse_rows = d_lse_ptr + token * d_lse_stride_t + far * d_lse_stride_h
            d_lse = tl.load(d_lse_rows, mask=stats.seeing, other=0.0)[:, None]
        q_row = q_ptr + token * q_stride_t + (far * q_stride_h)[:, None]
        q = load_tile(q_row + column[None, :], head_ok, column < D_LATENT, True, LATENT != D_LATENT)
        s = tl.dot(q, tl.trans(k))
        if ROPE > 0:
            q_rope = load_tile(
                q_row + D_LATENT + rope[None, :], head_ok, rope < D_ROPE, True, ROPE != D_ROPE
            )
            s = tl.dot(q_rope, tl.trans(k_rope), s)
        s = s * factor
        p = weights_of(s, stats.total[:, None], ok[None, :], True)
        d_out_row = d_out_ptr + token * d_out_stride_t + (far * d_out_stride_h)[:, None]
        d_out = load_tile(
            d_out_row + column[None, :], stats.seeing, column < D_V, True, LATENT != D_V
        )
        d_p = tl.dot(d_out, tl.trans(k))
        d_s = score_gradients(
            s, p, d_p, delta[:, None], stats.alone[:, None], d_lse, ok[None, :], True
        )
        d_s = tl.trans((d_s * scale).to(q.dtype))
        acc = tl.dot(d_s, q, acc)
        acc = tl.dot(tl.trans(p.to(q.dtype)), d_out, acc)
        if ROPE > 0:
            acc_rope = tl.dot(d_s, q_rope, acc_rope)

    WIDTH: tl.constexpr = D_LATENT + D_ROPE
    part_row = part_ptr + ((local * topk + entry) * WIDTH)[:, None]
    written = ok[:, None] & (column < D_LATENT)[None, :]
    tl.store(part_row + column[None, :], acc, mask=written)
    if ROPE > 0:
        tl.store(
            part_row + D_LATENT + rope[None, :],
            acc_rope,
            mask=ok[:, None] & (rope < D_ROPE)[None, :],
        )
