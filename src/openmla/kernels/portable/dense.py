"""Dense MLA prefill in MHA form, plain Triton.

| | |
|---|---|
| a program computes | BM queries of one sequence, one head; with SPLIT, for one range of keys |
| programs run | by groups of GROUP heads (they share L2), longest causal tiles first |
| Q tile | [BM, NOPE] + [BM, TAIL] + [BM, ROPE], read once |
| K and V | those of head // KEY_GROUP |
| a step reads | K [BN, NOPE] + [BN, TAIL], rope [BN, ROPE], V [BN, VALUE] |
| rope from | a tensor [T, D] (stride_h 0) or [T, H, D], or the rope columns of a paged cache |
| k_desc, rope_desc, v_desc | bulk copies of [1, BN, columns] in unmasked steps; None: pointers |
| key_mask | None, or bits: BN / 32 words per row and step, in all loops |
| window | None, or how many keys a row sees: those before the tile's first are not read |
| writes | out, lse; with SPLIT the unnormalized tile, row_max and row_sum, for split.py |

d_nope 192 is NOPE 128 + TAIL 64; other widths are padded to a power of two with masked columns.
Keys that every row of the tile sees are multiplied without a mask, the rest in a second loop, and
with a window those at its beginning in one more. A key whose bit is not set is masked in each.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import RowBlock, TableLine
from openmla.kernels.portable.rows import load_query, load_tile, page_of, read_columns, upcast
from openmla.kernels.portable.softmax import MINUS_INF, normalize, softmax_step
from openmla.kernels.portable.tiles import (
    first_key,
    first_row,
    key_range,
    key_span,
    sequence_of,
    span,
    split_count,
    window_origin,
)


@triton.jit
def head_and_tile(program, tiles, heads, GROUP: tl.constexpr):
    """Groups of GROUP heads one after another; in a group all heads of the longest tile first."""
    group = program // (tiles * GROUP)
    rank = program - group * tiles * GROUP
    members = tl.minimum(heads - group * GROUP, GROUP)
    return group * GROUP + rank % members, tiles - 1 - rank // members


@triton.jit
def bits_of(lines, start, row_ok, words, BN: tl.constexpr):
    """Whether rows see keys start … start + BN - 1, [rows, BN]; no bits after `words` words."""
    WIDE: tl.constexpr = BN // 32 if BN > 32 else 1
    at = start // 32 + tl.arange(0, WIDE)
    here = row_ok[:, None] & (at < words)[None, :]
    word = tl.load(lines[:, None] + at[None, :], mask=here, other=0)
    bit = start % 32 + tl.arange(0, BN // WIDE)
    return ((word[:, :, None] >> bit[None, None, :]) & 1).reshape(lines.shape[0], BN) != 0


COUNTS = [
    "factor",
    "total_q",
    "total_k",
    "batch",
    "tiles",
    "heads",
    "first_sequence",
    "words",
    "last_page",
    "window",
]


@triton.jit(do_not_specialize=COUNTS)
def dense_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    q_scale_ptr,
    k_scale_ptr,
    cu_q_ptr,
    cu_k_ptr,
    k_start_ptr,
    table_ptr,
    rope_scale_ptr,
    part_out_ptr,
    part_state_ptr,
    mask_ptr,
    k_desc,
    rope_desc,
    v_desc,
    factor,
    total_q,
    total_k,
    batch,
    tiles,
    heads,
    first_sequence,
    words,
    last_page,
    window,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    rope_stride_page,
    rope_scale_stride_t,
    rope_scale_stride_page,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    table_stride,
    mask_stride,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    D_NOPE: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    NOPE: tl.constexpr,
    TAIL: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    K_TYPE: tl.constexpr,
    ROPE_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    ROPE_FIRST: tl.constexpr,
    ROPE_PER_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    KEY_STEP: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of queries and one head; see the top of the file."""
    # Locate the request and the tile's first row.
    program = tl.program_id(0)
    if SPLIT:
        sequence = first_sequence + program // PROGRAMS
        tile = 0
        head = 0
    else:
        head, tile = head_and_tile(program, tiles, heads, GROUP)
        sequence = sequence_of(tile, cu_q_ptr, batch, total_q, 1, BM)
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    k_start, k_len = key_span(sequence, cu_k_ptr, k_start_ptr, batch, total_k)
    own_tiles = (q_len + BM - 1) // BM
    if window is None:
        parts = split_count(own_tiles * heads, k_len, PROGRAMS, MIN_KEYS)
    else:
        origin = window_origin(q_len, k_len, window, KEY_STEP)
        parts = split_count(own_tiles * heads, k_len - origin, PROGRAMS, MIN_KEYS)
    if SPLIT:
        slot = program % PROGRAMS
        unit = slot // parts
        head = unit % heads
        row_start = unit // heads * BM
        if (parts == 1) | (row_start >= q_len):
            return
        if window is None:
            k_first, k_stop = key_range(slot % parts, parts, k_len, KEY_STEP)
        else:
            k_first, k_stop = key_range(slot % parts, parts, k_len - origin, KEY_STEP)
            k_first += origin
            k_stop += origin
    else:
        row_start = first_row(tile, sequence, cu_q_ptr, total_q, 1, BM)
        if (parts > 1) | (row_start >= q_len):
            return
        k_first = 0
        k_stop = k_len
    row = row_start + tl.arange(0, BM)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)

    # Which keys: all rows see those before `middle`; `stop` is past the last that any row sees.
    offset = k_len - q_len + 1
    if CAUSAL:
        seen = tl.minimum(row + offset, k_len)
        middle = tl.minimum(row_start + offset, k_stop)
        stop = tl.minimum(tl.minimum(row_start + BM, q_len) - 1 + offset, k_stop)
    else:
        seen = tl.zeros([BM], tl.int32) + k_len
        middle = k_stop
        stop = k_stop
    middle = tl.maximum(middle // BN * BN, k_first)
    if window is not None:
        # No row sees keys before `earliest`; between `edge` and `middle` every row sees all.
        since = first_key(row + offset, window)
        earliest = first_key(row_start + offset, window)
        latest = first_key(tl.minimum(row_start + BM, q_len) - 1 + offset, window)
        k_first = tl.maximum(earliest // BN * BN, k_first)
        edge = tl.maximum(tl.minimum((latest + BN - 1) // BN * BN, stop), k_first)
        middle = tl.maximum(middle, edge)

    # The query tile.
    nope = tl.arange(0, NOPE)
    q_row = q_ptr + head * tl.cast(q_stride_h, tl.int64) + token[:, None] * q_stride_t
    q, _ = load_query(q_row + nope[None, :], row_ok, D_NOPE, NOPE, K_TYPE, SIGN, False)
    if TAIL > 0:
        tail = NOPE + tl.arange(0, TAIL)
        q_tail, _ = load_query(
            q_row + tail[None, :], row_ok, D_NOPE - NOPE, TAIL, K_TYPE, SIGN, False
        )
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        q_rope, q_rope_rest = load_query(
            q_row + D_NOPE + rope[None, :], row_ok, D_ROPE, ROPE, ROPE_TYPE, SIGN, TWO_TERMS
        )
    if q_scale_ptr is not None:
        row_factor = tl.load(q_scale_ptr + token, mask=row_ok, other=0.0)

    # Where key 0 of the sequence lies; a step adds its first key times the stride.
    key = tl.arange(0, BN)
    k_token = (k_start + key).to(tl.int64)
    k_step = tl.cast(k_stride_t, tl.int64)
    v_step = tl.cast(v_stride_t, tl.int64)
    key_head = head if KEY_GROUP == 1 else head // KEY_GROUP
    k_row = k_ptr + key_head * tl.cast(k_stride_h, tl.int64) + k_token[:, None] * k_step
    k_pointers = k_row + nope[None, :]
    value = tl.arange(0, VALUE)
    v_row = v_ptr + key_head * tl.cast(v_stride_h, tl.int64) + k_token[:, None] * v_step
    v_pointers = v_row + value[None, :]
    if ROPE > 0:
        rope_step = tl.cast(rope_stride_t, tl.int64)
        if PAGE > 0:
            line = TableLine(
                ptr=table_ptr + tl.cast(sequence, tl.int64) * table_stride,
                entries=table_stride,
                last_page=last_page,
            )
        else:
            rope_row = rope_ptr + key_head * tl.cast(rope_stride_h, tl.int64)
            rope_pointers = rope_row + k_token[:, None] * rope_step + rope[None, :]
    acc = tl.zeros([BM, VALUE], tl.float32)
    row_max = tl.full([BM], MINUS_INF, tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    # Loop 0 is where the window begins, loop 1 the keys that all rows see, loop 2 the rest.
    for loop in tl.static_range(1 if window is None else 0, 3):
        if loop == 0:
            begin = k_first
            end = edge
        elif loop == 1:
            begin = k_first if window is None else edge
            end = middle
        else:
            begin = middle
            end = stop
        for start in tl.range(begin, end, BN):
            here = start + key
            here_ok = here < stop
            if loop == 0:
                here_ok = here_ok & (here >= earliest)
            skip = tl.cast(start, tl.int64)
            if k_desc is not None and loop == 1:
                k = k_desc.load([key_head, k_start + start, 0]).reshape(BN, NOPE)
            else:
                k = load_tile(
                    k_pointers + skip * k_step, here_ok, nope < D_NOPE, loop != 1, NOPE != D_NOPE
                )
            s = tl.dot(q, tl.trans(upcast(k, K_TYPE)))
            if TAIL > 0:
                k_tail = load_tile(
                    k_row + skip * k_step + tail[None, :],
                    here_ok,
                    tail < D_NOPE,
                    loop != 1,
                    NOPE + TAIL != D_NOPE,
                )
                s = tl.dot(q_tail, tl.trans(upcast(k_tail, K_TYPE)), s)
            if ROPE > 0:
                if PAGE > 0:
                    page, place = page_of(line, here, here_ok, PAGE, loop != 1)
                    rows = RowBlock(
                        data_ptr=rope_ptr,
                        scale_ptr=rope_scale_ptr,
                        data_row=page * rope_stride_page + place * rope_stride_t,
                        scale_row=page * rope_scale_stride_page + place * rope_scale_stride_t,
                        ok=here_ok,
                    )
                    k_rope = read_columns(
                        rows, ROPE_FIRST, D_ROPE, ROPE, ROPE_ROW, ROPE_TYPE, loop != 1
                    )
                elif rope_desc is not None and loop == 1:
                    k_rope = rope_desc.load([key_head * ROPE_PER_HEAD, k_start + start, 0])
                    k_rope = k_rope.reshape(BN, ROPE)
                else:
                    k_rope = load_tile(
                        rope_pointers + skip * rope_step,
                        here_ok,
                        rope < D_ROPE,
                        loop != 1,
                        ROPE != D_ROPE,
                    )
                    k_rope = upcast(k_rope, ROPE_TYPE)
                s = tl.dot(q_rope, tl.trans(k_rope), s)
                if TWO_TERMS:
                    s = tl.dot(q_rope_rest, tl.trans(k_rope), s)
            step_factor = factor
            if k_scale_ptr is not None:
                k_scale = tl.load(
                    k_scale_ptr + k_start + here.to(tl.int64), mask=here_ok, other=0.0
                )
                s = s * (k_scale * factor)[None, :]
                step_factor = 1.0
            if q_scale_ptr is not None:
                s = s * (row_factor * step_factor)[:, None]
                step_factor = 1.0
            if loop != 1:
                s = tl.where(here[None, :] < seen[:, None], s, MINUS_INF)
            if loop == 0:
                s = tl.where(here[None, :] >= since[:, None], s, MINUS_INF)
            if mask_ptr is not None:
                lines = mask_ptr + token * mask_stride
                s = tl.where(bits_of(lines, start, row_ok, words, BN), s, MINUS_INF)
            p, row_max, row_sum, rescale = softmax_step(
                s, row_max, row_sum, step_factor, loop != 1 or mask_ptr is not None
            )
            if v_desc is not None and loop == 1:
                v = v_desc.load([key_head, k_start + start, 0]).reshape(BN, VALUE)
            else:
                v = load_tile(
                    v_pointers + skip * v_step, here_ok, value < D_V, loop != 1, VALUE != D_V
                )
            acc = tl.dot(p.to(V_TYPE), upcast(v, V_TYPE), acc * rescale[:, None])

    if SPLIT:
        at = tl.cast(program, tl.int64) * BM + tl.arange(0, BM)
        tl.store(part_out_ptr + at[:, None] * VALUE + value[None, :], acc)
        tl.store(part_state_ptr + at * 2, row_max)
        tl.store(part_state_ptr + at * 2 + 1, row_sum)
    else:
        sink = None
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head) + tl.zeros([BM], tl.float32)
        out, lse = normalize(acc, row_max, row_sum, sink)
        out_row = out_ptr + head * tl.cast(out_stride_h, tl.int64) + token[:, None] * out_stride_t
        tl.store(
            out_row + value[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (value < D_V)[None, :],
        )
        if lse_ptr is not None:
            at = token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
            tl.store(lse_ptr + at, lse, mask=row_ok)
