"""Ampere and Hopper: cp.async, mbarriers, TMA, wgmma, cluster barriers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gluon_sim.language.core import allocate_shared_memory
from gluon_sim.language.namespace import Namespace, require_default
from gluon_sim.machine.async_units import AsyncOp, queue, wait_for_all
from gluon_sim.machine.barriers import MBarrier
from gluon_sim.machine.clocks import Clock, CopyChannel
from gluon_sim.machine.context import current
from gluon_sim.memory.global_memory import Descriptor
from gluon_sim.memory.tiles import tile_of
from gluon_sim.memory.views import MemoryView
from gluon_sim.report.findings import Kind
from gluon_sim.values import dtypes, fp8_sums, layouts
from gluon_sim.values.tensors import Pointer, Tensor, raw


# -- mbarriers
def _barrier(view: MemoryView) -> MBarrier:
    agent = current()
    return agent.cta.cluster.barrier(view, agent.cta.rank)


def init(mbarrier: MemoryView, count: Any) -> None:
    """Start a barrier that completes after `count` arrivals."""
    agent = current()
    agent.cta.cluster.initialize(mbarrier, agent.cta.rank, int(count))


def invalidate(mbarrier: MemoryView) -> None:
    """Its memory is not reused here, so there is nothing to do."""


def allocate_mbarrier(batch: int | None = None, two_ctas: bool = False) -> MemoryView:
    """Shared memory for one barrier, or `batch` of them."""
    size = current().cta.cluster.size
    lanes = size // 2 if two_ctas and size > 1 else size
    layout = layouts.MBarrierLayout.multicta(size, two_ctas)
    shape = [lanes] if batch is None else [batch, lanes]
    return allocate_shared_memory(dtypes.int64, shape, layout)


def wait(mbarrier: MemoryView, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    """Block while the phase with this parity is in progress.

    Every thread polls for itself (`mbarrier.try_wait`, both in Triton 3.6 and 3.9) and passes when
    it sees the phase complete: after what arrived, but not after the other warps of its partition.
    """
    if not bool(pred):
        return
    agent = current()
    agent.warps.touched = True
    if agent.cta.cluster.shared_by_pair(mbarrier) and agent.cta.rank:
        return  # only CTA 0 waits on a pair barrier: it is the one that issues
    barrier, parity = _barrier(mbarrier), int(phase)
    agent.phase = parity
    mbarrier.alloc.turning |= isinstance(phase, Tensor)
    if agent.scheduler.observer is not None:
        agent.scheduler.observer.waited_on(mbarrier, not barrier.passes(parity))
    agent.wait(
        lambda: barrier.passes(parity),
        lambda: f"phase {parity} of {barrier.describe()}",
        lambda: barrier.completed_at,
        barrier,
    )
    agent.clock.join(barrier.published)


def arrive(mbarrier: MemoryView, *, count: Any = 1, pred: Any = True, from_cta: Any = None) -> None:
    """Publish what this partition knows, and count `count` arrivals.

    One thread arrives for all. Before it the compiler puts a barrier of the partition: Triton 3.9
    always, 3.6 when the partition has used shared memory (data or an mbarrier) since the last one.
    Without one, nobody waited for the wgmma or the tensor memory accesses of the other warps.
    """
    require_default("from_cta", from_cta, None)
    if not bool(pred):
        return
    agent = current()
    if agent.warps.unmet and not agent.warps.touched:
        agent.report(
            Kind.RACE,
            f"one thread arrives on {mbarrier.label} for the whole partition, and Triton 3.6 puts "
            "no barrier before it: other warps may not be done",
            buffer=mbarrier.alloc.name,
            stage=mbarrier.stage,
        )
    clock = agent.clock.copy()
    agent.warps.meet()
    agent.warps.touched = True
    _barrier(mbarrier).arrive(clock, int(count), agent.name, agent.time, agent.report)
    agent.yield_()


def expect(
    mbarrier: MemoryView,
    bytes: Any = None,
    pred: Any = True,
    *,
    bytes_per_cta: Any = None,
    from_cta: Any = None,
) -> None:
    """Arrive once and announce bytes; on a pair barrier each CTA announces its own.

    One thread arrives. Triton 3.6 puts no barrier before it for the sake of other memory, so it
    tells nothing of what other warps have done since they last met.
    """
    require_default("from_cta", from_cta, None)
    if not bool(pred):
        return
    agent = current()
    count = int(bytes if bytes is not None else bytes_per_cta)
    barrier = _barrier(mbarrier)
    barrier.expect(count)
    clock = agent.warps.known_to_one()
    agent.clock.tick(agent.component)
    agent.warps.touched = True
    barrier.arrive(clock, 1, agent.name, agent.time, agent.report)
    agent.yield_()


# -- TMA
def _block(desc: Descriptor, view: MemoryView, coord: Sequence[Any]) -> list[int]:
    """First coordinate of the part of a block that the running CTA copies."""
    if list(view.shape) != desc.block_shape:
        raise ValueError(f"{view.label} {view.shape} does not match the block {desc.block_shape}")
    check_swizzle(desc, view)
    start = [int(c) for c in coord]
    axis = view.split
    if axis is not None:
        start[len(start) + axis] += view.part().shape[axis] * current().cta.rank
    return start


def check_swizzle(desc: Descriptor, view: MemoryView) -> None:
    """Refuse two layouts: a copy exchanges bytes as its descriptor says, loads as the view says."""
    copied, seen = tile_of(desc.layout), view.tile
    if copied is None or seen is None or copied.boxes != seen.boxes:
        raise ValueError(f"{view.label} of {view.layout}: the descriptor has {desc.layout}")


def _deliver(op: AsyncOp, mbarrier: MemoryView, nbytes: int) -> None:
    """When `op` ends, its bytes count on the barrier."""
    barrier = _barrier(mbarrier)
    issued_in = barrier.generation
    op.on_done.append(
        lambda: barrier.receive(op.completion, nbytes, issued_in, op.finish_time, op.report)
    )


def _channel(view: MemoryView) -> CopyChannel:
    return CopyChannel(current().cta.name, id(view.alloc), view.offset, view.shape)


def tma_load(
    tensor_desc: Descriptor,
    coord: Sequence[Any],
    barrier: MemoryView,
    result: MemoryView,
    pred: Any = True,
    multicast: Any = False,
    **_: Any,
) -> None:
    """Copy a block to shared memory; outside the tensor it is filled with zeros."""
    require_default("multicast", multicast, False)
    if not bool(pred):
        return
    agent = current()
    start = _block(tensor_desc, result, coord)
    alignment = agent.scheduler.load_alignment
    if start[-1] * tensor_desc.dtype.itemsize % alignment:
        raise ValueError(f"TMA load from column {start[-1]}: no multiple of {alignment} bytes")
    part = result.part()
    op = AsyncOp(agent, "copy", f"TMA load to {result.label}", part.nbytes)

    def run() -> None:
        part.write_bits(tensor_desc.read(start, part.shape))

    op.run = run
    _deliver(op, barrier, part.nbytes)
    op.issue(_channel(part), writes=[part], in_order=False)
    tensor_desc.touch(start, part.shape, "TMA load", op, write=False)
    agent.yield_()


def tma_store(tensor_desc: Descriptor, coord: Sequence[Any], src: MemoryView, **_: Any) -> None:
    """Copy shared memory to a block; outside the tensor nothing is written."""
    agent = current()
    start = _block(tensor_desc, src, coord)
    part = src.part()
    op = AsyncOp(agent, "copy", f"TMA store of {src.label}", part.nbytes)

    def run() -> None:
        outer, inner = tensor_desc.window(start, part.shape)
        tensor_desc.array[outer] = part.array()[inner]
        tensor_desc.counts[outer] += 1

    op.run = run
    queue("tma store").issue(op, reads=[part])
    tensor_desc.touch(start, part.shape, "TMA store", op, write=True)
    agent.yield_()


def store_wait(pendings: Any) -> None:
    """Wait until at most `pendings` TMA stores still read shared memory."""
    queue("tma store").wait(int(pendings), "TMA stores")


def make_tensor_descriptor(
    base: Pointer,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    layout: Any,
    padding_option: str = "zero",
) -> Descriptor:
    """A descriptor made by the kernel itself."""
    source = SimpleNamespace(
        shape=[raw(n) for n in shape],
        strides=[raw(s) for s in strides],
        block_shape=block_shape,
        layout=layout,
        padding=padding_option,
    )
    return Descriptor(source, base.buffer.shifted(int(base.offset)))


# -- cp.async
def cp_async(smem: MemoryView, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    """Copy elements to shared memory, zero where the mask is off."""
    agent = current()
    if list(smem.shape) != list(np.broadcast_shapes(np.shape(pointer.offset), np.shape(raw(mask)))):
        raise ValueError(f"{smem.label} {smem.shape} does not match the pointers {pointer.shape}")
    position, where = pointer.buffer.resolve(pointer, raw(mask), "cp.async")
    op = AsyncOp(agent, "copy", f"cp.async to {smem.label}", smem.nbytes)

    def run() -> None:
        bits = pointer.buffer.flat[position]
        smem.write_bits(bits if where is None else np.where(where, bits, 0))

    op.run = run
    op.issue(_channel(smem), writes=[smem], in_order=False, generic=True)
    pointer.buffer.touch(position, where, "cp.async", by=op)
    queue("cp.async").open.append(op)
    agent.yield_()


def cp_async_arrive(mbarrier: MemoryView, increment_count: Any = True) -> None:
    """Arrive once per thread when all cp.async issued so far have landed."""
    agent = current()
    copies = queue("cp.async")
    barrier, threads = _barrier(mbarrier), agent.num_warps * 32
    if increment_count:
        barrier.pending += threads
    op = AsyncOp(agent, "copy", f"cp.async arrive on {mbarrier.label}", 0)
    op.after = [o for o in (copies.last, *copies.open) if o is not None and not o.done]
    for copy in copies.open:
        copies.covered.join(copy.completion)
        copy.waited = True  # its completion is now the barrier's business
    done: Clock = copies.covered.copy()
    op.on_done.append(lambda: barrier.arrive(done, threads, "cp.async", op.finish_time, op.report))
    op.issue(("arrive", agent.component))
    copies.last, copies.open = op, []
    agent.yield_()


def commit_group() -> None:
    """Close the group of copies issued since the last commit."""
    copies = queue("cp.async")
    done = sum(len(g) for g in current().queues.setdefault("groups", []))
    current().queues["groups"].append(copies.open[done:])


def wait_group(num_outstanding: Any = 0) -> None:
    """Wait until at most `num_outstanding` committed groups are in flight.

    A thread waits for its own copies; the compiler lets the partition's warps meet after it.
    """
    agent = current()
    groups = agent.queues.setdefault("groups", [])
    keep = max(len(groups) - int(num_outstanding), 0)
    finished = [op for group in groups[:keep] for op in group]
    agent.queues["groups"] = groups[keep:]
    wait_for_all(agent, finished, "cp.async groups")
    copies = queue("cp.async")
    copies.open = [op for op in copies.open if op not in finished]
    agent.warps.meet()


# -- wgmma
def warpgroup_mma(
    a: Any,
    b: MemoryView,
    acc: Tensor,
    *,
    use_acc: Any = True,
    is_async: Any = False,
    **_: Any,
) -> Tensor:
    """acc + a @ b on the tensor cores; every call is one group of the wgmma queue."""
    agent = current()
    if agent.num_warps % 4:
        raise ValueError(f"wgmma needs whole warp-groups, {agent.name} has {agent.num_warps} warps")
    left = a.value if isinstance(a, Tensor) else None
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    if depth != b.shape[0] or [rows, columns] != acc.shape:
        raise ValueError(f"wgmma of {a.shape} and {b.shape} into {acc.shape}")
    out = Tensor(np.full((rows, columns), np.nan, np.float32), acc.dtype, acc.split, acc.layout)
    keep = bool(raw(use_acc))
    work = rows * columns * depth * b.dtype.itemsize / 2  # 8-bit operands twice as fast
    op = AsyncOp(agent, "mma", f"wgmma with {b.label}", work)

    bits = agent.scheduler.fp8_bits if b.dtype.itemsize == 1 else 0

    def run() -> None:
        lhs, rhs = left if left is not None else a.read_values(), b.read_values()
        before = acc.data if keep else np.zeros_like(acc.data)
        if bits:
            out.data = fp8_sums.add_products(lhs, rhs, before, bits)
        else:
            out.data = dtypes.matmul(lhs, rhs) + before

    op.run = run
    out.pending = op
    queue("wgmma").issue(op, reads=[b] if left is not None else [a, b])
    if not bool(is_async):
        return warpgroup_mma_wait(0, (out,))  # type: ignore[no-any-return]
    agent.yield_()
    return out


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] | None = None) -> Any:
    """Wait until at most `num_outstanding` groups are in flight; returns `deps`."""
    agent = current()
    for op in queue("wgmma").wait(int(num_outstanding), "wgmma"):
        for access in op.accesses:
            access.epoch = agent.warps.barriers
        agent.warps.unmet = True
    kept = tuple(deps or ())
    return kept[0] if len(kept) == 1 else kept


def warpgroup_mma_init(value: Tensor) -> Tensor:
    """An accumulator from registers."""
    return value


def fence_async_shared(cluster: Any = False) -> None:
    """Make ordinary writes visible to the asynchronous proxy."""
    agent = current()
    agent.clock.fence(agent.component)


def cluster_barrier(relaxed: Any = False) -> None:
    """All threads of the cluster meet."""
    agent = current()
    agent.warps.meet()
    agent.cta.cluster.sync(agent)


MBARRIER = Namespace(
    init=init,
    invalidate=invalidate,
    wait=wait,
    arrive=arrive,
    expect=expect,
    allocate_mbarrier=allocate_mbarrier,
    MBarrierLayout=layouts.MBarrierLayout,
)
TMA = Namespace(
    async_copy_global_to_shared=tma_load,
    async_load=tma_load,
    async_copy_shared_to_global=tma_store,
    async_store=tma_store,
    store_wait=store_wait,
    make_tensor_descriptor=make_tensor_descriptor,
    tensor_descriptor=Descriptor,
)
ASYNC_COPY = Namespace(
    async_copy_global_to_shared=cp_async,
    async_load=cp_async,
    mbarrier_arrive=cp_async_arrive,
    commit_group=commit_group,
    wait_group=wait_group,
)
CLUSTER = Namespace(barrier=cluster_barrier)
AMPERE = Namespace(async_copy=ASYNC_COPY, mbarrier=MBARRIER)
HOPPER = Namespace(
    async_copy=ASYNC_COPY,
    mbarrier=MBARRIER,
    tma=TMA,
    cluster=CLUSTER,
    fence_async_shared=fence_async_shared,
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
    warpgroup_mma_init=warpgroup_mma_init,
)
