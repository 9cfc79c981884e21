"""The query pass of the portable backward: delta, d_q and parts of d_sink, plain Triton.

| | |
|---|---|
| a program computes | BM queries of one sequence, one head |
| programs run | all heads of a tile side by side: they share rope rows; longest tiles first |
| it keeps | Q [BM, NOPE] + [BM, ROPE], d_out [BM, VALUE], the accumulators of d_q |
| a step reads | K [BN, NOPE], rope [BN, ROPE], V [BN, VALUE] |
| writes | d_q; delta [H, total_q], for the key pass; part_sink [tiles, H] |

delta is sum(out * d_out), in fp32, less the gradient of lse where there is no sink. Keys that every
row of the tile sees are multiplied without a mask, the rest in a second loop; with a window all
are in the second. A tile that has no rows writes its part of d_sink, which is 0.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.rows import row_statistics, score_gradients, weights_of
from openmla.kernels.portable.dense import bits_of
from openmla.kernels.portable.rows import load_tile
from openmla.kernels.portable.tiles import first_key, first_row, key_span, sequence_of, span

COUNTS = ["factor", "scale", "total_q", "total_k", "batch", "tiles", "heads", "words"]
COUNTS += ["window"]


@triton.jit(do_not_specialize=COUNTS)
def query_pass_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    d_out_ptr,
    d_lse_ptr,
    sink_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    d_q_ptr,
    delta_ptr,
    part_sink_ptr,
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
    """One tile of queries and one head; see the top of the file."""
    # Locate the sequence and the tile's first row.
    program = tl.program_id(0)
    head = program % heads
    tile = tiles - 1 - program // heads
    sequence = sequence_of(tile, cu_q_ptr, batch, total_q, 1, BM)
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    k_start, k_len = key_span(sequence, cu_k_ptr, None, batch, total_k)
    row_start = first_row(tile, sequence, cu_q_ptr, total_q, 1, BM)
    part = tl.cast(tile, tl.int64) * heads + head
    if row_start >= q_len:
        if part_sink_ptr is not None:
            tl.store(part_sink_ptr + part, 0.0)
        return
    row = row_start + tl.arange(0, BM)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)

    # What the rows are: statistics, delta, and their part of d_sink.
    lse_rows = lse_ptr + token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
    stats = row_statistics(lse_rows, row_ok, sink_ptr, head)
    value = tl.arange(0, VALUE)
    d_out_row = d_out_ptr + token[:, None] * d_out_stride_t
    d_out_row += head * tl.cast(d_out_stride_h, tl.int64)
    d_out = load_tile(d_out_row + value[None, :], stats.seeing, value < D_V, True, VALUE != D_V)
    out_row = out_ptr + token[:, None] * out_stride_t + head * tl.cast(out_stride_h, tl.int64)
    out = load_tile(out_row + value[None, :], stats.seeing, value < D_V, True, VALUE != D_V)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if part_sink_ptr is not None:
        share = 1.0 / (1.0 + tl.exp(stats.lse - tl.load(sink_ptr + head)))
        tl.store(part_sink_ptr + part, -tl.sum(tl.where(stats.seeing, share * delta, 0.0), 0))
    d_lse = None
    if d_lse_ptr is not None:
        d_lse_rows = d_lse_ptr + token * d_lse_stride_t
        d_lse_rows += head * tl.cast(d_lse_stride_h, tl.int64)
        by_lse = tl.load(d_lse_rows, mask=stats.seeing, other=0.0)
        if sink_ptr is not None:
            d_lse = by_lse[:, None]
        else:
            delta = delta - by_lse
    tl.store(delta_ptr + tl.cast(head, tl.int64) * total_q + token, delta, mask=row_ok)
    if d_q_ptr is not None:
        # Which keys: all rows see those before `middle`; `stop` is past the last that any row sees.
        offset = k_len - q_len + 1
        if CAUSAL:
            seen = tl.minimum(row + offset, k_len)
            middle = tl.minimum(row_start + offset, k_len)
            stop = tl.minimum(tl.minimum(row_start + BM, q_len) - 1 + offset, k_len)
        else:
            seen = tl.zeros([BM], tl.int32) + k_len
            middle = k_len
            stop = k_len
        middle = tl.maximum(middle // BN * BN, 0)
        if window is not None:
            since = first_key(row + offset, window)
            earliest = first_key(row_start + offset, window)
            middle = earliest // BN * BN

        nope = tl.arange(0, NOPE)
        q_row = q_ptr + token[:, None] * q_stride_t + head * tl.cast(q_stride_h, tl.int64)
        q = load_tile(q_row + nope[None, :], row_ok, nope < D_NOPE, True, NOPE != D_NOPE)
        if ROPE > 0:
            rope = tl.arange(0, ROPE)
            q_rope = load_tile(
                q_row + D_NOPE + rope[None, :], row_ok, rope < D_ROPE, True, ROPE != D_ROPE
            )
            acc_rope = tl.zeros([BM, ROPE], tl.float32)
        acc = tl.zeros([BM, NOPE], tl.float32)
        key = tl.arange(0, BN)
        k_token = (k_start + key).to(tl.int64)[:, None]
        k_row = k_ptr + k_token * k_stride_t + head * tl.cast(k_stride_h, tl.int64)
        v_row = v_ptr + k_token * v_stride_t + head * tl.cast(v_stride_h, tl.int64)
        if ROPE > 0:
            rope_row = rope_ptr + k_token * rope_stride_t + head * tl.cast(rope_stride_h, tl.int64)
        for masked in tl.static_range(0 if window is None else 1, 2):
            if masked == 0:
                begin = 0
                end = middle
            else:
                begin = middle
                end = stop
            for start in tl.range(begin, end, BN):
                here = start + key
                here_ok = here < stop
                if window is not None:
                    here_ok = here_ok & (here >= earliest)
                skip = tl.cast(start, tl.int64)
                k = load_tile(
                    k_row + skip * k_stride_t + nope[None, :],
                    here_ok,
                    nope < D_NOPE,
                    masked == 1,
                    NOPE != D_NOPE,
                )
                s = tl.dot(q, tl.trans(k))
                if ROPE > 0:
                    k_rope = load_tile(
                        rope_row + skip * rope_stride_t + rope[None, :],
                        here_ok,
                        rope < D_ROPE,
                        masked == 1,
                        ROPE != D_ROPE,
                    )
                    s = tl.dot(q_rope, tl.trans(k_rope), s)
                s = s * factor
                visible = here[None, :] < seen[:, None]
                if window is not None:
                    visible = visible & (here[None, :] >= since[:, None])
                if mask_ptr is not None:
                    lines = mask_ptr + token * mask_stride
                    visible = visible & bits_of(lines, start, row_ok, words, BN)
                p = weights_of(
                    s,
                    stats.total[:, None],
                    visible,
                    masked == 1 or mask_ptr is not None,
                )
                v = load_tile(
                    v_row + skip * v_stride_t + value[None, :],
                    here_ok,
                    value < D_V,
                    masked == 1,
                    VALUE != D_V,
                )
                d_p = tl.dot(d_out, tl.trans(v))
                d_s = score_gradients(
                    s,
                    p,
                    d_p,
                    delta[:, None],
                    stats.alone[:, None],
                    d_lse,
                    visible,
                    masked == 1 or mask_ptr is not None,
                ).to(q.dtype)
                acc = tl.dot(d_s, k, acc)
                if ROPE > 0:
                    acc_rope = tl.dot(d_s, k_rope, acc_rope)

        # A sum of zeros times a negative scale is -0; + 0 makes it +0.
        d_q_row = d_q_ptr + token[:, None] * d_q_stride_t + head * tl.cast(d_q_stride_h, tl.int64)
        tl.store(
            d_q_row + nope[None, :],
            (acc * scale + 0.0).to(d_q_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (nope < D_NOPE)[None, :],
        )
        if ROPE > 0:
            tl.store(
                d_q_row + D_NOPE + rope[None, :],
                (acc_rope * scale + 0.0).to(d_q_ptr.dtype.element_ty),
                mask=row_ok[:, None] & (rope < D_ROPE)[None, :],
            )
