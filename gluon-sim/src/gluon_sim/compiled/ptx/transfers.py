"""Loads, stores and copies of lanes: global and shared memory, ldmatrix, cp.async."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.block import COPIED, SHARED_BASE
from gluon_sim.compiled.ptx.operands import DTYPES, SIZES, Form, elements
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import COPIES, WORD, words
from gluon_sim.compiled.ptx.state import OFFSET, RANK_SHIFT, Warp
from gluon_sim.compiled.ptx.units import tma


def space(form: Form) -> str:
    """The memory that an instruction names."""
    for part in form.parts:
        name = part.split("::")[0]
        if name in ("shared", "global", "param"):
            return name
    raise form.unknown()


def shared_index(w: Warp, addresses: Array, size: int) -> Array:
    """Bytes [active lanes, size] of the warp's own block."""
    active = addresses if w.full else addresses[w.mask]
    at = active & OFFSET
    if ((active >> RANK_SHIFT) != w.block.rank).any():
        raise Fault(Kind.BOUNDS, "access to the shared memory of another block")
    if (at % size).any():
        raise Fault(Kind.ALIGNMENT, f"{size} bytes at shared address {int(at.max()):#x}")
    if (at < SHARED_BASE).any() or (at + size > w.block.size).any():
        raise Fault(Kind.BOUNDS, f"shared bytes {int(at.min()):#x} to {int(at.max()) + size:#x}")
    index: Array = at[:, None] + np.arange(size)
    return index


def global_addresses(w: Warp, addresses: Array, size: int) -> Array:
    """Addresses of the active lanes."""
    active = addresses if w.full else addresses[w.mask]
    if (active % np.uint64(size)).any():
        raise Fault(Kind.ALIGNMENT, f"{size} bytes at global address {int(active[0]):#x}")
    return active


def _load(form: Form) -> Run:
    where, names, kind = space(form), elements(form.operands[0]), form.type
    writes = [form.writer(name, kind) for name in names]
    size, dtype = SIZES[kind] * len(names), DTYPES[kind]
    if where == "param":
        return _load_parameter(form, writes, dtype)
    address = form.address(1)

    def run(w: Warp) -> None:
        if where == "shared":
            at = shared_index(w, address(w), size)
            w.block.races.read(words(at), w.event(), "a load")
            raw = w.block.shared[at]
        else:
            at = global_addresses(w, address(w), size)
            raw = w.cluster.memory.load(at, size, w.clocks.ended(w.event()))
        values = raw.view(dtype).reshape(-1, len(names))
        for i, write in enumerate(writes):
            if w.full:
                write(w, values[:, i])
            else:
                spread = np.zeros(32, dtype)
                spread[w.mask] = values[:, i]
                write(w, spread)

    return run


def _load_parameter(
    form: Form, writes: list[Callable[[Warp, Array], None]], dtype: type[np.generic]
) -> Run:
    found = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", form.operands[1])
    if found is None:
        raise form.unknown()
    name, offset = found[1], int(found[2] or 0)

    def run(w: Warp) -> None:
        raw = w.cluster.launch.parameters[name]
        for write, value in zip(
            writes, np.frombuffer(raw, dtype, len(writes), offset), strict=True
        ):
            write(w, np.full(32, value))

    return run


def _changed(w: Warp, at: Array, data: Array) -> Array:
    """Words that a store changes: warps may write the same value, as the compiler has them do."""
    cells = words(at)
    step = min(WORD, at.shape[1])
    same = (w.block.shared[at] == data).reshape(len(cells), step).all(axis=1)
    changed: Array = cells[~(same & w.block.races.touched(cells))]
    return changed


def _store(form: Form) -> Run:
    where, names, kind = space(form), elements(form.operands[1]), form.type
    reads, address = [form.reader(name, kind) for name in names], form.address(0)
    size = SIZES[kind] * len(names)

    def run(w: Warp) -> None:
        data = np.stack([read(w) for read in reads], 1).view(np.uint8).reshape(32, size)
        data = data if w.full else data[w.mask]
        if where == "shared":
            at = shared_index(w, address(w), size)
            if size < WORD:
                apart = w.block.beside(at)
                w.block.races.write(words(at[apart]), w.event(), "a store", beside=True)
                w.block.races.write(_changed(w, at[~apart], data[~apart]), w.event(), "a store")
            else:
                w.block.races.write(_changed(w, at, data), w.event(), "a store")
            w.block.store(at, data)
            return
        at = global_addresses(w, address(w), size)
        if w.cluster.memory.store(at, data, w.clocks.ended(w.event())):
            w.cluster.log.note("global bytes were written twice")

    return run


def _atomic(form: Form) -> Run:
    """Lane by lane. The result goes nowhere for `red`."""
    result = form.parts[0] == "atom"
    functions: dict[str, Callable[[int, int], int]] = {
        "add": lambda old, new: old + new,
        "max": max,
        "min": min,
        "or": lambda old, new: old | new,
        "and": lambda old, new: old & new,
        "exch": lambda old, new: new,
    }
    name = next((part for part in form.parts if part in functions), "")
    where = space(form)
    if not name or form.type not in ("u32", "s32") or form.operands[-1].startswith("{"):
        raise form.unknown()
    change, kind = functions[name], form.type
    write = form.write() if result else None
    address, value = form.address(int(result)), form.read(1 + int(result))

    def run(w: Warp) -> None:
        addresses, values, old = address(w), value(w), np.zeros(32, DTYPES[kind])
        for lane in w.active():
            at = addresses[lane : lane + 1]
            index = (at.astype(np.int64) & OFFSET)[:, None] + np.arange(4)
            if where == "shared":
                w.block.check(int(index[0, 0]), 4, "atomic")
            memory, ended = w.cluster.memory, w.clocks.ended(w.event())
            raw = w.block.shared[index] if where == "shared" else memory.load(at, 4, ended, True)
            old[lane] = raw.view(DTYPES[kind])[0, 0]
            new = change(int(old[lane]), int(values[lane])) & MASK32
            data = np.frombuffer(new.to_bytes(4, "little"), np.uint8)[None]
            if where == "shared":
                w.block.store(index, data)
            else:
                memory.store(at, data, ended, atomic=True)
        if write:
            write(w, old)

    return run


