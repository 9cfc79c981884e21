"""Blackwell: tensor memory, tcgen05 (MMA, scaled MMA, copy, commit; 1 and 2 CTAs), TMA gather4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gluon_sim.errors import Unsupported
from gluon_sim.language import hopper
from gluon_sim.language.namespace import Namespace, require_default
from gluon_sim.machine.async_units import AsyncOp, queue
from gluon_sim.machine.clocks import Clock
from gluon_sim.machine.context import current
from gluon_sim.memory.global_memory import Descriptor
from gluon_sim.memory.views import MemoryView, SplitLayout
from gluon_sim.values import dtypes, layouts
from gluon_sim.values.dtypes import Array, DType
from gluon_sim.values.tensors import Tensor, raw


def allocate_tensor_memory(
    element_ty: DType, shape: Sequence[Any], layout: Any = None, value: Tensor | None = None
) -> MemoryView:
    """New tensor memory: rows are lanes, columns are 32 bits wide."""
    agent = current()
    view = agent.cta.cluster.allocate(agent, "tensor", element_ty, shape, layout)
    if value is not None:
        view.store(value)
    return view


def get_tmem_reg_layout(*args: Any, cga_layout: Any = (), **_: Any) -> Any:
    """Register layouts are not modeled; the cluster split is kept."""
    bases = [list(basis) for basis in cga_layout]
    return layouts.DistributedLinearLayout([], [], [], bases, args[1] if len(args) > 1 else None)


def tmem_reg_layout(element_ty: DType, shape: Any, layout: Any, num_warps: Any) -> SplitLayout:
    """The split of a layout of tensor memory: a stand-in for kernels' own functions."""
    return SplitLayout(layouts.split_axis(layout))


# -- the tcgen05 pipe: operations of one partition run in issue order
def _pair(acc: MemoryView) -> bool:
    """Whether an MMA spans both CTAs of the cluster."""
    return current().cta.cluster.size > 1 and bool(getattr(acc.layout, "two_ctas", False))


def _leads(paired: bool) -> bool:
    """Whether the running CTA issues; of a pair only CTA 0 does.

    Before pair barriers existed, both CTAs waited for their own copies, so the compiler puts a
    cluster barrier in front of every paired operation.
    """
    agent = current()
    if not paired:
        return True
    if not agent.cta.cluster.machine.pair_barriers:
        agent.cta.cluster.sync(agent)
    return agent.cta.rank == 0


def _commit(barriers: Sequence[MemoryView], paired: bool) -> None:
    """Arrive on the barriers when everything this partition gave to the pipe has finished."""
    agent = current()
    pipe = queue("tcgen05")
    cluster = agent.cta.cluster
    op = AsyncOp(agent, "mma", "tcgen05 commit", 0)
    op.paired = paired
    done = Clock()
    for issued in pipe.open:
        done.join(issued.completion)
    pipe.covered.join(done)
    covered = pipe.covered.copy()
    for view in barriers:
        both = paired and not cluster.shared_by_pair(view)
        for rank in range(cluster.size) if both else [agent.cta.rank]:
            barrier = cluster.barrier(view, rank)
            op.on_done.append(
                lambda b=barrier: b.arrive(  # type: ignore[misc]
                    covered, 1, "tcgen05 commit", op.finish_time, op.report
                )
            )
    pipe.issue(op)
    pipe.open = []
    agent.yield_()


def _issue_mma(
    a: MemoryView,
    b: MemoryView,
    acc: MemoryView,
    keep: bool,
    scales: tuple[MemoryView, MemoryView] | None = None,
) -> None:
    agent = current()
    paired = _pair(acc)
    views = [a, b, acc] if paired else [a.part(), b.part(), acc.part()]
    left, right, out = views
    rows, depth, columns = left.shape[0], left.shape[1], right.shape[1]
    if depth != right.shape[0] or (rows, columns) != tuple(out.shape):
        raise ValueError(f"tcgen05_mma of {left.shape} and {right.shape} into {out.shape}")
    # Twice as fast as wgmma, and twice as fast again for 8-bit operands. 64 rows of one CTA take as
    # long as 128: they use half of the lanes. A pair's CTAs compute half of the rows each.
    busy = rows // 2 if paired else max(rows, 128)
    work = busy * depth * columns * left.dtype.itemsize / 4
    op = AsyncOp(agent, "mma", f"tcgen05 MMA into {acc.label}", work)

    def run() -> None:
        lhs, rhs = left.read_values(), right.read_values()
        if scales is not None:
            lhs = lhs * _expand(scales[0].read_values(), depth)
            rhs = rhs * _expand(scales[1].read_values(), depth).T
        product = dtypes.matmul(lhs, rhs)
        out.write_bits(out.dtype.encode(product + out.read_values() if keep else product))

    op.run = run
    op.paired = paired
    agent.cta.cluster.paired_products |= paired
    reads = [left, right, *(scales or ()), *([out] if keep else [])]
    queue("tcgen05").issue(op, reads=reads, writes=[out])


