"""Two CTAs of a cluster: a matmul whose MMA reads the shared memory of both, and a copy.

A [256, K] is split by rows, B [K, 128] by columns, the accumulator [256, 128] by rows.

| barrier | arrives (count) | waits |
|---|---|---|
| loaded[STAGES] | the TMA bytes of A and B (1) | both CTAs (the's MMA needs both halves) |
| multiplied[STAGES] | tcgen05 commit, in both CTAs (1) | the next load of the stage, the epilogue |
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
)

from toys.compat import thread_barrier, tma_load, tmem_reg_layout


@gluon.jit
def pair_matmul(
    a_desc,
    b_desc,
    o_ptr,
    blocks,
    ACC: gl.constexpr,
    REGS: gl.constexpr,
    LOADED: gl.constexpr,
    DONE: gl.constexpr,
    DONE_SHAPE: gl.constexpr,
):
    a = gl.allocate_shared_memory(gl.bfloat16, [2, 256, 64], a_desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], b_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], LOADED)
    multiplied = gl.allocate_shared_memory(gl.int64, DONE_SHAPE, DONE)
    acc = allocate_tensor_memory(gl.float32, [256, 128], ACC)
    for i in gl.static_range(2):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(multiplied.index(i), count=1)
    for block in range(0, blocks):
        stage = block & 1
        phase = (block >> 1) & 1
        mbarrier.wait(multiplied.index(stage), phase ^ 1)
        mbarrier.expect(loaded.index(stage), 128 * 64 * 2 + 64 * 64 * 2)
        tma_load(a_desc, [0, block * 64], loaded.index(stage), a.index(stage))
        tma_load(b_desc, [block * 64, 0], loaded.index(stage), b.index(stage))
        mbarrier.wait(loaded.index(stage), phase)
        done = [multiplied.index(stage)]
        tcgen05_mma(a.index(stage), b.index(stage), acc, use_acc=block > 0, mbarriers=done)
    last = blocks - 1
    mbarrier.wait(multiplied.index(last & 1), (last >> 1) & 1)
    value = acc.load(REGS)
    rows = gl.arange(0, 256, gl.SliceLayout(1, REGS))
    columns = gl.arange(0, 128, gl.SliceLayout(0, REGS))
    gl.store(o_ptr + rows[:, None] * 128 + columns[None, :], value)


@gluon.jit
def pair_copy(
    o_ptr,
    BOX: gl.constexpr,
    T: gl.constexpr,
    DONE: gl.constexpr,
    DONE_SHAPE: gl.constexpr,
):
    """Each CTA copies its 128 of 256 rows to its tensor memory and commits to its own barrier."""
    REGS: gl.constexpr = tmem_reg_layout(gl.float32, [256, 32], T, 4)
    box = gl.allocate_shared_memory(gl.float32, [256, 32], BOX)
    done = gl.allocate_shared_memory(gl.int64, DONE_SHAPE, DONE)
    mbarrier.init(done.index(0), count=1)
    t = allocate_tensor_memory(gl.float32, [256, 32], T)
    rows = gl.arange(0, 256, gl.SliceLayout(1, REGS))
    columns = gl.arange(0, 32, gl.SliceLayout(0, REGS))
    box.store((rows[:, None] * 32 + columns[None, :]).to(gl.float32))
    fence_async_shared()
    thread_barrier()
    tcgen05_copy(box, t)
    tcgen05_commit(done.index(0))
    mbarrier.wait(done.index(0), 0)
    gl.store(o_ptr + rows[:, None] * 32 + columns[None, :], t.load(REGS))
