"""One small CDNA4 kernel per feature: loads to LDS, transposing LDS reads, MFMA, scaled MFMA.

| kernel | feature | warps | LDS |
|---|---|---|---|
| lds_matmul | buffer_load_to_shared, V read transposed by its operand layout, mfma | 4 | v |
| scaled | mfma_scaled on fp8 e4m3, with and without E8M0 scales | 4 | none |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy


@gluon.jit
def lds_matmul(p_ptr, v_ptr, o_ptr, SHARED: gl.constexpr):
    """P [128, 64] times V [64, 128], both bf16."""
    ML: gl.constexpr = AMDMFMALayout(
        version=4, instr_shape=[32, 32, 16], transposed=True, warps_per_cta=[4, 1]
    )
    DA: gl.constexpr = gl.DotOperandLayout(0, ML, 8)
    DB: gl.constexpr = gl.DotOperandLayout(1, ML, 8)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 16], [4, 1], [1, 0])
    v = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    keys = gl.arange(0, 64, gl.SliceLayout(1, BL))
    columns = gl.arange(0, 128, gl.SliceLayout(0, BL))
    async_copy.buffer_load_to_shared(v, v_ptr, keys[:, None] * 128 + columns[None, :])
    async_copy.commit_group()
    rows = gl.arange(0, 128, gl.SliceLayout(1, DA))
    depth = gl.arange(0, 64, gl.SliceLayout(0, DA))
    p = cdna4.buffer_load(p_ptr, rows[:, None] * 64 + depth[None, :])
    async_copy.wait_group(0)
    acc = cdna4.mfma(p, v.load(DB), gl.zeros([128, 128], gl.float32, ML))
    out_rows = gl.arange(0, 128, gl.SliceLayout(1, ML))
    out_columns = gl.arange(0, 128, gl.SliceLayout(0, ML))
    cdna4.buffer_store(acc, o_ptr, out_rows[:, None] * 128 + out_columns[None, :])


@gluon.jit
def scaled(a_ptr, b_ptr, o_ptr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr):
    """A [128, 128] times B [128, 64] in fp8, times 2 ** (A_SCALE + B_SCALE - 254)."""
    ML: gl.constexpr = AMDMFMALayout(
        version=4, instr_shape=[32, 32, 64], transposed=True, warps_per_cta=[4, 1]
    )
    DA: gl.constexpr = gl.DotOperandLayout(0, ML, 16)
    DB: gl.constexpr = gl.DotOperandLayout(1, ML, 16)
    rows = gl.arange(0, 128, gl.SliceLayout(1, DA))
    depth_a = gl.arange(0, 128, gl.SliceLayout(0, DA))
    a = cdna4.buffer_load(a_ptr, rows[:, None] * 128 + depth_a[None, :])
    depth_b = gl.arange(0, 128, gl.SliceLayout(1, DB))
    columns = gl.arange(0, 64, gl.SliceLayout(0, DB))
    b = cdna4.buffer_load(b_ptr, depth_b[:, None] * 64 + columns[None, :])
    acc = gl.zeros([128, 64], gl.float32, ML)
    if A_SCALE == 127 and B_SCALE == 127:
        acc = cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", acc)
    else:
        LA: gl.constexpr = cdna4.get_mfma_scale_layout(DA, [128, 4])
        LB: gl.constexpr = cdna4.get_mfma_scale_layout(DB, [64, 4])
        sa = gl.full([128, 4], A_SCALE, gl.uint8, LA)
        sb = gl.full([64, 4], B_SCALE, gl.uint8, LB)
        acc = cdna4.mfma_scaled(a, sa, "e4m3", b, sb, "e4m3", acc)
    out_rows = gl.arange(0, 128, gl.SliceLayout(1, ML))
    out_columns = gl.arange(0, 64, gl.SliceLayout(0, ML))
    cdna4.buffer_store(acc, o_ptr, out_rows[:, None] * 64 + out_columns[None, :])
