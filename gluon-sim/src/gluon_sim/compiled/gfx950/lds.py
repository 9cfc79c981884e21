"""LDS, the memory that a workgroup shares: ds_read, ds_write, and reads that transpose."""

from __future__ import annotations

import re

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.gfx950.operands import Form, Run
from gluon_sim.compiled.gfx950.state import LANES, Access, Wave

_READS = {"ds_read_u8": 1, "ds_read_u16": 2, "ds_read_b32": 4, "ds_read_b64": 8, "ds_read_b128": 16}
_WRITES = {f"ds_write_b{8 * size}": size for size in (1, 2, 4, 8, 16)}


def touched(w: Wave, at: Array, size: int, mask: Array) -> Array:
    """The bytes that active lanes access, checked."""
    active = at[mask].astype(np.int64)
    if active.size and int(active.max()) + size > len(w.group.lds):
        message = f"LDS bytes up to {int(active.max()) + size} of {len(w.group.lds)}"
        raise Fault(Kind.BOUNDS, message)
    index: Array = (active[:, None] + np.arange(size)).reshape(-1)
    return index


def get(w: Wave, at: Array, size: int, mask: Array) -> Array:
    """Bytes [64, size]; lanes that are off get zeros."""
    data = np.zeros((64, size), np.uint8)
    index = touched(w, at, size, mask)
    if not w.group.lds_written[index].all():
        first = int(index[np.argmin(w.group.lds_written[index])])
        w.report(Kind.UNINITIALIZED, f"LDS byte {first} was never written")
    data[mask] = w.group.lds[index].reshape(-1, size)
    return data


def put(w: Wave, at: Array, data: Array, mask: Array) -> None:
    """Write the bytes of active lanes."""
    index = touched(w, at, data.shape[1], mask)
    new = data[mask].reshape(-1)
    clash = w.group.races.different(index, new, w.index, w.epoch)
    if clash >= 0:
        w.report(Kind.RACE, f"LDS byte {clash} gets different values between two barriers")
    w.group.lds[index] = new
    w.group.lds_written[index] = True


def arrival(
    w: Wave, into: int, words: Array, mask: Array, lds_bytes: Array | None = None
) -> Access:
    """An access whose words [64, n] arrive in registers; the words may be computed later."""
    count = words.shape[1]

    def arrive() -> None:
        for i in range(count):
            w.v[into + i][mask] = words[mask, i]
            w.mark(into + i, mask, True)

    return Access(w, arrive, lds_bytes, into=range(into, into + count))


