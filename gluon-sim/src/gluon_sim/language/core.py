"""Memory, programs and partitions: the part of the language that touches the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gluon_sim.language.asm import inline_asm_elementwise
from gluon_sim.machine.context import current
from gluon_sim.machine.scheduler import Agent
from gluon_sim.memory.views import MemoryView
from gluon_sim.report.findings import Kind
from gluon_sim.values import dtypes
from gluon_sim.values.dtypes import DType
from gluon_sim.values.tensors import Pointer, Tensor, raw, scalar


# -- programs
def program_id(axis: Any = 0) -> Tensor:
    """Index of the running program; both CTAs of a cluster have the same."""
    return scalar(current().cta.cluster.program[int(axis)])


def num_programs(axis: Any = 0) -> Tensor:
    """Extent of the grid."""
    return scalar(current().cta.cluster.machine.grid[int(axis)])


def num_warps() -> int:
    """Warps of the running partition."""
    return current().num_warps


def num_ctas() -> int:
    """CTAs per cluster."""
    return current().cta.cluster.size


# -- memory
def allocate_shared_memory(
    element_ty: DType, shape: Sequence[Any], layout: Any = None, value: Tensor | None = None
) -> MemoryView:
    """New shared memory; nothing has written it yet, unless `value` is given."""
    agent = current()
    view = agent.cta.cluster.allocate(agent, "shared", element_ty, shape, layout)
    if value is not None:
        view.store(value)
    return view


def own_part(pointer: Pointer, values: Any, mask: Any) -> tuple[Pointer, Any, Any]:
    """In a cluster, restrict a store to the half of the tensor that this CTA holds."""
    agent = current()
    axis = pointer.split
    if axis is None and isinstance(values, Tensor):
        axis = values.split
    data = values.value if isinstance(values, Tensor) else values
    if agent.cta.cluster.size == 1:
        return pointer, data, mask
    if axis is None:  # replicated: both CTAs hold the same value, one of them stores
        return pointer, data, np.asarray(agent.cta.rank == 0) & (True if mask is None else mask)
    shape = np.broadcast_shapes(np.shape(pointer.offset), np.shape(data), np.shape(mask))
    length = shape[axis]
    index = np.arange(length) // (length // 2) == agent.cta.rank
    mine = index.reshape([-1] + [1] * (-axis - 1))
    return pointer, data, mine if mask is None else mine & mask


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
    """Read global memory into registers."""
    agent = current()
    values = pointer.buffer.load(pointer, raw(mask), raw(other))
    agent.charge(np.size(values), "global")
    return Tensor(values[()], pointer.buffer.dtype, pointer.split)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    """Write registers to global memory."""
    agent = current()
    pointer, data, where = own_part(pointer, value, raw(mask))
    pointer.buffer.store(pointer, data, where)
    agent.charge(np.size(pointer.offset), "global")


def _atomic(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def apply(
        pointer: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel", **_: Any
    ) -> Tensor:
        agent = current()
        agent.yield_()
        buffer = pointer.buffer
        position, where = buffer.resolve(pointer, raw(mask), "atomic")
        buffer.touch_atomically(position, where, hands_on=sem != "relaxed")
        on = np.ones(np.shape(position), bool) if where is None else np.asarray(where)
        operand = np.broadcast_to(np.asarray(raw(value)), np.shape(position))
        old = np.zeros(np.shape(position), buffer.dtype.register)
        for i in np.ndindex(np.shape(position)):  # one by one: lanes may hit the same address
            if on[i]:
                at = int(np.asarray(position)[i])
                before = buffer.dtype.decode(np.asarray(buffer.flat[at]))
                old[i] = before
                buffer.flat[at] = buffer.dtype.encode(np.asarray(function(before, operand[i])))
        return Tensor(old[()], buffer.dtype)

    return apply


def atomic_cas(pointer: Pointer, compare: Any, value: Any, **_: Any) -> Tensor:
    """Compare and swap of one element."""
    wanted, new = raw(compare), raw(value)
    swap = _atomic(lambda old, _: new if old == wanted else old)
    return swap(pointer, value)


# -- control
def static_assert(condition: Any, message: str = "") -> None:
    """Compile-time assertion."""
    if not bool(raw(condition)):
        raise AssertionError(message or "static_assert")


def device_assert(condition: Any, message: str = "", **_: Any) -> None:
    """Runtime assertion: a failure is a finding."""
    if not np.all(raw(condition)):
        current().report(Kind.ERROR, f"device_assert failed: {message}")


def nothing(*_: Any, **__: Any) -> None:
    """Printing and hints."""


def thread_barrier(*, cluster: bool = False) -> None:
    """A barrier of the partition's own threads (or, with `cluster`, of all CTAs)."""
    agent = current()
    agent.warps.meet()
    if cluster:
        agent.cta.cluster.sync(agent)


def warp_specialize(
    functions_and_args: Sequence[tuple[Callable[..., Any], Sequence[Any]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> Any:
    """Run the partitions side by side; the first one keeps the parent's warps."""
    parent = current()
    warps = [parent.num_warps, *(int(w) for w in worker_num_warps)]
    if len(warps) != len(functions_and_args):
        raise ValueError(f"{len(functions_and_args)} partitions, {len(warps)} warp counts")
    parent.cta.specialize(len(worker_num_warps))
    parent.clock.tick(parent.component)
    names = [f.__name__ for f, _ in functions_and_args]
    children = []
    for i, ((function, args), count) in enumerate(zip(functions_and_args, warps, strict=True)):
        name = names[i] if names.count(names[i]) == 1 else f"{names[i]}#{i}"
        child = Agent(parent.scheduler, parent.cta, name, count)
        child.clock.join(parent.clock)
        child.time = parent.time
        children.append(child)
        child.start(_body(function, tuple(args)))
    parent.scheduler.agents.extend(children)
    parent.wait(
        lambda: all(c.done for c in children),
        lambda: "its partitions to end",
        lambda: max(c.time for c in children),
    )
    for child in children:
        parent.clock.join(child.clock)
    return children[0].result


def _body(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


NAMES: dict[str, Any] = {
    "program_id": program_id,
    "num_programs": num_programs,
    "num_warps": num_warps,
    "num_ctas": num_ctas,
    "shared_memory_descriptor": MemoryView,
    "allocate_shared_memory": allocate_shared_memory,
    "load": load,
    "store": store,
    "atomic_add": _atomic(lambda old, new: old + new),
    "atomic_max": _atomic(np.maximum),
    "atomic_min": _atomic(np.minimum),
    "atomic_and": _atomic(lambda old, new: old & new),
    "atomic_or": _atomic(lambda old, new: old | new),
    "atomic_xor": _atomic(lambda old, new: old ^ new),
    "atomic_xchg": _atomic(lambda old, new: new),
    "atomic_cas": atomic_cas,
    "inline_asm_elementwise": inline_asm_elementwise,
    "static_assert": static_assert,
    "static_print": nothing,
    "device_print": nothing,
    "device_assert": device_assert,
    "assume": nothing,
    "thread_barrier": thread_barrier,
    "barrier": thread_barrier,
    "warp_specialize": warp_specialize,
    "void": dtypes.int32,
}