def _expand(exponents: Array, depth: int) -> Array:
    """E8M0 scales, one per 32 elements of the depth, as factors per element."""
    factors = np.exp2(exponents.astype(np.float32) - 127)
    return np.repeat(factors, depth // exponents.shape[1], axis=1)


def tcgen05_mma(
    a: MemoryView,
    b: MemoryView,
    acc: MemoryView,
    *,
    use_acc: Any = True,
    pred: Any = True,
    mbarriers: Sequence[MemoryView] | None = None,
    mbarrier_preds: Sequence[Any] | None = None,
    multicast: Any = False,
) -> None:
    """acc = a @ b + acc in tensor memory; each barrier gets a commit."""
    require_default("multicast", multicast, False)
    if not bool(raw(pred)) or not _leads(_pair(acc)):
        return
    _issue_mma(a, b, acc, bool(raw(use_acc)))
    _signal(mbarriers, mbarrier_preds, _pair(acc))


def tcgen05_mma_scaled(
    a: MemoryView,
    b: MemoryView,
    acc: MemoryView,
    a_scale: MemoryView,
    b_scale: MemoryView,
    a_type: str,
    b_type: str,
    *,
    use_acc: Any = True,
    pred: Any = True,
    mbarriers: Sequence[MemoryView] | None = None,
    mbarrier_preds: Sequence[Any] | None = None,
    multicast: Any = False,
) -> None:
    """An MMA with one E8M0 scale per 32 elements of the depth."""
    require_default("multicast", multicast, False)
    if "e2m1" in (a_type, b_type):
        raise Unsupported("the simulator does not model fp4 operands")
    if not bool(raw(pred)) or not _leads(_pair(acc)):
        return
    _issue_mma(a, b, acc, bool(raw(use_acc)), (a_scale, b_scale))
    _signal(mbarriers, mbarrier_preds, _pair(acc))


def _signal(
    barriers: Sequence[MemoryView] | None, preds: Sequence[Any] | None, paired: bool
) -> None:
    chosen = list(barriers or ())
    if preds is not None:
        chosen = [b for b, p in zip(chosen, preds, strict=True) if bool(raw(p))]
    if chosen:
        _commit(chosen, paired)
    else:
        current().yield_()


def tcgen05_copy(src: MemoryView, dst: MemoryView) -> None:
    """Copy shared memory to tensor memory, in order with the MMAs of this partition.

    In a cluster every CTA copies its own part.
    """
    agent = current()
    if agent.cta.cluster.paired_products:
        raise Unsupported("the simulator does not model tcgen05_copy beside two-CTA products")
    source, target = src.part(), dst.part()
    op = AsyncOp(agent, "mma", f"tcgen05 copy to {dst.label}", source.nbytes)
    op.run = lambda: target.write_bits(source.array().reshape(target.shape))
    queue("tcgen05").issue(op, reads=[source], writes=[target])
    agent.yield_()


def tcgen05_commit(barrier: MemoryView, pred: Any = True, descs: Sequence[Any] = ()) -> None:
    """Arrive on `barrier` when all earlier tcgen05 operations of this partition have finished."""
    require_default("descs", tuple(descs), ())
    if not bool(raw(pred)):
        return
    pipe, cta = queue("tcgen05"), current().cta
    if cta.cluster.size > 1 and not pipe.open and cta.rank:
        return
    # A commit behind another one has no products of its own, and speaks for the earlier ones.
    last = pipe.open[-1:] if pipe.open else [op for op in [pipe.last] if op is not None]
    _commit([barrier], cta.cluster.size > 1 and any(op.paired for op in (*pipe.open, *last)))


# -- gather4
def async_gather(
    tensor_desc: Descriptor,
    x_offsets: Tensor,
    y_offset: Any,
    barrier: MemoryView,
    result: MemoryView,
    pred: Any = True,
    multicast: Any = False,
    **_: Any,
) -> None:
    """Copy rows `x_offsets`, columns from `y_offset`; rows outside the tensor become zero.

    In a cluster every CTA copies its part of `result`: some of the rows, or some of the columns.
    """
    require_default("multicast", multicast, False)
    if not bool(pred):
        return
    agent = current()
    rows, first = np.asarray(x_offsets.value), int(y_offset)
    _check_gather(tensor_desc, rows, result)
    part, rank = result.part(), agent.cta.rank
    if result.split == -2:
        rows = rows[part.shape[0] * rank :][: part.shape[0]]
    elif result.split == -1:
        first += part.shape[1] * rank
    op = AsyncOp(agent, "copy", f"TMA gather to {result.label}", part.nbytes)

    def run() -> None:
        array = tensor_desc.array
        block = np.zeros(part.shape, array.dtype)
        good = (rows >= 0) & (rows < array.shape[0])
        last = min(first + part.shape[1], array.shape[1])
        block[good, : last - first] = array[rows[good], first:last]
        part.write_bits(block)

    op.run = run
    hopper._deliver(op, barrier, part.nbytes)
    op.issue(hopper._channel(part), writes=[part], in_order=False)
    tensor_desc.touch_rows(_inside(tensor_desc, rows, first, part), "TMA gather", op)
    agent.yield_()


def async_scatter(
    tensor_desc: Descriptor, x_offsets: Tensor, y_offset: Any, src: MemoryView, **_: Any
) -> None:
    """Copy shared memory to rows `x_offsets`; rows outside the tensor are dropped."""
    agent = current()
    rows, first = np.asarray(x_offsets.value), int(y_offset)
    _check_gather(tensor_desc, rows, src)
    op = AsyncOp(agent, "copy", f"TMA scatter of {src.label}", src.nbytes)

    def run() -> None:
        array = tensor_desc.array
        good = (rows >= 0) & (rows < array.shape[0])
        last = min(first + src.shape[1], array.shape[1])
        array[rows[good], first:last] = src.array()[good, : last - first]
        tensor_desc.counts[rows[good], first:last] += 1

    op.run = run
    queue("tma store").issue(op, reads=[src])
    tensor_desc.touch_rows(_inside(tensor_desc, rows, first, src), "TMA scatter", op, write=True)
    agent.yield_()


def _inside(desc: Descriptor, rows: Array, first: int, view: MemoryView) -> list[Array]:
    """The rows and columns of a gather or scatter that the tensor has."""
    last = min(first + view.shape[1], desc.shape[1])
    return [rows[(rows >= 0) & (rows < desc.shape[0])], np.arange(first, max(first, last))]


def _check_gather(desc: Descriptor, rows: Array, view: MemoryView) -> None:
    if len(rows) != view.shape[0] or len(rows) % 4:
        raise ValueError(f"gather4 of {len(rows)} rows into {view.label} {view.shape}")
    if desc.block_shape[0] != 1 or desc.block_shape[1] != view.shape[1]:
        raise ValueError(f"gather4 needs a block of [1, {view.shape[1]}], got {desc.block_shape}")
    hopper.check_swizzle(desc, view)


TMA = Namespace(**vars(hopper.TMA), async_gather=async_gather, async_scatter=async_scatter)
BLACKWELL = Namespace(
    async_copy=hopper.ASYNC_COPY,
    mbarrier=hopper.MBARRIER,
    cluster=hopper.CLUSTER,
    fence_async_shared=hopper.fence_async_shared,
    tma=TMA,
    TensorMemoryLayout=layouts.TensorMemoryLayout,
    TensorMemoryScalesLayout=layouts.TensorMemoryScalesLayout,
    tensor_memory_descriptor=MemoryView,
    allocate_tensor_memory=allocate_tensor_memory,
    get_tmem_reg_layout=get_tmem_reg_layout,
    tmem_reg_layout=tmem_reg_layout,
    tcgen05_mma=tcgen05_mma,
    tcgen05_mma_scaled=tcgen05_mma_scaled,
    tcgen05_copy=tcgen05_copy,
    tcgen05_commit=tcgen05_commit,
)
