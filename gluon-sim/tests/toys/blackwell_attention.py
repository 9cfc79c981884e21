"""Attention of 128 query rows over a few key blocks on Blackwell: TMA, tcgen05, tensor memory.

Q [rows, 64], K [keys, 64], V [keys, 64], O [rows, 64]; bf16; keys at and past `k_len` are masked.

| partition | warps | does |
|---|---|---|
| softmax (default) | 4 | S from tensor memory, P back, rescales O, stores the result |
| multiply | 1 | issues S = Q K and O += P V |
| load | 1 | TMA loads |

| barrier | stages | arrives (count) | waits |
|---|---|---|---|
| q_full | 1 | TMA bytes of Q (1) | multiply |
| k_full, v_full | ST | TMA bytes (1) | multiply |
| k_empty, v_empty | ST | commit of the product that read it (1) | load |
| s_full | 1 | commit of Q K (1) | softmax |
| p_full | 1 | softmax, when P is stored and O rescaled (1) | multiply |
| o_full | 1 | commit of P V (1) | softmax |

| tensor memory | columns |
|---|---|
| s (fp32), overlaid by p (bf16, the first half) | 128 |
| o (fp32) | 64 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    mbarrier,
    tcgen05_mma,
)

from toys.compat import reinterpret, tma_load


@gluon.jit
def load(descs, smem, bars, blocks, ST: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q, k, v = smem
    q_full, k_full, k_empty, v_full, v_empty = bars[:5]
    mbarrier.expect(q_full.index(0), 128 * 64 * 2)
    tma_load(q_desc, [gl.program_id(0) * 128, 0], q_full.index(0), q)
    for block in range(0, blocks):
        stage = block % ST
        free = ((block // ST) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), 128 * 64 * 2)
        tma_load(k_desc, [block * 128, 0], k_full.index(stage), k.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), 128 * 64 * 2)
        tma_load(v_desc, [block * 128, 0], v_full.index(stage), v.index(stage))


@gluon.jit
def multiply(smem, tmem, bars, blocks, P: gl.constexpr, ST: gl.constexpr):
    q, k, v = smem
    s, o = tmem
    q_full, k_full, k_empty, v_full, v_empty, s_full, p_full, o_full = bars
    p = reinterpret(s, gl.bfloat16, [128, 128], P)
    mbarrier.wait(q_full.index(0), 0)
    for block in range(0, blocks):
        stage = block % ST
        phase = (block // ST) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scored = [s_full.index(0), k_empty.index(stage)]
        tcgen05_mma(q, k.index(stage).permute((1, 0)), s, use_acc=False, mbarriers=scored)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.wait(p_full.index(0), block & 1)
        added = [o_full.index(0), v_empty.index(stage)]
        tcgen05_mma(p, v.index(stage), o, use_acc=block > 0, mbarriers=added)


@gluon.jit
def softmax(
    tmem,
    bars,
    o_ptr,
    blocks,
    k_len,
    qk_scale,
    P: gl.constexpr,
    S_REGS: gl.constexpr,
    P_REGS: gl.constexpr,
    O_REGS: gl.constexpr,
):
    s, o = tmem
    s_full, p_full, o_full = bars
    p = reinterpret(s, gl.bfloat16, [128, 128], P)
    top = gl.full([128], float("-inf"), gl.float32, gl.SliceLayout(1, S_REGS))
    denom = gl.zeros([128], gl.float32, gl.SliceLayout(1, S_REGS))
    for block in range(0, blocks):
        keys = gl.arange(0, 128, gl.SliceLayout(0, S_REGS)) + block * 128
        mbarrier.wait(s_full.index(0), block & 1)
        scores = s.load(S_REGS) * qk_scale
        scores = gl.where((keys < k_len)[None, :], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        alpha = gl.exp2(top - new_top)
        denom = denom * alpha + gl.sum(weights, 1)
        top = new_top
        p.store(gl.convert_layout(weights.to(gl.bfloat16), P_REGS))
        if block > 0:
            mbarrier.wait(o_full.index(0), (block - 1) & 1)
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, O_REGS))[:, None]
            o.store(o.load(O_REGS) * factor)
        mbarrier.arrive(p_full.index(0), count=1)
    mbarrier.wait(o_full.index(0), (blocks - 1) & 1)
    inverse = gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_REGS))
    out = (o.load(O_REGS) * inverse[:, None]).to(gl.bfloat16)
    rows = gl.arange(0, 128, gl.SliceLayout(1, O_REGS)) + gl.program_id(0) * 128
    columns = gl.arange(0, 64, gl.SliceLayout(0, O_REGS))
    gl.store(o_ptr + rows[:, None] * 64 + columns[None, :], out)


@gluon.jit
def attention(  # noqa: PLR0913
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    blocks,
    k_len,
    qk_scale,
    ST: gl.constexpr,
    S: gl.constexpr,
    P: gl.constexpr,
    OUT: gl.constexpr,
    S_REGS: gl.constexpr,
    P_REGS: gl.constexpr,
    O_REGS: gl.constexpr,
):
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(gl.bfloat16, [128, 64], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [ST, 128, 64], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [ST, 128, 64], v_desc.layout)
    s = allocate_tensor_memory(gl.float32, [128, 128], S)
    o = allocate_tensor_memory(gl.float32, [128, 64], OUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARS)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BARS)
    s_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARS)
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARS)
    o_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARS)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(s_full.index(0), count=1)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(o_full.index(0), count=1)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    smem = (q, k, v)
    bars = (q_full, k_full, k_empty, v_full, v_empty, s_full, p_full, o_full)
    outer = (s_full, p_full, o_full)
    gl.warp_specialize(
        [
            (softmax, ((s, o), outer, o_ptr, blocks, k_len, qk_scale, P, S_REGS, P_REGS, O_REGS)),
            (multiply, (smem, (s, o), bars, blocks, P, ST)),
            (load, ((q_desc, k_desc, v_desc), smem, bars, blocks, ST)),
        ],
        [1, 1],
        [24, 24],
    )
