"""Attention of 128 query rows over key blocks of 64 on CDNA4: loads to LDS, MFMA, online softmax.

Q [rows, 128], K [keys, 128], V [keys, 128], O [rows, 128]; bf16; keys past `k_len` are masked.
One partition of 4 waves, 32 rows each. There are no barriers: every block of K and V is one group
of loads to LDS, the next block is in flight while this one is used, `wait_group(1)` covers it.

| LDS | bytes |
|---|---|
| k [2, 64, 128] | 32768 |
| v [2, 64, 128] | 32768 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy


@gluon.jit
def fetch(k_slot, v_slot, k_ptr, v_ptr, block, k_len, BL: gl.constexpr):
    """One block of K and V as one group; rows past the end are zero."""
    keys = gl.arange(0, 64, gl.SliceLayout(1, BL)) + block * 64
    columns = gl.arange(0, 128, gl.SliceLayout(0, BL))
    at = keys[:, None] * 128 + columns[None, :]
    inside = (keys < k_len)[:, None]
    async_copy.buffer_load_to_shared(k_slot, k_ptr, at, mask=inside)
    async_copy.buffer_load_to_shared(v_slot, v_ptr, at, mask=inside)
    async_copy.commit_group()


@gluon.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, blocks, k_len, qk_scale, SHARED: gl.constexpr):
    ML: gl.constexpr = AMDMFMALayout(
        version=4, instr_shape=[32, 32, 16], transposed=True, warps_per_cta=[4, 1]
    )
    DA: gl.constexpr = gl.DotOperandLayout(0, ML, 8)
    DB: gl.constexpr = gl.DotOperandLayout(1, ML, 8)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 16], [4, 1], [1, 0])
    k = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    v = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    fetch(k.index(0), v.index(0), k_ptr, v_ptr, 0, k_len, BL)
    first = gl.program_id(0) * 128
    q_rows = gl.arange(0, 128, gl.SliceLayout(1, DA)) + first
    q_columns = gl.arange(0, 128, gl.SliceLayout(0, DA))
    q = cdna4.buffer_load(q_ptr, q_rows[:, None] * 128 + q_columns[None, :])
    top = gl.full([128], float("-inf"), gl.float32, gl.SliceLayout(1, ML))
    denom = gl.zeros([128], gl.float32, gl.SliceLayout(1, ML))
    acc = gl.zeros([128, 128], gl.float32, ML)
    for block in range(0, blocks):
        stage = block % 2
        ahead = gl.minimum(block + 1, blocks - 1)
        fetch(k.index(1 - stage), v.index(1 - stage), k_ptr, v_ptr, ahead, k_len, BL)
        async_copy.wait_group(1)
        zero = gl.zeros([128, 64], gl.float32, ML)
        scores = cdna4.mfma(q, k.index(stage).permute((1, 0)).load(DB), zero) * qk_scale
        keys = gl.arange(0, 64, gl.SliceLayout(0, ML)) + block * 64
        scores = gl.where((keys < k_len)[None, :], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        alpha = gl.exp2(top - new_top)
        denom = denom * alpha + gl.sum(weights, 1)
        top = new_top
        acc = acc * alpha[:, None]
        p = gl.convert_layout(weights.to(gl.bfloat16), DA)
        acc = cdna4.mfma(p, v.index(stage).load(DB), acc)
    async_copy.wait_group(0)
    out = (acc / denom[:, None]).to(gl.bfloat16)
    rows = gl.arange(0, 128, gl.SliceLayout(1, ML)) + first
    columns = gl.arange(0, 128, gl.SliceLayout(0, ML))
    cdna4.buffer_store(out, o_ptr, rows[:, None] * 128 + columns[None, :])
