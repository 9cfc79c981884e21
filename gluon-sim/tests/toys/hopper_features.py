"""One small Hopper kernel per feature of the simulator.

| kernel | feature | warps | barriers (count) | shared memory |
|---|---|---|---|---|
| tma_copy | TMA load and store, clipped at the edge | 4 | loaded (1) | tile |
| wgmma | A from shared memory or registers; bf16, fp16, fp8 | 4 | loaded (1) | a, b |
| gather_cp_async | cp.async, its mbarrier arrive, proxy fence, wgmma | 4 | landed (128) | rows |
| grouped_cp_async | cp.async groups with wait counts | 4 | none | ring[2] |
| ping_pong | named barriers between two partitions | 4 + 4 | bar.sync 8, 9 | box |
| pipeline | warp_specialize, mbarrier phases, TMA ring | 4 + 1 | full, empty (1) | ring[2] |
| publish | partition writes shared memory, fences, TMA store | 4 + 4 | ready (1) | box |
| counter | atomic tile ids, integer wrap-around | 4 | none | none |
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

from toys.compat import cp_async, thread_barrier, tma_load, tma_store
from toys.signals import signal


@gluon.jit
def tma_copy(src, dst, row, column):
    tile = gl.allocate_shared_memory(src.dtype, src.block_shape, src.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.expect(loaded, 64 * 64 * 2)
    tma_load(src, [row, column], loaded, tile)
    mbarrier.wait(loaded, 0)
    tma_store(dst, [row, column], tile)
    tma.store_wait(0)


@gluon.jit
def store_tile(o_ptr, value, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = value.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(o_ptr + rows[:, None] * COLUMNS + columns[None, :], value)


@gluon.jit
def wgmma(
    a_desc,
    b_desc,
    o_ptr,
    BYTES: gl.constexpr,
    FROM_REGISTERS: gl.constexpr,
    K_WIDTH: gl.constexpr,
    DEPTH: gl.constexpr,
):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.expect(loaded, BYTES)
    tma_load(a_desc, [0, 0], loaded, a)
    tma_load(b_desc, [0, 0], loaded, b)
    mbarrier.wait(loaded, 0)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, DEPTH])
    acc = gl.zeros([64, 64], gl.float32, L)
    if FROM_REGISTERS:
        left = a.load(gl.DotOperandLayout(operand_index=0, parent=L, k_width=K_WIDTH))
        acc = warpgroup_mma(left, b.permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    store_tile(o_ptr, acc, 64, 64)


@gluon.jit
def gather_cp_async(kv_ptr, index_ptr, o_ptr, count, LAYOUT: gl.constexpr):
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=128)
    index = gl.load(index_ptr + gl.arange(0, 64, gl.SliceLayout(1, BL)))
    valid = (index >= 0) & (index < count)
    start = gl.where(valid, index, 0).to(gl.int64) * 64
    columns = gl.arange(0, 64, gl.SliceLayout(0, BL))
    cp_async(rows, kv_ptr + start[:, None] + columns[None, :], mask=valid[:, None])
    async_copy.mbarrier_arrive(landed, increment_count=False)
    mbarrier.wait(landed, 0)
    fence_async_shared()
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, L)
    acc = warpgroup_mma(rows, rows.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    store_tile(o_ptr, acc, 64, 64)


@gluon.jit
def fetch(slot, src_ptr, block, BL: gl.constexpr):
    rows = gl.arange(0, 32, gl.SliceLayout(1, BL)) + block * 32
    columns = gl.arange(0, 64, gl.SliceLayout(0, BL))
    cp_async(slot, src_ptr + rows[:, None] * 64 + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def grouped_cp_async(src_ptr, o_ptr, blocks):
    """Sum of the blocks, one block ahead in flight."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ring = gl.allocate_shared_memory(
        gl.bfloat16, [2, 32, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    total = gl.zeros([32, 64], gl.float32, BL)
    fetch(ring.index(0), src_ptr, 0, BL)
    for block in range(0, blocks):
        fetch(ring.index((block + 1) % 2), src_ptr, gl.minimum(block + 1, blocks - 1), BL)
        async_copy.wait_group(1)
        thread_barrier()
        total += ring.index(block % 2).load(BL).to(gl.float32)
        thread_barrier()
    async_copy.wait_group(0)
    store_tile(o_ptr, total, 32, 64)


@gluon.jit
def serve(box, n):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(0, n):
        box.store(gl.arange(0, 128, L) + i)
        signal("bar.arrive 8, 256; mov.b32 $0, 0;")
        signal("bar.sync 9, 256; mov.b32 $0, 0;")


@gluon.jit
def reply(box, o_ptr, n):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([128], gl.int32, L)
    for _ in range(0, n):
        signal("bar.sync 8, 256; mov.b32 $0, 0;")
        total += box.load(L)
        signal("bar.arrive 9, 256; mov.b32 $0, 0;")
    gl.store(o_ptr + gl.arange(0, 128, L), total)


@gluon.jit
def ping_pong(o_ptr, n):
    box = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(serve, (box, n)), (reply, (box, o_ptr, n))], [4], [48])


@gluon.jit
def load_ring(src, ring, full, empty, blocks):
    for block in range(0, blocks):
        stage = block % 2
        mbarrier.wait(empty.index(stage), ((block // 2) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 64 * 64 * 2)
        tma_load(src, [block * 64, 0], full.index(stage), ring.index(stage))


@gluon.jit
def sum_ring(ring, full, empty, o_ptr, blocks):
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([64, 64], gl.float32, BL)
    for block in range(0, blocks):
        stage = block % 2
        mbarrier.wait(full.index(stage), (block // 2) & 1)
        total += ring.index(stage).load(BL).to(gl.float32)
        mbarrier.arrive(empty.index(stage), count=1)
    store_tile(o_ptr, total, 64, 64)


@gluon.jit
def pipeline(src, o_ptr, blocks):
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], src.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (sum_ring, (ring, full, empty, o_ptr, blocks)),
            (load_ring, (src, ring, full, empty, blocks)),
        ],
        [1],
        [24],
    )


@gluon.jit
def fill(box, ready):
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, BL))
    columns = gl.arange(0, 64, gl.SliceLayout(0, BL))
    box.store((rows[:, None] * 2 + columns[None, :]).to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def send(box, ready, dst):
    mbarrier.wait(ready, 0)
    tma_store(dst, [0, 0], box)
    tma.store_wait(0)


@gluon.jit
def publish(dst):
    box = gl.allocate_shared_memory(gl.bfloat16, [64, 64], dst.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(fill, (box, ready)), (send, (box, ready, dst))], [1], [24])


@gluon.jit
def counter(count_ptr, o_ptr, tiles):
    """Each tile id is taken once; what is stored wraps around 32 bits."""
    tile = gl.atomic_add(count_ptr, 1)
    while tile < tiles:
        gl.store(o_ptr + tile, tile * 1431655765 + 7)
        tile = gl.atomic_add(count_ptr, 1)
