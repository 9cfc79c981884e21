# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The load warp: Q once, then K and V of every block of keys, all by TMA.

Blocks come from the last to the first, so that those that need a mask come first. The first K
brings Q with it, on the same barrier; with two query tiles the second has a barrier of its own.
Rows of V after a request's last key must be zeros, because a weight of 0 times a NaN is a NaN: its
descriptor is ragged. Rows of K and rope there may be anything: their scores are masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.ring import k_place, tile_of, v_place
from openmla.kernels.boxes import load_pages, load_ragged, load_rows

Q_ROWS = gl.constexpr(128)


@gluon.jit
def load_queries(descs, smem, bar, half: gl.constexpr, token, head, DIMS: gl.constexpr):
    """128 rows of Q; their bytes are announced by the caller."""
    q_main, q_tail, q_rope = descs
    main, tail, rope = smem
    row = token + half * Q_ROWS
    load_rows(q_main, row, head, 0, bar, main.index(half))
    if DIMS[1] > 0:
        load_rows(q_tail, row, head, DIMS[0], bar, tail.index(half))
    load_rows(q_rope, row, head, DIMS[0] + DIMS[1], bar, rope.index(half))


@gluon.jit
def load_keys(
    descs, smem, bars, table, piece, j, ONE: gl.constexpr, RING: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """K of the j-th block, counted from the last; Q comes on the same barrier as the first."""
    head, _token, _rows, key, keys, _seen, blocks, _whole, request = piece
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
    load_rows(k_main, key + row, head, 0, bar, tile_of(main, slot, DIMS[0]))
    if DIMS[1] > 0:
        load_rows(k_tail, key + row, head, DIMS[0], bar, tail.index(slot))
    if ROPE[0] == "cache":
        line = table_ptr + request.to(gl.int64) * table_stride
        load_pages(k_rope, line, row, keys, bar, rope.index(place), ROPE[1], BN)
    elif ROPE[0] == "per_head":
        load_rows(k_rope, key + row, head, 0, bar, rope.index(place))
    else:
        load_rows(k_rope, key + row, 0, 0, bar, rope.index(place))
    return bar


@gluon.jit
def load_values(
    desc, smem, bars, piece, j, ONE: gl.constexpr, RING: gl.constexpr, D_V: gl.constexpr
):
    """V of the j-th block, counted from the last."""
    head, _token, _rows, key, keys, _seen, blocks, _whole, _request = piece
    full, empty = bars
    slot, phase, at = v_place(j, ONE, RING)
    BN: gl.constexpr = smem.shape[1]
    bar = full.index(at)
    mbarrier.wait(empty.index(at), phase ^ 1)
    mbarrier.expect(bar, BN * D_V * smem.dtype.primitive_bitwidth // 8)
    load_ragged(desc, key, keys, (blocks - 1 - j) * BN, head, bar, tile_of(smem, slot, D_V))


@gluon.jit
def load_two(
    descs, smem, bars, table, piece, RING: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Two query tiles: Q0 K0, Q1, V0, K1, V1, …"""
    q_descs, k_descs, v_desc = descs
    q_smem, k_smem, v_smem = smem
    ring, second = bars
    head, token = piece[0], piece[1]
    blocks = piece[6]
    for j in range(0, blocks):
        bar = load_keys(k_descs, k_smem, ring, table, piece, j, False, RING, DIMS, ROPE, BYTES)
        if j == 0:
            load_queries(q_descs, q_smem, bar, 0, token, head, DIMS)
            mbarrier.expect(second.index(0), BYTES[0])
            load_queries(q_descs, q_smem, second.index(0), 1, token, head, DIMS)
        load_values(v_desc, v_smem, ring, piece, j, False, RING, DIMS[3])


@gluon.jit
def load_one(
    descs, smem, bars, table, piece, RING: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """One query tile: Q K0, K1, V0, K2, V1, K3, …"""
    q_descs, k_descs, v_desc = descs
    q_smem, k_smem, v_smem = smem
    ring = bars[0]
    head, token = piece[0], piece[1]
    blocks = piece[6]
    for j in range(0, blocks + 1):
        if j < blocks:
            bar = load_keys(k_descs, k_smem, ring, table, piece, j, True, RING, DIMS, ROPE, BYTES)
            if j == 0:
                load_queries(q_descs, q_smem, bar, 0, token, head, DIMS)
        if j > 0:
            load_values(v_desc, v_smem, ring, piece, j - 1, True, RING, DIMS[3])


@gluon.jit
def load(
    descs, smem, bars, table, piece, QUERIES: gl.constexpr, RING: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """BYTES: of one Q tile, of one K tile."""
    if QUERIES == 1:
        load_one(descs, smem, bars, table, piece, RING, DIMS, ROPE, BYTES)
    elif QUERIES == 2:
        load_two(descs, smem, bars, table, piece, RING, DIMS, ROPE, BYTES)
    else:
        if piece[2] > Q_ROWS:
            load_two(descs, smem, bars, table, piece, RING, DIMS, ROPE, BYTES)
        else:
            load_one(descs, smem, bars, table, piece, RING, DIMS, ROPE, BYTES)
