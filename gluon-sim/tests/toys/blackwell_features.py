"""One small Blackwell kernel per feature. The two-CTA matmul is in blackwell_pair.py.

| kernel | feature | warps | barriers (count) | memory |
|---|---|---|---|---|
| multiply | tcgen05 MMA, operands in shared memory, bf16, fp8 | 4 | loaded, done (1) | a, b, acc |
| from_tmem | A in tensor memory (over an fp32 tile), slice | 4 | loaded, done (1) | v, s, acc |
| copy | tcgen05 copy from shared to tensor memory, commit | 4 | done (1) | box, t |
| scaled | MMA with E8M0 scales in tensor memory | 4 | loaded, done (1) | a, b, acc, sa, sb |
| gather4 | TMA gather and scatter of rows | 4 | loaded (1) | rows |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
)

from toys.compat import reinterpret, thread_barrier, tma_load


@gluon.jit
def barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def store_tile(o_ptr, value, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = value.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(o_ptr + rows[:, None] * COLUMNS + columns[None, :], value)


@gluon.jit
def multiply(a_desc, b_desc, o_ptr, BYTES: gl.constexpr, ACC: gl.constexpr, REGS: gl.constexpr):
    """A [128, K] times the transpose of B [128, K]."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    bars = barriers(1)
    acc = allocate_tensor_memory(gl.float32, [128, 128], ACC)
    mbarrier.expect(bars.index(0), BYTES)
    tma_load(a_desc, [0, 0], bars.index(0), a)
    tma_load(b_desc, [0, 0], bars.index(0), b)
    mbarrier.wait(bars.index(0), 0)
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, mbarriers=[bars.index(1)])
    mbarrier.wait(bars.index(1), 0)
    store_tile(o_ptr, acc.load(REGS), 128, 128)


@gluon.jit
def from_tmem(
    v_desc,
    o_ptr,
    S: gl.constexpr,
    P: gl.constexpr,
    P_REGS: gl.constexpr,
    HALF_REGS: gl.constexpr,
):
    """P [128, 128] = row + column, times V [128, 128]; the right half of the result."""
    v = gl.allocate_shared_memory(gl.bfloat16, [128, 128], v_desc.layout)
    bars = barriers(1)
    s = allocate_tensor_memory(gl.float32, [128, 128], S)
    acc = allocate_tensor_memory(gl.float32, [128, 128], S)
    mbarrier.expect(bars.index(0), 128 * 128 * 2)
    tma_load(v_desc, [0, 0], bars.index(0), v)
    rows = gl.arange(0, 128, gl.SliceLayout(1, P_REGS))
    columns = gl.arange(0, 128, gl.SliceLayout(0, P_REGS))
    p = reinterpret(s, gl.bfloat16, [128, 128], P)
    p.store((rows[:, None] + columns[None, :]).to(gl.bfloat16))
    thread_barrier()
    mbarrier.wait(bars.index(0), 0)
    tcgen05_mma(p, v, acc, use_acc=False, mbarriers=[bars.index(1)])
    mbarrier.wait(bars.index(1), 0)
    store_tile(o_ptr, acc.slice(64, 64).load(HALF_REGS), 128, 64)


@gluon.jit
def copy(o_ptr, BOX: gl.constexpr, T: gl.constexpr, REGS: gl.constexpr):
    box = gl.allocate_shared_memory(gl.float32, [128, 32], BOX)
    bars = barriers(1)
    t = allocate_tensor_memory(gl.float32, [128, 32], T)
    rows = gl.arange(0, 128, gl.SliceLayout(1, REGS))
    columns = gl.arange(0, 32, gl.SliceLayout(0, REGS))
    box.store((rows[:, None] * 32 + columns[None, :]).to(gl.float32))
    fence_async_shared()
    thread_barrier()
    tcgen05_copy(box, t)
    tcgen05_commit(bars.index(0))
    mbarrier.wait(bars.index(0), 0)
    store_tile(o_ptr, t.load(REGS), 128, 32)


@gluon.jit
def scaled(
    a_desc,
    b_desc,
    o_ptr,
    A_SCALE: gl.constexpr,
    B_SCALE: gl.constexpr,
    ACC: gl.constexpr,
    REGS: gl.constexpr,
    SCALES: gl.constexpr,
    SCALE_REGS: gl.constexpr,
):
    """fp8 A [128, 128] times the transpose of B, times 2 ** (A_SCALE + B_SCALE - 254)."""
    a = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], b_desc.layout)
    bars = barriers(1)
    acc = allocate_tensor_memory(gl.float32, [128, 128], ACC)
    sa = allocate_tensor_memory(gl.uint8, [128, 4], SCALES)
    sb = allocate_tensor_memory(gl.uint8, [128, 4], SCALES)
    mbarrier.expect(bars.index(0), 2 * 128 * 128)
    tma_load(a_desc, [0, 0], bars.index(0), a)
    tma_load(b_desc, [0, 0], bars.index(0), b)
    sa.store(gl.full([128, 4], A_SCALE, gl.uint8, SCALE_REGS))
    sb.store(gl.full([128, 4], B_SCALE, gl.uint8, SCALE_REGS))
    thread_barrier()
    mbarrier.wait(bars.index(0), 0)
    tcgen05_mma_scaled(
        a,
        b.permute((1, 0)),
        acc,
        sa,
        sb,
        "e4m3",
        "e4m3",
        use_acc=False,
        mbarriers=[bars.index(1)],
    )
    mbarrier.wait(bars.index(1), 0)
    store_tile(o_ptr, acc.load(REGS), 128, 128)


@gluon.jit
def gather4(src, dst, index_ptr, INDEX: gl.constexpr):
    """Rows `index` of `src` to rows 0.. of `dst`, in reverse order of the index list."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [32, 64], src.layout)
    bars = barriers(1)
    at = gl.arange(0, 32, INDEX)
    mbarrier.expect(bars.index(0), 32 * 64 * 2)
    tma.async_gather(src, gl.load(index_ptr + at), 0, bars.index(0), rows)
    mbarrier.wait(bars.index(0), 0)
    tma.async_scatter(dst, 31 - at, 0, rows)
    tma.store_wait(0)
