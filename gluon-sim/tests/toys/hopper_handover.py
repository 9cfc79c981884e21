"""Hopper kernels whose partitions hand over by rules that are easy to break.

| kernel | feature | warps | barriers (count) | shared memory |
|---|---|---|---|---|
| in_turn | named barriers by number in a register | 4 + 4 | bar 9, 10, 11, 12 | note, ring[2] |
| trusted_copies | cp.async and wgmma without a proxy fence | 4 | landed (128) | rows, box |
| reused_operand | a tile that wgmma has read is overwritten | 4 | loaded (1) | tile |
| two_notices | one thread announces a copy, all a note | 4 + 4 | noted, full (1) | note, tile |
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

from toys.compat import cp_async, thread_barrier, tma_load
from toys.signals import signal, signal_at


@gluon.jit
def turn(i):
    return 11 + (i & 1)


@gluon.jit
def write(note, ring, n):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(0, n):
        note.store(gl.arange(0, 128, L) + i)
        signal("bar.arrive 10, 256; mov.b32 $0, 0;")
        ring.index(i & 1).store(gl.arange(0, 128, L) * i)
        signal_at("bar.arrive $1, 256; mov.b32 $0, 0;", turn(i))
        signal("bar.sync 9, 256; mov.b32 $0, 0;")


@gluon.jit
def read(note, ring, o_ptr, n):
    """Bar 9 comes before the ring is heard of: the writer may tell the next step meanwhile."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([128], gl.int32, L)
    for i in range(0, n):
        signal("bar.sync 10, 256; mov.b32 $0, 0;")
        total += note.load(L)
        signal("bar.arrive 9, 256; mov.b32 $0, 0;")
        signal_at("bar.sync $1, 256; mov.b32 $0, 0;", turn(i))
        total += ring.index(i & 1).load(L)
    gl.store(o_ptr + gl.arange(0, 128, L), total)


@gluon.jit
def in_turn(o_ptr, n):
    note = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = gl.allocate_shared_memory(gl.int32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(write, (note, ring, n)), (read, (note, ring, o_ptr, n))], [4], [48])


@gluon.jit
def trusted_copies(src_ptr, o_ptr, LAYOUT: gl.constexpr):
    """src @ box^T, box[r, c] = r - c: `src` is copied, `box` is stored and needs its fence."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    box = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=128)
    r = gl.arange(0, 64, gl.SliceLayout(1, BL))
    c = gl.arange(0, 64, gl.SliceLayout(0, BL))
    cp_async(rows, src_ptr + r[:, None] * 64 + c[None, :])
    async_copy.mbarrier_arrive(landed, increment_count=False)
    value = (r[:, None] - c[None, :]).to(gl.bfloat16)
    box.store(value)
    fence_async_shared()
    mbarrier.wait(landed, 0)
    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, L)
    acc = warpgroup_mma(rows, box.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    gl.store(o_ptr + row[:, None] * 64 + column[None, :], acc)


@gluon.jit
def reused_operand(src, o_ptr):
    """x = src @ src^T, then x @ x^T from the same tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], src.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.expect(loaded, 64 * 64 * 2)
    tma_load(src, [0, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    acc = gl.zeros([64, 64], gl.float32, L)
    x = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    thread_barrier()  # every warp's product has read the tile
    tile.store(x.to(gl.bfloat16))
    fence_async_shared()
    x = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    gl.store(o_ptr + row[:, None] * 64 + column[None, :], x)


@gluon.jit
def notify(src, note, tile, noted, full):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    note.store(gl.arange(0, 64, L).to(gl.float32))
    mbarrier.expect(full, 64 * 64 * 2)
    tma_load(src, [0, 0], full, tile)
    mbarrier.arrive(noted, count=1)


@gluon.jit
def heed(note, tile, noted, full, o_ptr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(full, 0)
    mbarrier.wait(noted, 0)
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    total = tile.load(L).to(gl.float32) + note.load(gl.SliceLayout(0, L))[None, :]
    gl.store(o_ptr + row[:, None] * 64 + column[None, :], total)


@gluon.jit
def two_notices(src, o_ptr):
    """src[r, c] + c: the note is written by all warps, the copy is announced by one thread."""
    note = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], src.layout)
    noted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(noted, count=1)
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [(notify, (src, note, tile, noted, full)), (heed, (note, tile, noted, full, o_ptr))],
        [4],
        [64],
    )
