"""The query pass of the sparse backward: delta, d_q and parts of d_sink, plain Triton.

| | |
|---|---|
| a program computes | BM heads of one query |
| it keeps | Q [BM, LATENT] + [BM, ROPE], d_out [BM, LATENT], the accumulators of d_q |
| a step reads | BN entries of the list, then those rows: K, whose first columns are V |
| writes | d_q; delta [total_q, H], for the row pass; part_sink [total_q, H] |

delta is sum(out * d_out), in fp32, less the gradient of lse where there is no sink. V has fewer
columns than K where d_v is less than the latent: d_out is 0 there.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.rows import row_statistics, score_gradients, weights_of
from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.sparse_backward.lists import entries_of, entries_that_count

COUNTS = ["factor", "scale", "topk", "rows", "heads", "head_blocks"]


@triton.jit(do_not_specialize=COUNTS)
def sparse_query_pass_kernel(
    q_ptr,
    rows_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    d_out_ptr,
    d_lse_ptr,
    sink_ptr,
    d_q_ptr,
    delta_ptr,
    part_sink_ptr,
    factor,
    scale,
    topk,
    rows,
    heads,
    head_blocks,
    q_stride_t,
    q_stride_h,
    rows_stride,
    indices_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    d_lse_stride_t,
    d_lse_stride_h,
    d_q_stride_t,
    d_q_stride_h,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """BM heads of one query; see the top of the file."""
    program = tl.program_id(0)
    token = (program // head_blocks).to(tl.int64)
    head = program % head_blocks * BM + tl.arange(0, BM)
    head_ok = head < heads
    far = head.to(tl.int64)
    column = tl.arange(0, LATENT)

    # What the heads are: statistics, delta, and their part of d_sink.
    lse_rows = lse_ptr + token * lse_stride_t + far * lse_stride_h
    stats = row_statistics(lse_rows, head_ok, sink_ptr, tl.minimum(head, heads - 1))
    d_out_row = d_out_ptr + token * d_out_stride_t + (far * d_out_stride_h)[:, None]
    d_out = load_tile(d_out_row + column[None, :], stats.seeing, column < D_V, True, LATENT != D_V)
    out_row = out_ptr + token * out_stride_t + (far * out_stride_h)[:, None]
    out = load_tile(out_row + column[None, :], stats.seeing, column < D_V, True, LATENT != D_V)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if part_sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=head_ok, other=0.0)
        share = 1.0 / (1.0 + tl.exp(stats.lse - sink))
        part = -tl.where(stats.seeing, share * delta, 0.0)
        tl.store(part_sink_ptr + token * heads + head, part, mask=head_ok)
    d_lse = None
    if d_lse_ptr is not None:
        d_lse_rows = d_lse_ptr + token * d_lse_stride_t + far * d_lse_stride_h
        by_lse = tl.load(d_lse_rows, mask=stats.seeing, other=0.0)
        if sink_ptr is not None:
            d_lse = by_lse[:, None]
        else:
            delta = delta - by_lse
    tl.store(delta_ptr + token * heads + head, delta, mask=head_ok)
    if d_q_ptr is not None:
        q_row = q_ptr + token * q_stride_t + (far * q_stride_h)[:, None]
        q = load_tile(q_row + column[None, :], head_ok, column < D_LATENT, True, LATENT != D_LATENT)
        if ROPE > 0:
            rope = tl.arange(0, ROPE)
            q_rope = load_tile(
                q_row + D_LATENT + rope[None, :], head_ok, rope < D_ROPE, True, ROPE != D_ROPE
            )
            acc_rope = tl.zeros([BM, ROPE], tl.float32)
        acc = tl.zeros([BM, LATENT], tl.float32)
        count = entries_that_count(lengths_ptr, token, topk)
        for start in tl.range(0, count, BN):
            entry = start + tl.arange(0, BN)
            list_ptr = indices_ptr + token * indices_stride
            index, ok = entries_of(list_ptr, entry, count, rows)
            row = rows_ptr + (index * rows_stride)[:, None]
            k = load_tile(row + column[None, :], ok, column < D_LATENT, True, LATENT != D_LATENT)
            s = tl.dot(q, tl.trans(k))
            if ROPE > 0:
                k_rope = load_tile(
                    row + D_LATENT + rope[None, :], ok, rope < D_ROPE, True, ROPE != D_ROPE
                )
                s = tl.dot(q_rope, tl.trans(k_rope), s)
            s = s * factor
            p = weights_of(s, stats.total[:, None], ok[None, :], True)
            d_p = tl.dot(d_out, tl.trans(k))
            d_s = score_gradients(
                s, p, d_p, delta[:, None], stats.alone[:, None], d_lse, ok[None, :], True
            ).to(q.dtype)
            acc = tl.dot(d_s, k, acc)
            if ROPE > 0:
                acc_rope = tl.dot(d_s, k_rope, acc_rope)

        # A sum of zeros times a negative scale is -0; + 0 makes it +0.
        d_q_row = d_q_ptr + token * d_q_stride_t + (far * d_q_stride_h)[:, None]
        tl.store(
            d_q_row + column[None, :],
            (acc * scale + 0.0).to(d_q_ptr.dtype.element_ty),
            mask=head_ok[:, None] & (column < D_LATENT)[None, :],
        )
        if ROPE > 0:
            tl.store(
                d_q_row + D_LATENT + rope[None, :],
                (acc_rope * scale + 0.0).to(d_q_ptr.dtype.element_ty),
                mask=head_ok[:, None] & (rope < D_ROPE)[None, :],
            )
