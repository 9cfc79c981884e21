"""The load warp: Q once, then K and V of every block of keys, by TMA; scales by cp.async.

Blocks come from the last to the first, so that those that need a mask come first. The first K
brings Q with it, on the same barrier; with two query tiles the second has a barrier of its own.
Rows of V after a request's last key must be zeros, because a weight of 0 times a NaN is a NaN: its
descriptor is ragged. Rows of K and rope there may be anything: their scores are masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.dense.ring import k_place, tile_of, v_place
from openmla.kernels.blackwell.dequantize import raw_of
from openmla.kernels.gluon.boxes import load_pages, load_ragged, load_rows, load_scales

Q_ROWS = gl.constexpr(128)


@gluon.jit
def load_queries(
    descs, smem, bar, raw_bars, half: gl.constexpr, token, head, DIMS: gl.constexpr,
    RAW: gl.constexpr,
):  # fmt: skip
    """128 rows of Q. Bytes on `bar` are announced by the caller; raw rope has its own barrier."""
    q_main, q_tail, q_rope = descs
    main, tail, rope = smem
    row = token + half * q_main.block_shape[0]
    load_rows(q_main, row, head, 0, bar, main.index(half))
    if DIMS[1] > 0:
        load_rows(q_tail, row, head, DIMS[0], bar, tail.index(half))
    column: gl.constexpr = DIMS[0] + DIMS[1]
    if RAW[0]:
        raw_bar = raw_bars.index(half)
        mbarrier.expect(raw_bar, Q_ROWS * DIMS[2])
        load_rows(q_rope, row, head, column, raw_bar, raw_of(rope.index(half), RAW))
    elif DIMS[2] > 0:
        load_rows(q_rope, row, head, column, bar, rope.index(half))


@gluon.jit
def load_block_scales(scale_ptr, smem, bars, work, j, RING: gl.constexpr):
    """The scales of the keys of the j-th block; the softmax groups read and release them."""
    key, keys, blocks = work[3], work[4], work[6]
    full, empty = bars
    place = j % RING[2]
    row = (blocks - 1 - j) * smem.shape[1]
    mbarrier.wait(empty.index(place), ((j // RING[2]) & 1) ^ 1)
    load_scales(scale_ptr, key + row, keys - row, full.index(place), smem.index(place))


@gluon.jit
def load_keys(
    descs, smem, bars, raw_bars, table, work, j, ONE: gl.constexpr, RING: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """K of the j-th block, counted from the last; Q comes on the same barrier as the first."""
    head, _token, _rows, key, keys, _seen, blocks, _whole, request, _ = work
    BYTES: gl.constexpr = HOW[0]
    RAW: gl.constexpr = HOW[1]
    k_main, k_tail, k_rope = descs
    main, tail, rope = smem
    full, empty = bars
    table_ptr, table_stride = table
    slot, phase, place = k_place(j, ONE, RING)
    BN: gl.constexpr = main.shape[1]
    bar = full.index(slot)
    row = (blocks - 1 - j) * BN
    mbarrier.wait(empty.index(slot), phase ^ 1)
    if j == 0:
        mbarrier.expect(bar, BYTES[0] + BYTES[1])
    else:
        mbarrier.expect(bar, BYTES[1])
    rope_bar = bar
    rope_tile = rope.index(place)
    if RAW[1]:
        rope_bar = raw_bars.index(place)
        mbarrier.expect(rope_bar, BN * DIMS[2])
        rope_tile = raw_of(rope_tile, RAW)
    load_rows(k_main, key + row, head, 0, bar, tile_of(main, slot, DIMS[0]))
    if DIMS[1] > 0:
        load_rows(k_tail, key + row, head, DIMS[0], bar, tail.index(slot))
    if ROPE[0] == "cache":
        line = (table_ptr + request.to(gl.int64) * table_stride, table_stride)
        load_pages(k_rope, line, row, keys, rope_bar, rope_tile, ROPE[1], BN)
    elif ROPE[0] == "per_head":
        load_rows(k_rope, key + row, head, 0, rope_bar, rope_tile)
    elif ROPE[0] == "shared":
        load_rows(k_rope, key + row, 0, 0, rope_bar, rope_tile)
    return bar


@gluon.jit
def load_values(
    desc, smem, bars, work, j, ONE: gl.constexpr, RING: gl.constexpr, D_V: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """V of the j-th block, counted from the last."""
    head, _token, _rows, key, keys, _seen, blocks, _whole, _request, _ = work
    full, empty = bars
    slot, phase, at = v_place(j, ONE, RING)
    BN: gl.constexpr = smem.shape[1]
    bar = full.index(at)
    mbarrier.wait(empty.index(at), phase ^ 1)
    mbarrier.expect(bar, BYTES[2])
    load_ragged(desc, key, keys, (blocks - 1 - j) * BN, head, bar, tile_of(smem, slot, D_V))


@gluon.jit
def load_two(
    descs, smem, bars, table, work, RING: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """Two query tiles: Q0 K0, Q1, V0, K1, V1, …"""
    q_descs, k_descs, v_desc, scale_ptr = descs
    q_smem, k_smem, v_smem, scale_smem = smem
    ring, second, scale_bars, q_raw, k_raw = bars
    BYTES: gl.constexpr = HOW[0]
    RAW: gl.constexpr = HOW[1]
    head, token, blocks = work[0], work[1], work[6]
    for j in range(0, blocks):
        bar = load_keys(k_descs, k_smem, ring, k_raw, table, work, j, False, RING, DIMS, ROPE, HOW)
        if scale_ptr is not None:
            load_block_scales(scale_ptr, scale_smem, scale_bars, work, j, RING)
        if j == 0:
            load_queries(q_descs, q_smem, bar, q_raw, 0, token, head, DIMS, RAW)
            mbarrier.expect(second.index(0), BYTES[0])
            load_queries(q_descs, q_smem, second.index(0), q_raw, 1, token, head, DIMS, RAW)
        load_values(v_desc, v_smem, ring, work, j, False, RING, DIMS[3], BYTES)


@gluon.jit
def load_one(
    descs, smem, bars, table, work, RING: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """One query tile: Q K0, K1, V0, K2, V1, K3, …"""
    q_descs, k_descs, v_desc, scale_ptr = descs
    q_smem, k_smem, v_smem, scale_smem = smem
    ring, _second, scale_bars, q_raw, k_raw = bars
    head, token, blocks = work[0], work[1], work[6]
    for j in range(0, blocks + 1):
        if j < blocks:
            bar = load_keys(
                k_descs, k_smem, ring, k_raw, table, work, j, True, RING, DIMS, ROPE, HOW
            )
            if j == 0:
                load_queries(q_descs, q_smem, bar, q_raw, 0, token, head, DIMS, HOW[1])
            if scale_ptr is not None:
                load_block_scales(scale_ptr, scale_smem, scale_bars, work, j, RING)
        if j > 0:
            load_values(v_desc, v_smem, ring, work, j - 1, True, RING, DIMS[3], HOW[0])


@gluon.jit
def load(
    given, QUERIES: gl.constexpr, RING: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """HOW: bytes on the barriers of Q, K and V tiles; what arrives raw, as in dequantize.py."""
    descs, smem, bars, table, work = given
    if QUERIES == 1:
        load_one(descs, smem, bars, table, work, RING, DIMS, ROPE, HOW)
    elif QUERIES == 2:
        load_two(descs, smem, bars, table, work, RING, DIMS, ROPE, HOW)
    else:
        if work[2] > Q_ROWS:
            load_two(descs, smem, bars, table, work, RING, DIMS, ROPE, HOW)
        else:
            load_one(descs, smem, bars, table, work, RING, DIMS, ROPE, HOW)
