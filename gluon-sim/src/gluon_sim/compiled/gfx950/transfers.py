"""Global memory: loads, stores, and copies straight to LDS."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.gfx950 import lds
from gluon_sim.compiled.gfx950.operands import Form, Run, pair, registers
from gluon_sim.compiled.gfx950.state import LANES, M0, Access, Wave

_SIZES = {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
    "ubyte": 1,
    "ushort": 2,
    "short": 2,
    "byte": 1,
}
_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "global_atomic_add": lambda old, new: old + new,
    "global_atomic_and": lambda old, new: old & new,
    "global_atomic_or": lambda old, new: old | new,
}
_UPPER = "_d16_hi"
"""A store of this kind takes the upper half of its register."""
_LDS_LIMIT = 0x3FFFF

Place = Callable[[Wave], tuple[Array, Array]]
"""Addresses of all lanes, and which of them are inside of the buffer."""


def build(form: Form) -> Run | None:
    """What an access to global memory does; None if the instruction is none."""
    parts = form.op.removesuffix(_UPPER).split("_")
    if parts[0] == "scratch" and parts[-1] in _SIZES and parts[1] in ("load", "store"):
        return _scratch(form, _SIZES[parts[-1]])
    if form.op in _ATOMICS:
        return _atomic(form)
    if parts[0] not in ("global", "buffer") or parts[1] not in ("load", "store"):
        return None
    into_lds = "lds" in parts or "lds" in form.modifiers
    if parts[-1] not in _SIZES:
        raise form.unknown()
    size = _SIZES[parts[-1]]
    if parts[1] == "store":
        return _store(form, size)
    if form.op.endswith(_UPPER):
        raise form.unknown()
    return _copy(form, size) if into_lds else _load(form, size)


def _place(form: Form, size: int, first: int) -> Place:
    """Addresses from the operands that begin at `first`."""
    offset = form.number("offset")
    if form.op.startswith("buffer"):
        return _buffer(form, size, first)
    form.allow("offset", "nt", "sc0", "sc1", "lds")
    inside = np.ones(64, bool)
    if form.operands[first + 1] == "off":
        at = form.vector(first, 2)
        return lambda w: (pair(w, at).view(np.int64) + offset, inside)
    step, base = form.vector(first), form.scalars(first + 1, 2)
    return lambda w: (w.v[step].astype(np.int64) + (w.get64(base) + offset), inside)


def _buffer(form: Form, size: int, first: int) -> Place:
    """A raw buffer: lanes whose last byte lies past its size are out of range."""
    form.allow("offset", "offen", "lds", "nt", "sc0", "sc1")
    offset = form.number("offset")
    step = form.vector(first) if "offen" in form.modifiers else None
    resource, base = form.scalars(first + 1, 4), form.s32(first + 2)

    def place(w: Wave) -> tuple[Array, Array]:
        low, high, records = w.s[resource], w.s[resource + 1], w.s[resource + 2]
        if high >> 16:
            raise Fault(Kind.DESCRIPTOR, f"buffer with stride or swizzle {high:#x}")
        steps = w.v[step].astype(np.int64) if step is not None else np.zeros(64, np.int64)
        inside = steps + offset + size <= records
        w.group.log.note("lanes out of range of their buffer", int((w.mask & ~inside).sum()))
        return (low | high << 32) + base(w) + np.where(inside, steps + offset, 0), inside

    return place


def _check_alignment(addresses: Array, size: int) -> None:
    if (addresses % min(size, 4)).any():
        raise Fault(Kind.ALIGNMENT, f"{size} bytes at {int(addresses[0]):#x}")


def _read(w: Wave, place: Place, size: int) -> Array:
    """Bytes [64, size]; lanes out of range get zeros."""
    addresses, inside = place(w)
    lanes = w.mask & inside
    data = np.zeros((64, size), np.uint8)
    if lanes.any():
        _check_alignment(addresses[lanes], size)
        data[lanes] = w.group.memory.load(addresses[lanes], size)
    return data


def _load(form: Form, size: int) -> Run:
    count = max(1, size // 4)
    into, place = form.named(0, True, count), _place(form, size, 1)

    def run(w: Wave) -> None:
        mask, data = w.mask.copy(), _read(w, place, size)
        words = np.zeros((64, 4 * count), np.uint8)
        words[:, :size] = data
        w.issue(w.vector_memory, lds.arrival(w, into, words.view(np.uint32), mask))

    return run


def _scratch(form: Form, size: int) -> Run:
    """A register that did not fit: memory of each lane's own, at a fixed place."""
    form.allow("offset")
    loads, offset, count = "load" in form.op, form.number("offset"), size // 4
    if size % 4 or offset % 4 or form.operands[int(loads)] != "off" or form.operands[2] != "off":
        raise form.unknown()
    register = form.named(0, True, count) if loads else form.vector(1, count)
    places = range(offset // 4, offset // 4 + count)

    def load(w: Wave) -> None:
        missing = [place for place in places if place not in w.scratch]
        if missing:
            raise Fault(Kind.UNINITIALIZED, f"scratch byte {4 * missing[0]} was never written")
        words = np.stack([w.scratch[place] for place in places], 1)
        w.issue(w.vector_memory, lds.arrival(w, register, words, w.mask.copy()))

    def store(w: Wave) -> None:
        for number, place in enumerate(places):
            room = w.scratch.setdefault(place, np.zeros(64, np.uint32))
            np.copyto(room, w.v[register + number], where=w.mask)
        w.group.log.note("registers in scratch memory", count)
        w.issue(w.vector_memory, Access(w, lambda: None))

    return load if loads else store


def _store(form: Form, size: int) -> Run:
    """The wave's own order keeps stores; nobody else reads them during the launch."""
    count = max(1, size // 4)
    data = 0 if form.op.startswith("buffer") else 1
    source, first = form.vector(data, count), 2 * form.op.endswith(_UPPER)
    place = _place(form, size, 1) if data == 0 else _store_place(form, size)

    def run(w: Wave) -> None:
        addresses, inside = place(w)
        lanes = w.mask & inside
        if lanes.any():
            raw = np.ascontiguousarray(w.v[source : source + count].T).view(np.uint8)
            raw = raw[:, first : first + size]
            _check_alignment(addresses[lanes], size)
            if w.group.memory.store(addresses[lanes], raw[lanes]):
                w.group.log.note("global bytes were written twice")
        w.issue(w.vector_memory, Access(w, lambda: None))

    return run


def _atomic(form: Form) -> Run:
    """Lane by lane; nothing comes back."""
    change, source, place = _ATOMICS[form.op], form.vector(1), _store_place(form, 4)
    if "sc0" in form.modifiers:
        raise form.unknown()

    def run(w: Wave) -> None:
        addresses, _ = place(w)
        for lane in LANES[w.mask]:
            at = addresses[lane : lane + 1]
            _check_alignment(at, 4)
            old = int(w.group.memory.load(at, 4, atomic=True).view(np.uint32)[0, 0])
            new = change(old, int(w.v[source][lane])) & MASK32
            data = np.frombuffer(new.to_bytes(4, "little"), np.uint8)[None]
            w.group.memory.store(at, data, atomic=True)
        w.issue(w.vector_memory, Access(w, lambda: None))

    return run


def _store_place(form: Form, size: int) -> Place:
    """global_store and atomics have their data between the address and the base."""
    moved = Form(
        form.text,
        form.op,
        [form.operands[0], form.operands[2]],
        form.modifiers,
        form.reads,
        form.scalar_reads,
    )
    return _place(moved, size, 0)


def _copy(form: Form, size: int) -> Run:
    """Lane l's bytes go to M0 + offset + l * size; lanes that are off write nothing."""
    place = _place(form, size, 0)
    form.scalar_reads.append(M0)
    offset = form.number("offset")
    if registers(form.operands[0]) is None:
        raise form.unknown()

    def run(w: Wave) -> None:
        mask, data = w.mask.copy(), _read(w, place, size)
        base = w.s[M0] & _LDS_LIMIT
        if base % 4:
            raise Fault(Kind.ALIGNMENT, f"copy to LDS byte {base}")
        at = base + offset + LANES * size
        touched = lds.touched(w, at, size, mask)
        for access in w.local:
            if not access.write and access.overlaps(touched):
                w.report(Kind.RACE, "a copy to LDS over bytes that this wave still reads")
        w.issue(w.vector_memory, Access(w, lambda: lds.put(w, at, data, mask), touched, True))

    return run
