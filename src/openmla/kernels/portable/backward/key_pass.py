"""The key pass of the portable backward: d_k and d_v, plain Triton.

| | |
|---|---|
| a program computes | BN keys of one sequence, one head |
| programs run | all heads of a tile side by side, keys with the most queries first |
| it keeps | K [BN, NOPE] + [BN, ROPE], V [BN, VALUE], the accumulators of d_k and d_v |
| a step reads | Q [BM, NOPE] + [BM, ROPE], d_out [BM, VALUE], lse, delta, of the query pass |
| writes | d_k_nope, d_v; rope per head, or in fp32 its part [H, total_k, D_ROPE] of a shared row |

Scores are transposed, S^T = K Q^T, so that P^T and dS^T are the left operands of d_v and d_k. Query
tiles are counted from the sequence's first row, whatever the first is that sees these keys: so bits
do not depend on how keys are cut. Rows past the sequence are read as zeros and have weights of 0;
rows that see no key have weights of 0 too, and d_out has zeros there. Keys that nobody sees, and
those after the last sequence, get +0; what a window leaves to nobody is not read. With a window
every step is masked.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.rows import row_statistics, score_gradients, weights_of
from openmla.kernels.portable.dense import bits_of
from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.tiles import first_key, first_row, sequence_of, span

COUNTS = ["factor", "scale", "total_q", "total_k", "batch", "tiles", "heads", "words"]
COUNTS += ["window"]


@triton.jit(do_not_specialize=COUNTS)
def key_pass_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    lse_ptr,
    d_out_ptr,
    d_lse_ptr,
    sink_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    delta_ptr,
    d_k_ptr,
    d_rope_ptr,
    d_v_ptr,
    factor,
    scale,
    total_q,
    total_k,
    batch,
    tiles,
    heads,
    words,
    window,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    v_stride_t,
    v_stride_h,
    lse_stride_t,
    lse_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    d_lse_stride_t,
    d_lse_stride_h,
    d_k_stride_t,
    d_k_stride_h,
    d_rope_stride_t,
    d_rope_stride_h,
    d_v_stride_t,
    d_v_stride_h,
    mask_stride,
    CAUSAL: tl.constexpr,
    D_NOPE: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of keys and one head; see the top of the file."""
    # Locate the sequence and the tile's first key; rows after the last sequence have no queries.
    program = tl.program_id(0)
    head = program % heads
    tile = program // heads
    sequence = sequence_of(tile, cu_k_ptr, batch, total_k, 1, BN)
    k_start, k_len = span(sequence, cu_k_ptr, batch, total_k)
    key_start = first_row(tile, sequence, cu_k_ptr, total_k, 1, BN)
    if key_start >= k_len:
        return
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    q_len = tl.where(sequence < batch, q_len, 0)
    key = key_start + tl.arange(0, BN)
    key_ok = key < k_len
    key_read = key_ok
    k_token = (k_start + key).to(tl.int64)[:, None]

    # Which queries: those from `first` on see a key of the tile, those from `middle` on all.
    first = 0
    middle = 0
    offset = k_len - q_len
    if CAUSAL:
        first = tl.minimum(tl.maximum(key_start - offset, 0) // BM * BM, q_len)
        middle = tl.maximum(tl.minimum(key_start + BN, k_len) - 1 - offset, 0)
        middle = tl.minimum((middle + BM - 1) // BM * BM, q_len)
    stop = q_len
    if window is not None:
        key_read = key_ok & (key >= first_key(offset + 1, window))
        last = tl.cast(tl.minimum(key_start + BN, k_len) - 1, tl.int64)
        stop = tl.minimum(tl.maximum(last + window - offset, 0), q_len).to(tl.int32)
        middle = tl.minimum(middle, stop)

    nope = tl.arange(0, NOPE)
    value = tl.arange(0, VALUE)
    k_row = k_ptr + k_token * k_stride_t + head * tl.cast(k_stride_h, tl.int64)
    k = load_tile(k_row + nope[None, :], key_read, nope < D_NOPE, True, NOPE != D_NOPE)
    v_row = v_ptr + k_token * v_stride_t + head * tl.cast(v_stride_h, tl.int64)
    v = load_tile(v_row + value[None, :], key_read, value < D_V, True, VALUE != D_V)
    acc_k = tl.zeros([BN, NOPE], tl.float32)
    acc_v = tl.zeros([BN, VALUE], tl.float32)
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        rope_row = rope_ptr + k_token * rope_stride_t + head * tl.cast(rope_stride_h, tl.int64)
        k_rope = load_tile(rope_row + rope[None, :], key_read, rope < D_ROPE, True, ROPE != D_ROPE)
        acc_rope = tl.zeros([BN, ROPE], tl.float32)

    for masked in tl.static_range(2):
        if masked == 0:
            begin = first
            end = middle
        else:
            begin = middle
            end = stop
        for start in tl.range(begin, end, BM):
            row = start + tl.arange(0, BM)
            row_ok = row < q_len
            token = (q_start + row).to(tl.int64)
            lse_rows = lse_ptr + token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
            stats = row_statistics(lse_rows, row_ok, sink_ptr, head)
            q_row = q_ptr + token[:, None] * q_stride_t + head * tl.cast(q_stride_h, tl.int64)
            q = load_tile(q_row + nope[None, :], row_ok, nope < D_NOPE, True, NOPE != D_NOPE)
            s = tl.dot(k, tl.trans(q))
            if ROPE > 0:
                q_rope = load_tile(
                    q_row + D_NOPE + rope[None, :], row_ok, rope < D_ROPE, True, ROPE != D_ROPE
                )
                s = tl.dot(k_rope, tl.trans(q_rope), s)
            s = s * factor
            visible = key[:, None] <= (row + offset)[None, :]
            if not CAUSAL:
                visible = key_ok[:, None] & row_ok[None, :]
            if window is not None:
                visible = visible & (key[:, None] >= first_key(row + offset + 1, window)[None, :])
            if mask_ptr is not None:
                lines = mask_ptr + token * mask_stride
                visible = visible & tl.trans(bits_of(lines, key_start, row_ok, words, BN))
            p = weights_of(
                s,
                stats.total[None, :],
                visible,
                ((CAUSAL and masked == 0) or window is not None) or mask_ptr is not None,
            )
            d_out_row = d_out_ptr + token[:, None] * d_out_stride_t
            d_out_row += head * tl.cast(d_out_stride_h, tl.int64)
            # Rows that see no key were cleared: a mask that has to be loaded first would be waited
            # for in every step.
            d_out = load_tile(d_out_row + value[None, :], row_ok, value < D_V, True, VALUE != D_V)
            acc_v = tl.dot(p.to(d_out.dtype), d_out, acc_v)
            d_p = tl.dot(v, tl.trans(d_out))
            delta_rows = delta_ptr + tl.cast(head, tl.int64) * total_q + token
            delta = tl.load(delta_rows, mask=row_ok, other=0.0)
            d_lse = None
            if d_lse_ptr is not None and sink_ptr is not None:
                d_lse_rows = d_lse_ptr + token * d_lse_stride_t
                d_lse_rows += head * tl.cast(d_lse_stride_h, tl.int64)
                d_lse = tl.load(d_lse_rows, mask=stats.seeing, other=0.0)[None, :]
            d_s = score_gradients(
                s,
                p,
                d_p,
                delta[None, :],
                stats.alone[None, :],
                d_lse,
                visible,
                ((CAUSAL and masked == 0) or window is not None) or mask_ptr is not None,
            ).to(q.dtype)
            acc_k = tl.dot(d_s, q, acc_k)
            if ROPE > 0:
                acc_rope = tl.dot(d_s, q_rope, acc_rope)

    # A sum of zeros times a negative scale is -0; + 0 makes it +0.
    d_k_row = d_k_ptr + k_token * d_k_stride_t + head * tl.cast(d_k_stride_h, tl.int64)
    tl.store(
        d_k_row + nope[None, :],
        (acc_k * scale + 0.0).to(d_k_ptr.dtype.element_ty),
        mask=key_ok[:, None] & (nope < D_NOPE)[None, :],
    )
    d_v_row = d_v_ptr + k_token * d_v_stride_t + head * tl.cast(d_v_stride_h, tl.int64)
    tl.store(
        d_v_row + value[None, :],
        (acc_v + 0.0).to(d_v_ptr.dtype.element_ty),
        mask=key_ok[:, None] & (value < D_V)[None, :],
    )
    if ROPE > 0:
        d_rope_row = d_rope_ptr + k_token * d_rope_stride_t
        d_rope_row += head * tl.cast(d_rope_stride_h, tl.int64)
        tl.store(
            d_rope_row + rope[None, :],
            (acc_rope * scale + 0.0).to(d_rope_ptr.dtype.element_ty),
            mask=key_ok[:, None] & (rope < D_ROPE)[None, :],
        )
