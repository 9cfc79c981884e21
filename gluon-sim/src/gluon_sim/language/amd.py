"""CDNA4: buffer loads, loads to LDS with wait counts, MFMA and scaled MFMA."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from gluon_sim.language.blackwell import _expand
from gluon_sim.language.core import load, store
from gluon_sim.language.hopper import _channel
from gluon_sim.language.namespace import Namespace
from gluon_sim.machine.async_units import AsyncOp, queue, wait_for_all
from gluon_sim.machine.context import current
from gluon_sim.memory.views import MemoryView
from gluon_sim.values import dtypes, layouts
from gluon_sim.values.tensors import Pointer, Tensor, raw


def buffer_load(
    ptr: Pointer, offsets: Tensor, mask: Any = None, other: Any = None, **_: Any
) -> Tensor:
    """Load through a scalar base and 32-bit offsets."""
    loaded = load(ptr + offsets, mask, other)
    loaded.layout = offsets.layout
    return loaded


def buffer_store(
    stored_value: Tensor, ptr: Pointer, offsets: Tensor, mask: Any = None, **_: Any
) -> None:
    """Store through a scalar base and 32-bit offsets."""
    store(ptr + offsets, stored_value, mask)


# -- asynchronous loads to LDS
def global_load_to_shared(
    dest: MemoryView, ptr: Pointer, mask: Any = None, other: Any = None, **_: Any
) -> None:
    """Copy elements to LDS; finished only after a `wait_group` that covers it.

    Masked elements become `other`, or stay as they were where there is none.
    """
    agent = current()
    if list(dest.shape) != list(np.broadcast_shapes(np.shape(ptr.offset), np.shape(raw(mask)))):
        raise ValueError(f"{dest.label} {dest.shape} does not match the offsets {ptr.shape}")
    position, where = ptr.buffer.resolve(ptr, raw(mask), "load to LDS")
    fill = dest.dtype.encode(np.asarray(0 if other is None else raw(other), np.float32))
    op = AsyncOp(agent, "copy", f"load to LDS {dest.label}", dest.nbytes)

    def run() -> None:
        bits = ptr.buffer.flat[position]
        if where is None:
            dest.write_bits(bits)
        elif other is None:
            dest.write_bits(bits, where)
        else:
            dest.write_bits(np.where(where, bits, fill))

    op.run = run
    pending = queue("lds")
    op.after = (pending.last,) if pending.last is not None and not pending.last.done else ()
    op.issue(_channel(dest), writes=[dest], in_order=False)
    ptr.buffer.touch(position, where, "load to LDS", by=op)
    pending.last = op
    pending.open.append(op)
    agent.yield_()


def buffer_load_to_shared(
    dest: MemoryView, ptr: Pointer, offsets: Tensor, mask: Any = None, other: Any = None, **_: Any
) -> None:
    """`global_load_to_shared` through a scalar base and 32-bit offsets; masked elements become
    zeros where there is no `other`, as loads past the end of a buffer do."""
    global_load_to_shared(dest, ptr + offsets, mask, 0.0 if other is None else other)


def commit_group() -> None:
    """Close a group: `wait_group` counts groups."""
    agent = current()
    pending = queue("lds")
    agent.queues.setdefault("lds groups", []).append(pending.open)
    pending.open = []


def wait_group(num_outstanding: Any = 0) -> None:
    """Wait until at most `num_outstanding` groups are in flight (0 also waits for the rest)."""
    agent = current()
    groups = agent.queues.setdefault("lds groups", [])
    keep = max(len(groups) - int(num_outstanding), 0)
    finished: list[AsyncOp] = [op for group in groups[:keep] for op in group]
    agent.queues["lds groups"] = groups[keep:]
    if int(num_outstanding) == 0:
        pending = queue("lds")
        finished += pending.open
        pending.open = []
    wait_for_all(agent, finished, "loads to LDS")


def load_shared_relaxed(smem: MemoryView, layout: Any = None) -> Tensor:
    """A load that trusts the wait before it; here every load is checked alike."""
    return smem.load(layout)


# -- matrix cores
def mfma(a: Tensor, b: Tensor, acc: Tensor, **_: Any) -> Tensor:
    """acc + a @ b, in registers."""
    if a.dtype != b.dtype and 16 in (a.dtype.bits, b.dtype.bits):  # as Triton
        raise ValueError(f"product of {a.dtype} and {b.dtype}")
    current().charge(a.numel * b.shape[1], "mma")
    data = dtypes.matmul(a.value, b.value) + acc.value
    return Tensor(acc.dtype.round(data), acc.dtype, acc.split, acc.layout)


def mfma_scaled(
    a: Tensor,
    a_scale: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_format: str,
    acc: Tensor,
    **_: Any,
) -> Tensor:
    """`mfma` with one E8M0 scale per 32 elements of the depth of each operand."""
    if "e2m1" in (a_format, b_format):
        raise NotImplementedError("fp4 operands are not modeled")
    lhs, rhs, depth = a.value, b.value, a.shape[1]
    if a_scale is not None:
        lhs = lhs * _expand(a_scale.value, depth)
    if b_scale is not None:
        rhs = rhs * _expand(b_scale.value, depth).T
    current().charge(a.numel * b.shape[1] / 2, "mma")
    data = dtypes.matmul(lhs, rhs) + acc.value
    return Tensor(acc.dtype.round(data), acc.dtype, acc.split, acc.layout)


def get_mfma_scale_layout(*_: Any, **__: Any) -> None:
    """Layouts are not modeled."""


class warp_pipeline_stage:  # noqa: N801 - the language's own spelling
    """`with warp_pipeline_stage(...)`: a scheduling hint."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        return None


def sched_barrier(*_: Any, **__: Any) -> None:
    """A scheduling hint."""


ASYNC_COPY = Namespace(
    global_load_to_shared=global_load_to_shared,
    buffer_load_to_shared=buffer_load_to_shared,
    commit_group=commit_group,
    wait_group=wait_group,
    load_shared_relaxed=load_shared_relaxed,
)
CDNA4 = Namespace(
    async_copy=ASYNC_COPY,
    buffer_load=buffer_load,
    buffer_store=buffer_store,
    mfma=mfma,
    mfma_scaled=mfma_scaled,
    get_mfma_scale_layout=get_mfma_scale_layout,
)
HINT = Namespace(sched_barrier=sched_barrier)
AMD = Namespace(
    cdna3=CDNA4,
    cdna4=CDNA4,
    hint=HINT,
    AMDMFMALayout=layouts.AMDMFMALayout,
    warp_pipeline_stage=warp_pipeline_stage,
)
__all__: Sequence[str] = ("AMD", "ASYNC_COPY", "CDNA4", "HINT")
