"""Dense ragged causal attention for Hopper, bf16, persistent: a small relative of the real kernel.

Q [Tq, H*192], K [Tk, H*192] (128 + 64 columns), V [Tk, H*128], O [Tq, H*128], LSE [H, Tq].

| partition | warps | does |
|---|---|---|
| consumer 0 (default), consumer 1 | 4, 4 | 64 query rows each: wgmma QK, softmax, wgmma PV, store |
| producer | 1 | TMA loads of Q, K, V |

| barrier | stages | arrives (count) | waits |
|---|---|---|---|
| q_full | consumer | TMA bytes of both parts of Q (1) | its consumer |
| q_empty | consumer | its consumer, after the last QK of a tile (1) | producer |
| k_full, v_full | ST | TMA bytes of K (both parts), of V (1) | both consumers |
| k_empty, v_empty | ST | both consumers, after QK, after PV (2) | producer |

| shared memory | bytes (BN 64, ST 2) |
|---|---|
| q_nope, q_rope | 2 x 64 x 192 x 2 = 49152 |
| k_nope, k_rope | 2 x 64 x 192 x 2 = 49152 |
| v | 2 x 64 x 128 x 2 = 32768 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from toys.compat import tma_load

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_of(tile, shape, BM: gl.constexpr, BN: gl.constexpr):
    """Head, first query row, rows left, first key row, keys, last key of row 0, key blocks."""
    cu_q, cu_k, heads, row_tiles, _ = shape
    head = tile % heads
    rest = tile // heads
    first = (rest % row_tiles) * BM
    batch = rest // row_tiles
    q0 = gl.load(cu_q + batch)
    q_len = gl.load(cu_q + batch + 1) - q0
    k0 = gl.load(cu_k + batch)
    k_len = gl.load(cu_k + batch + 1) - k0
    diagonal = k_len - q_len + first
    visible = gl.minimum(k_len, diagonal + BM)
    blocks = gl.maximum((visible + BN - 1) // BN, 1)
    blocks = gl.where(first < q_len, blocks, 0)
    return head, q0 + first, q_len - first, k0, k_len, diagonal, blocks


@gluon.jit
def producer(descs, smem, bars, shape, BN: gl.constexpr, ST: gl.constexpr):
    qn_desc, qr_desc, kn_desc, kr_desc, v_desc = descs
    q_nope, q_rope, k_nope, k_rope, v = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    it = 0
    visit = 0
    for tile in range(gl.program_id(0), shape[4], gl.num_programs(0)):
        head, q0, _, k0, _, _, blocks = tile_of(tile, shape, 128, BN)
        if blocks > 0:
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (visit & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 64 * 192 * 2)
                tma_load(qn_desc, [q0 + w * 64, head * 192], q_full.index(w), q_nope.index(w))
                tma_load(qr_desc, [q0 + w * 64, head * 192 + 128], q_full.index(w), q_rope.index(w))
            visit += 1
            for block in range(0, blocks):
                stage = it % ST
                phase = (it // ST) & 1
                row = k0 + block * BN
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BN * 192 * 2)
                tma_load(kn_desc, [row, head * 192], k_full.index(stage), k_nope.index(stage))
                tma_load(kr_desc, [row, head * 192 + 128], k_full.index(stage), k_rope.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BN * 128 * 2)
                tma_load(v_desc, [row, head * 128], v_full.index(stage), v.index(stage))
                it += 1


@gluon.jit
def softmax(S, m, denom, block, diagonal, k_len, qk_scale, WHO: gl.constexpr, BN: gl.constexpr):
    """Mask, new maximum, probabilities, new sum, factor for the old output."""
    SL: gl.constexpr = S.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, SL)) + WHO * 64
    keys = gl.arange(0, BN, gl.SliceLayout(0, SL)) + block * BN
    seen = (keys[None, :] <= rows[:, None] + diagonal) & (keys[None, :] < k_len)
    S = gl.where(seen, S * qk_scale, float("-inf"))
    top = gl.maximum(m, gl.max(S, 1))
    safe = gl.where(top == float("-inf"), 0.0, top)
    P = gl.exp2(S - safe[:, None])
    alpha = gl.exp2(m - safe)
    return P, top, denom * alpha + gl.sum(P, 1), alpha


@gluon.jit
def epilogue(acc, m, denom, head, q0, rows_left, out, WHO: gl.constexpr):
    o_ptr, lse_ptr, heads, total_q = out
    OL: gl.constexpr = acc.type.layout
    inverse = 1.0 / gl.where(denom == 0.0, 1.0, denom)
    result = (acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]).to(gl.bfloat16)
    rows = gl.arange(0, 64, gl.SliceLayout(1, OL)) + WHO * 64
    columns = gl.arange(0, 128, gl.SliceLayout(0, OL))
    at = (q0 + rows).to(gl.int64) * heads * 128 + head * 128
    gl.store(o_ptr + at[:, None] + columns[None, :], result, mask=(rows < rows_left)[:, None])
    lse = gl.where(
        denom == 0.0, float("-inf"), (m + gl.log2(gl.where(denom == 0.0, 1.0, denom))) * LN2
    )
    rows1 = gl.arange(0, 64, lse.type.layout) + WHO * 64
    gl.store(lse_ptr + head * total_q + q0 + rows1, lse, mask=rows1 < rows_left)


@gluon.jit
def consumer(
    smem, bars, out, shape, qk_scale, WHO: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr
):
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    q_nope, q_rope, k_nope, k_rope, v = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    it = 0
    visit = 0
    for tile in range(gl.program_id(0), shape[4], gl.num_programs(0)):
        head, q0, rows_left, _, k_len, diagonal, blocks = tile_of(tile, shape, 128, BN)
        if blocks > 0:
            m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            denom = gl.zeros([64], gl.float32, gl.SliceLayout(1, SL))
            acc = gl.zeros([64, 128], gl.float32, OL)
            mbarrier.wait(q_full.index(WHO), visit & 1)
            for block in range(0, blocks):
                stage = it % ST
                phase = (it // ST) & 1
                mbarrier.wait(k_full.index(stage), phase)
                kn = k_nope.index(stage).permute((1, 0))
                kr = k_rope.index(stage).permute((1, 0))
                S0 = gl.zeros([64, BN], gl.float32, SL)
                S1 = warpgroup_mma(q_nope.index(WHO), kn, S0, use_acc=False, is_async=True)
                S2 = warpgroup_mma(q_rope.index(WHO), kr, S1, is_async=True)
                S = warpgroup_mma_wait(0, deps=(S2,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                P, m, denom, alpha = softmax(S, m, denom, block, diagonal, k_len, qk_scale, WHO, BN)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                Pb = gl.convert_layout(P.to(gl.bfloat16), PL)
                mbarrier.wait(v_full.index(stage), phase)
                acc_next = warpgroup_mma(Pb, v.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc_next,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                it += 1
            mbarrier.arrive(q_empty.index(WHO), count=1)
            visit += 1
            epilogue(acc, m, denom, head, q0, rows_left, out, WHO)


@gluon.jit(do_not_specialize=["heads", "row_tiles", "tiles", "total_q"])
def dense(  # noqa: PLR0913
    qn_desc,
    qr_desc,
    kn_desc,
    kr_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    cu_q,
    cu_k,
    heads,
    row_tiles,
    tiles,
    total_q,
    qk_scale,
    BN: gl.constexpr,
    ST: gl.constexpr,
):
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    q_nope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], qn_desc.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], qr_desc.layout)
    k_nope = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, 128], kn_desc.layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, 64], kr_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, 128], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    descs = (qn_desc, qr_desc, kn_desc, kr_desc, v_desc)
    smem = (q_nope, q_rope, k_nope, k_rope, v)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    shape = (cu_q, cu_k, heads, row_tiles, tiles)
    out = (o_ptr, lse_ptr, heads, total_q)
    gl.warp_specialize(
        [
            (consumer, (smem, bars, out, shape, qk_scale, 0, BN, ST)),
            (consumer, (smem, bars, out, shape, qk_scale, 1, BN, ST)),
            (producer, (descs, smem, bars, shape, BN, ST)),
        ],
        [4, 1],
        [240, 24],
    )