def build(form: Form) -> Run | None:
    """What an LDS instruction does; None if it is none."""
    op = form.op
    transposed = re.fullmatch(r"ds_read_b64_tr_b(8|16)", op)
    if op in _WRITES:
        return _write(form, _WRITES[op], [form.number("offset")])
    if op in _READS:
        return _read(form, _READS[op], [form.number("offset")])
    two = re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", op)
    if two:
        size = int(two[3]) // 8
        unit = 64 * size if two[2] else size
        offsets = [unit * form.number("offset0"), unit * form.number("offset1")]
        return (_read if two[1] == "read" else _write)(form, size, offsets)
    if op == "ds_bpermute_b32":
        return _pull(form)
    if op == "ds_permute_b32":
        return _push(form)
    if transposed:
        return _read(form, 8, [form.number("offset")], int(transposed[1]) // 8)
    return None


def _pull(form: Form) -> Run:
    """ds_bpermute: every lane gets the value of the lane that it names; no LDS is touched."""
    form.allow("offset")
    into, source, data = form.named(0, True, 1), form.vector(1), form.vector(2)
    offset = form.number("offset")

    def run(w: Wave) -> None:
        lanes = ((w.v[source].astype(np.int64) + offset) // 4) % 64
        here = w.mask[lanes]
        words = np.where(here, w.v[data][lanes], np.uint32(0)).reshape(64, 1)
        w.issue(w.local, arrival(w, into, words, w.mask.copy()))

    return run


def _push(form: Form) -> Run:
    """ds_permute: every lane names the lane that gets its value; of several the last one's arrives,
    and 0 where nobody's does."""
    form.allow("offset")
    into, target, data = form.named(0, True, 1), form.vector(1), form.vector(2)
    offset = form.number("offset")

    def run(w: Wave) -> None:
        lanes = ((w.v[target].astype(np.int64) + offset) // 4) % 64
        words = np.zeros((64, 1), np.uint32)
        words[lanes[w.mask], 0] = w.v[data][w.mask]
        w.issue(w.local, arrival(w, into, words, w.mask.copy()))

    return run


def _aligned(at: Array, size: int, mask: Array) -> None:
    if (at[mask] % min(size, 16)).any():
        raise Fault(Kind.ALIGNMENT, f"{size} bytes of LDS at {int(at[mask].max())}")


def _own_copies(w: Wave, index: Array) -> None:
    """A wave must wait for its own copies before it reads what they bring."""
    for access in w.vector_memory:
        if access.overlaps(index):
            w.report(Kind.IN_FLIGHT, "LDS bytes of a copy that this wave has not waited for")


def _write(form: Form, size: int, offsets: list[int]) -> Run:
    """One value, or two of them at two offsets."""
    form.allow("offset", "offset0", "offset1")
    count = max(1, size // 4)
    address = form.vector(0)
    sources = [form.vector(1 + i, count) for i in range(len(offsets))]

    def run(w: Wave) -> None:
        mask, base = w.mask.copy(), w.v[address].copy()
        starts = [base + np.uint32(offset) for offset in offsets]
        for at in starts:
            _aligned(at, size, mask)
        # Copies: the registers may change before the write is done.
        raw = [w.v[i : i + count].T.copy().view(np.uint8)[:, :size] for i in sources]
        index = np.concatenate([touched(w, at, size, mask) for at in starts])
        _own_copies(w, index)

        def all_put() -> None:
            for at, data in zip(starts, raw, strict=True):
                put(w, at, data, mask)

        values = np.concatenate([data[mask].reshape(-1) for data in raw])
        w.issue(w.local, Access(w, all_put, index, True, values=values))

    return run


def _transposition(element: int) -> tuple[Array, Array]:
    """For every lane and element of its result: the lane of 16 and the element it comes from."""
    count = 8 // element
    lane, number = LANES[:, None] % 16, np.arange(count)[None, :]
    source = number * (16 // count) + lane // count + 16 * (LANES[:, None] // 16)
    return source, np.broadcast_to(lane % count, source.shape)


def _read(form: Form, size: int, offsets: list[int], element: int = 0) -> Run:
    form.allow("offset", "offset0", "offset1")
    words = max(1, size // 4)
    into, address = form.named(0, True, words * len(offsets)), form.vector(1)
    places = _transposition(element) if element else None

    def arrive(w: Wave, at: Array, first: int, mask: Array) -> None:
        raw = get(w, at, size, mask)
        if places is not None:
            parts = raw.view(np.uint8 if element == 1 else np.uint16)
            raw = np.ascontiguousarray(parts[places]).view(np.uint8).reshape(64, 8)
        full = np.zeros((64, 4 * words), np.uint8)
        full[:, :size] = raw
        for i, word in enumerate(full.view(np.uint32).T):
            w.v[first + i][mask] = word[mask]
            w.mark(first + i, mask, True)

    def run(w: Wave) -> None:
        mask, base = w.mask.copy(), w.v[address].copy()
        if places is not None and not w.full:
            w.report(Kind.DIVERGENCE, "transposing read while some lanes are off")
        starts = [base + np.uint32(offset) for offset in offsets]
        for at in starts:
            _aligned(at, size, mask)
        index = np.concatenate([touched(w, at, size, mask) for at in starts])
        _own_copies(w, index)

        def all_arrive() -> None:
            for i, at in enumerate(starts):
                arrive(w, at, into + words * i, mask)

        registers = range(into, into + words * len(offsets))
        w.issue(w.local, Access(w, all_arrive, index, into=registers))

    return run
