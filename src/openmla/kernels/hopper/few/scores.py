"""Scores of few queries: a program takes 64 keys of one query's list and all of its heads.

The first of two launches (values.py is the second). Rows are read, and dequantized, once for all
heads. Products are summed in the order of the latent kernel, so scores have the same bits:

| block of a step | columns, in order |
|---|---|
| 0 | left half of the latent, right half, rope |
| 1 | left half, rope, right half |

Written: scores [query, step, head, 128], -inf where there is no key; and the largest of each row
and block, [query, block, head]. Heads are as many as tiles of 64 hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_load
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
WARPS = gl.constexpr(8)


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
def dequantize_block(tiles, rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """All columns of 64 rows of an FP8 cache: everything is loaded before anything is stored."""
    HALF: gl.constexpr = DIMS[0]
    COUNT: gl.constexpr = 2 * HALF // CHUNK
    if DIMS[1] > 0 and rows[6] is not None:
        copied_rope(tiles[2], rows, keys, CACHE, WARPS)
        async_copy.commit_group()
    raw = ()
    factors = ()
    for c in gl.static_range(COUNT):
        raw += (words(rows, keys, c, CHUNK, CACHE, WARPS),)
        factors += (scales(rows, keys, c, CHUNK, CACHE, WARPS),)
    for c in gl.static_range(COUNT):
        tile = tiles[c * CHUNK // HALF].slice(c * CHUNK % HALF, CHUNK, dim=1)
        tile.store(dequantized(raw[c], factors[c]))
    if DIMS[1] > 0 and rows[6] is None:
        WIDTH: gl.constexpr = DIMS[1]
        AT: gl.constexpr = 2 * HALF // WIDTH
        raw_rope = words(rows, keys, AT, WIDTH, CACHE, WARPS)
        tiles[2].store(dequantized(raw_rope, scales(rows, keys, AT, WIDTH, CACHE, WARPS)))


@gluon.jit
def copy_block(tiles, rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """All columns of 64 plain rows."""
    copied(tiles[0], rows, keys, 0, CACHE, WARPS)
    copied(tiles[1], rows, keys, 1, CACHE, WARPS)
    if DIMS[1] > 0:
        copied(tiles[2], rows, keys, 2 * DIMS[0] // DIMS[1], CACHE, WARPS)
    async_copy.commit_group()


@gluon.jit
def multiply(q, k, SL: gl.constexpr, ORDER: gl.constexpr):
    """Scores, summed over the tiles of columns in the given order."""
    HEADS: gl.constexpr = q[0].shape[0]
    S = gl.zeros([HEADS, KEYS], gl.float32, SL)
    for i in gl.static_range(len(ORDER)):
        columns = k[ORDER[i]].permute((1, 0))
        S = warpgroup_mma(q[ORDER[i]], columns, S, use_acc=i > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(S,))


@gluon.jit
def put_scores(S, seen, spaces, query, block, steps):
    """Scores, -inf for keys that are not there, and the largest of each row."""
    scores_ptr, maxima_ptr = spaces
    SL: gl.constexpr = S.type.layout
    HEADS: gl.constexpr = S.shape[0]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, SL))
    column = gl.arange(0, KEYS, gl.SliceLayout(0, SL))
    S = gl.where(gl.convert_layout(seen, gl.SliceLayout(0, SL))[None, :], S, MINUS_INF)
    start = scores_ptr + ((query * steps + block // 2) * HEADS * 2 + block % 2) * KEYS
    gl.store(start + (head * (2 * KEYS))[:, None] + column[None, :], S)
    gl.store(maxima_ptr + (query * (2 * steps) + block) * HEADS + head, gl.max(S, 1))


COUNTS = ["topk", "rows", "steps"]
STRIDES = ["indices_stride", "stride_page", "stride_row", "scale_page", "scale_row"]
VECTORS = ["indices_ptr", "lengths_ptr", "scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def scores_kernel(  # noqa: PLR0913
    q_half_desc,
    q_rope_desc,
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
    DIMS: gl.constexpr,
    SIGN: gl.constexpr,
    PAGE: gl.constexpr,
    SCALED: gl.constexpr,
    LAYOUTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Block `program % (2 steps)` of query `program // (2 steps)`. HEADS: 64 or 128. DIMS: columns
    of half a latent, of rope. PAGE, SCALED: see latent/kernel.py."""
    DTYPE: gl.constexpr = q_half_desc.dtype
    CACHE: gl.constexpr = (PAGE, SCALED)
    GROUPS: gl.constexpr = HEADS // 64  # warp-groups side by side in the rows, else in the keys
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * GROUPS, 2 // GROUPS], [16, 32 * GROUPS, 16]
    )
    KL: gl.constexpr = key_layout(CHUNK, SCALED, WARPS)
    if OVERLAP:
        let_next_begin()
    query = gl.program_id(0) // (2 * steps)
    block = gl.program_id(0) % (2 * steps)
    count = places(lengths_ptr, query, topk)
    if block < 2 * steps_of(count):
        keys = listed((indices_ptr, indices_stride, rows), query, count, block * KEYS, KL)
        q_left = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[0]], LAYOUTS[0])
        q_right = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[0]], LAYOUTS[0])
        k_left = gl.allocate_shared_memory(DTYPE, [KEYS, DIMS[0]], LAYOUTS[0])
        k_right = gl.allocate_shared_memory(DTYPE, [KEYS, DIMS[0]], LAYOUTS[0])
        q_rope = q_left
        k_rope = k_left
        if DIMS[1] > 0:
            q_rope = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS[1]], LAYOUTS[1])
            k_rope = gl.allocate_shared_memory(DTYPE, [KEYS, DIMS[1]], LAYOUTS[1])
        q = (q_left, q_right, q_rope)
        k = (k_left, k_right, k_rope)
        q_ready = barriers(1, 1)
        fence_async_shared()
        load_queries((q_half_desc, q_rope_desc), q, q_ready.index(0), query, DIMS)
        data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
        if SCALED > 0:
            dequantize_block(k, data, keys, DIMS, CACHE)
        else:
            copy_block(k, data, keys, DIMS, CACHE)
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        mbarrier.wait(q_ready.index(0), 0)
        S = gl.zeros([HEADS, KEYS], gl.float32, SL)
        if DIMS[1] == 0:
            S = multiply(q, k, SL, (0, 1))
        elif block % 2 == 0:
            S = multiply(q, k, SL, (0, 1, 2))
        else:
            S = multiply(q, k, SL, (0, 2, 1))
        put_scores(signed(S, SIGN), keys >= 0, (scores_ptr, maxima_ptr), query, block, steps)