def _matrix(form: Form) -> Run:
    """ldmatrix and stmatrix: 8x8 tiles of 16 bits, one row of 16 bytes per lane's address."""
    loads, transposed = form.parts[0] == "ldmatrix", form.has("trans")
    names = elements(form.operands[0 if loads else 1])
    address = form.address(1 if loads else 0)
    if not form.has("m8n8") or not form.has("b16"):
        raise form.unknown()
    writes = [form.writer(name, "u32") for name in names] if loads else []
    reads = [] if loads else [form.reader(name, "u32") for name in names]

    def rows(w: Warp, number: int) -> Array:
        w.together(form.parts[0])
        at = address(w)[8 * number : 8 * number + 8] & OFFSET
        if (at % 16).any():
            raise Fault(Kind.ALIGNMENT, f"{form.parts[0]} at {int(at.max()):#x}")
        w.block.check(int(at.min()), 16, form.parts[0])
        w.block.check(int(at.max()), 16, form.parts[0])
        index: Array = at[:, None] + np.arange(16)
        return index

    def load(w: Warp) -> None:
        for number, write in enumerate(writes):
            at = rows(w, number)
            w.block.races.read(words(at), w.event(), "ldmatrix")
            tile = w.block.shared[at].view(np.uint16)
            tile = np.ascontiguousarray(tile.T if transposed else tile)
            write(w, tile.reshape(32, 2).view(np.uint32).reshape(32))

    def store(w: Warp) -> None:
        for number, read in enumerate(reads):
            tile = np.ascontiguousarray(read(w)).view(np.uint16).reshape(8, 8)
            tile = np.ascontiguousarray(tile.T if transposed else tile)
            at = rows(w, number)
            raw = tile.view(np.uint8).reshape(8, 16)
            w.block.races.write(_changed(w, at, raw), w.event(), "stmatrix")
            w.block.store(at, raw)

    return load if loads else store


def _cp(form: Form) -> Run:
    if form.op.startswith("cp.async.bulk.tensor"):
        return tma.tensor_copy(form)
    kind = "bulk" if form.has("bulk") else "cp.async"
    if form.has("commit_group"):
        return lambda w: w.commit(kind)
    if form.has("wait_group"):
        left = int(form.operands[0])
        return lambda w: w.wait(kind, left)
    if form.has("wait_all"):

        def wait_all(w: Warp) -> None:
            w.commit(kind)
            w.wait(kind, 0)

        return wait_all
    if kind == "bulk":
        raise form.unknown()
    return _arrival(form) if form.has("mbarrier") else _copy(form)


def _arrival(form: Form) -> Run:
    """An arrival of every lane once its copies so far are complete.

    With .noinc the barrier's count includes it; without, the phase waits for that many more.
    """
    address, counted = form.address(0), form.has("noinc")

    def run(w: Warp) -> None:
        block, at = w.cluster.place(w.one(address(w)))
        lanes = len(w.active())
        if w.first_copy is not None:
            block.trace_copy(at, w.first_copy)
            w.first_copy = None
        barrier = block.barrier(at, w.event())
        if not counted:
            barrier.pending += lanes
        told = w.clocks.tell(w.number)
        w.clocks.add_work(told, w.number, COPIES)
        groups = (*w.groups["cp.async"], w.open["cp.async"])
        copies = [work for group in groups for work in group if not work.done]

        def arrive() -> None:
            for copy in copies:
                copy.finish()
            block.arrive(at, lanes, told)

        w.cluster.engine.issue(Pending("arrival", arrive, w))

    return run


def _copy(form: Form) -> Run:
    """cp.async: bytes past the source size arrive as zeros; what is not read is not checked."""
    target, source, size = form.address(0), form.address(1), int(form.operands[2], 0)
    given = form.read(3, "u32") if len(form.operands) > 3 else None

    def run(w: Warp) -> None:
        at = shared_index(w, target(w), size)
        addresses = global_addresses(w, source(w), size)
        lengths = given(w)[w.mask].astype(np.int64) if given else np.full(len(at), size)
        if (lengths > size).any():
            raise Fault(Kind.BOUNDS, f"cp.async of {int(lengths.max())} bytes into {size}")
        data = np.zeros((len(at), size), np.uint8)
        for length in set(lengths.tolist()) - {0}:
            chosen = lengths == length
            data[chosen, :length] = w.cluster.memory.load(
                addresses[chosen], length, w.clocks.ended(w.event())
            )
        block, poison = w.block, w.cluster.engine.schedule.poison_byte
        block.store(at, np.full_like(data, poison), COPIED)
        event = w.clocks.start(w.number, COPIES)
        block.races.write(words(at), event, "cp.async")
        work = Pending("cp.async", lambda: block.store(at, data, COPIED), w, event.time)
        w.issue("cp.async", work)
        w.first_copy = w.first_copy or (w.where(), block.products)
        if w.cluster.engine.early(copy=True):
            work.finish()

    return run


BUILDERS: dict[str, Callable[[Form], Run]] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": _cp,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
}
