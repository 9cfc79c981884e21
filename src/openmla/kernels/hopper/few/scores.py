"""Scores of few queries: a program takes 32 or 64 keys of one query's list and all of its heads.

The first of three launches (weights.py and values.py follow). Rows are read, and dequantized, once
for all heads. Products are summed in the order of the latent kernel, so scores have the same bits:

| block of a step | columns, in order |
|---|---|
| 0 | left half of the latent, right half, rope |
| 1 | left half, rope, right half |

Written: rows without rope, in 16 bits, [query, block, 64], zeros where there is no key; scores
[query, block, head, 64], -inf where there is no key; and the largest of each row of a program's.
Heads are as many as tiles of 64 hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_load, tma_store
from openmla.kernels.gluon.dependent import let_next_begin
from openmla.kernels.gluon.dequantize.rows import dequantized
from openmla.kernels.gluon.scores import MINUS_INF, signed
from openmla.kernels.hopper.few.rows import (
    KEYS,
    copied,
    copied_rope,
    key_layout,
    listed,
    places,
    scales,
    steps_of,
    words,
)

CHUNK = gl.constexpr(64)  # columns that are dequantized at a time


@gluon.jit
def load_queries(descs, tiles, barrier, query, DIMS: gl.constexpr):
    """Q of all heads: left, right and rope columns; zeros past the last head."""
    half_desc, rope_desc = descs
    left, right, rope = tiles
    HEADS: gl.constexpr = left.shape[0]
    BOX: gl.constexpr = half_desc.block_shape
    LAYOUT: gl.constexpr = half_desc.layout
    mbarrier.expect(barrier, HEADS * (2 * DIMS[0] + DIMS[1]) * 2)
    tma_load(half_desc, [query, 0, 0], barrier, reinterpret(left, left.dtype, BOX, LAYOUT))
    tma_load(half_desc, [query, 0, DIMS[0]], barrier, reinterpret(right, left.dtype, BOX, LAYOUT))
    if DIMS[1] > 0:
        ROPE_BOX: gl.constexpr = rope_desc.block_shape
        ROPE_LAYOUT: gl.constexpr = rope_desc.layout
        tile = reinterpret(rope, left.dtype, ROPE_BOX, ROPE_LAYOUT)
        tma_load(rope_desc, [query, 0, 2 * DIMS[0]], barrier, tile)


@gluon.jit
def begin(tiles, rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """Start reading rows: all of an FP8 cache into registers; or copies, of the left half first.
    Rope is copied where it is not FP8."""
    HALF: gl.constexpr = DIMS[0]
    raw = ()
    if CACHE[1] == 0:
        copied(tiles[0], rows, keys, 0, CACHE)
        async_copy.commit_group()
        copied(tiles[1], rows, keys, 1, CACHE)
        if DIMS[1] > 0:
            copied(tiles[2], rows, keys, 2 * HALF // DIMS[1], CACHE)
    else:
        for c in gl.static_range(2 * HALF // CHUNK):
            raw += ((words(rows, keys, c, CHUNK, CACHE), scales(rows, keys, c, CHUNK, CACHE)),)
        if DIMS[1] > 0:
            if rows[6] is None:
                AT: gl.constexpr = 2 * HALF // DIMS[1]
                rope = words(rows, keys, AT, DIMS[1], CACHE)
                raw += ((rope, scales(rows, keys, AT, DIMS[1], CACHE)),)
            else:
                copied_rope(tiles[2], rows, keys, CACHE)
    async_copy.commit_group()
    return raw


@gluon.jit
def finish(tiles, raw, SIDE: gl.constexpr):
    """The left half of the rows (SIDE 0), or the rest of them, is in its tiles."""
    COUNT: gl.constexpr = tiles[0].shape[1] // CHUNK
    if len(raw) == 0 or SIDE == 1:
        async_copy.wait_group(1 - SIDE)
    if len(raw) > 0:
        for c in gl.static_range(COUNT):
            tile = tiles[SIDE].slice(c * CHUNK, CHUNK, dim=1)
            tile.store(dequantized(raw[SIDE * COUNT + c][0], raw[SIDE * COUNT + c][1]))
        if SIDE == 1 and len(raw) > 2 * COUNT:
            tiles[2].store(dequantized(raw[2 * COUNT][0], raw[2 * COUNT][1]))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def multiply(S, q, k, ORDER: gl.constexpr):
    """Scores with the products of more tiles of columns, in the given order."""
    for i in gl.static_range(len(ORDER)):
        columns = k[ORDER[i]].permute((1, 0))
        S = warpgroup_mma(q[ORDER[i]], columns, S, is_async=True)
    return warpgroup_mma_wait(0, deps=(S,))


@gluon.jit
def put_scores(S, spaces, part):
    """Scores and the largest of each row of a part of a block."""
    scores_ptr, maxima_ptr = spaces
    HEADS: gl.constexpr = S.shape[0]
    PARTS: gl.constexpr = KEYS // S.shape[1]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, S.type.layout))
    column = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout)) + part % PARTS * S.shape[1]
    row = part // PARTS * HEADS + head
    gl.store(scores_ptr + (row * KEYS)[:, None] + column[None, :], S)
    gl.store(maxima_ptr + part * HEADS + head, gl.max(S, 1))


COUNTS = ["topk", "rows", "steps"]
STRIDES = ["indices_stride", "stride_page", "stride_row", "scale_page", "scale_row"]
VECTORS = ["indices_ptr", "lengths_ptr", "scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def scores_kernel(  # noqa: PLR0913
    q_half_desc,
    q_rope_desc,
    v_half_desc,
    data_ptr,
    scale_ptr,
    rope_ptr,
    indices_ptr,
    lengths_ptr,
    scores_ptr,
    maxima_ptr,
    topk,
    rows,
    steps,
    indices_stride,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    DIMS: gl.constexpr,
    SIGN: gl.constexpr,
    PAGE: gl.constexpr,
    SCALED: gl.constexpr,
    LAYOUTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Keys from SPAN * (`program % N`) on, query `program // N`. SPAN: 32 or 64. HEADS: 64 or 128.
    DIMS: columns of half a latent, of rope. PAGE, SCALED: see latent/kernel.py."""
    DTYPE: gl.constexpr = q_half_desc.dtype
    CACHE: gl.constexpr = (PAGE, SCALED)
    GROUPS: gl.constexpr = HEADS // 64  # warp-groups side by side in the rows, else in the keys
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * GROUPS, 2 // GROUPS], [16, SPAN // 2 * GROUPS, 16]
    )
    KL: gl.constexpr = key_layout(CHUNK, SCALED)
    PARTS: gl.constexpr = KEYS // SPAN
    if OVERLAP:
        let_next_begin()
    query = gl.program_id(0) // (2 * PARTS * steps)
    part = gl.program_id(0) % (2 * PARTS * steps)
    count = places(lengths_ptr, query, topk)
    if part < 2 * PARTS * steps_of(count):
        keys = listed((indices_ptr, indices_stride, rows), query, count, part * SPAN, SPAN, KL)
        q_left = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[0]], LAYOUTS[0])
        q_right = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[0]], LAYOUTS[0])
        k_left = gl.allocate_shared_memory(DTYPE, [SPAN, DIMS[0]], LAYOUTS[0])
        k_right = gl.allocate_shared_memory(DTYPE, [SPAN, DIMS[0]], LAYOUTS[0])
        q_rope = q_left
        k_rope = k_left
        if DIMS[1] > 0:
            q_rope = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[1]], LAYOUTS[1])
            k_rope = gl.allocate_shared_memory(DTYPE, [SPAN, DIMS[1]], LAYOUTS[1])
        q = (q_left, q_right, q_rope)
        k = (k_left, k_right, k_rope)
        q_ready = barriers(1, 1)
        fence_async_shared()
        load_queries((q_half_desc, q_rope_desc), q, q_ready.index(0), query, DIMS)
        data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
        raw = begin(k, data, keys, DIMS, CACHE)
        seen = gl.convert_layout(keys >= 0, gl.SliceLayout(0, SL))
        finish(k, raw, 0)
        tma_store(v_half_desc, [gl.program_id(0) * SPAN, 0], k_left)
        mbarrier.wait(q_ready.index(0), 0)
        S = gl.zeros([HEADS, SPAN], gl.float32, SL)
        S = warpgroup_mma(q_left, k_left.permute((1, 0)), S, use_acc=False, is_async=True)
        finish(k, raw, 1)
        tma_store(v_half_desc, [gl.program_id(0) * SPAN, DIMS[0]], k_right)
        S, _, _ = warpgroup_mma_wait(0, deps=(S, q_left, k_left))  # tiles keep their place so long
        if DIMS[1] == 0:
            S = multiply(S, q, k, (1,))
        elif part // PARTS % 2 == 0:
            S = multiply(S, q, k, (1, 2))
        else:
            S = multiply(S, q, k, (2, 1))
        tma.store_wait(0)
        thread_barrier()  # what follows may use the memory of the tiles
        S = gl.where(seen[None, :], signed(S, SIGN), MINUS_INF)
        put_scores(S, (scores_ptr, maxima_ptr), gl.program_id(0))
