"""Copies of boxes between global and shared memory: cp.async.bulk.tensor."""

from __future__ import annotations

import re

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.block import Block
from gluon_sim.compiled.ptx.operands import Form, Read, elements
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import BULK, WORD
from gluon_sim.compiled.ptx.state import Warp
from gluon_sim.compiled.ptx.units.tensor_map import TensorMap, swizzled

_ALIGNMENT = 128
_GATHERED = 4
_COLUMN_BYTES = 16


def tensor_copy(form: Form) -> Run:
    """A load into shared memory, four gathered rows, or a store."""
    if "multicast" in form.op or "im2col" in form.op or form.has("reduce", "prefetch"):
        raise form.unknown()
    return _store(form) if "global.shared" in form.op else _load(form)


def _map_and_coordinates(form: Form, operand: str) -> tuple[Read, list[Read]]:
    found = re.fullmatch(r"\[\s*(\S+?)\s*,\s*(\{.*\})\s*\]", operand)
    if found is None:
        raise form.unknown()
    return form.reader(found[1], "u64"), [form.reader(c, "s32") for c in elements(found[2])]


def _tensor_map(w: Warp, address: int) -> TensorMap:
    if address not in w.cluster.launch.maps:
        raise Fault(Kind.DESCRIPTOR, f"there is no tensor map at {address:#x}")
    return w.cluster.launch.maps[address]


def _shared_box(block: Block, at: int, size: int, what: str) -> None:
    block.check(at, size, what)
    if at % _ALIGNMENT:
        raise Fault(Kind.ALIGNMENT, f"{what} at shared address {at:#x}")


def _check_column(described: TensorMap, column: int) -> None:
    """An H200 calls any other an illegal instruction."""
    if column * described.element % _COLUMN_BYTES:
        message = f"column {column} of {described.element} bytes, not at {_COLUMN_BYTES} bytes"
        raise Fault(Kind.ALIGNMENT, message)


def _rows(
    described: TensorMap, column: int, starts: list[int], four: bool
) -> tuple[list[Array], int]:
    """Rows of a box, or four of them by number, and the bytes of all of them."""
    if four:
        if len(described.box) != 2 or described.box[1] != 1 or len(starts) != _GATHERED:
            raise Fault(Kind.DESCRIPTOR, f"four rows of a box {described.box}")
        return [np.array(starts, np.int64)], _GATHERED * described.bytes
    if len(starts) + 1 != len(described.box):
        raise Fault(Kind.DESCRIPTOR, f"{len(starts) + 1} coordinates, box {described.box}")
    return described.rows_of_box([column, *starts]), described.bytes


def _load(form: Form) -> Run:
    gathers = "gather4" in form.op
    target, barrier = form.address(0), form.address(2)
    which, coordinates = _map_and_coordinates(form, form.operands[1])

    def issue(w: Warp, lane: int) -> None:
        described = _tensor_map(w, int(which(w)[lane]))
        column, *starts = (int(c(w)[lane]) for c in coordinates)
        _check_column(described, column)
        block, at = w.cluster.place(int(target(w)[lane]))
        owner, bar = w.cluster.place(int(barrier(w)[lane]))
        rows, size = _rows(described, column, starts, gathers)
        _shared_box(block, at, size, "TMA load")
        if block is not w.block:
            raise Fault(Kind.BOUNDS, "TMA load into another block")
        owner.barrier(bar, w.event())
        owner.trace_copy(bar, (w.where(), owner.products))
        event = w.clocks.copy(w.number, owner.rank, bar)
        block.races.write(slice(at // WORD, (at + size) // WORD), event, "a TMA load")
        span = np.arange(at, at + size)
        block.write_by_unit(span, w.cluster.engine.schedule.poison_byte)
        place = swizzled(span, described.swizzle)
        ended = w.clocks.ended(event)

        def arrive() -> None:
            block.write_by_unit(place, described.load(w.cluster.memory, column, rows, ended))
            owner.expect(bar, -size, event.told)

        w.cluster.engine.issue(Pending("load", arrive, w))

    def run(w: Warp) -> None:
        for lane in w.active():
            issue(w, lane)

    return run


def _store(form: Form) -> Run:
    which, coordinates = _map_and_coordinates(form, form.operands[0])
    source, scatters = form.address(1), "scatter4" in form.op
    if "bulk_group" not in form.op:
        raise form.unknown()

    def issue(w: Warp, lane: int) -> None:
        described = _tensor_map(w, int(which(w)[lane]))
        column, *starts = (int(c(w)[lane]) for c in coordinates)
        _check_column(described, column)
        rows, size = _rows(described, column, starts, scatters)
        block, at = w.cluster.place(int(source(w)[lane]))
        _shared_box(block, at, size, "TMA store")
        place = swizzled(np.arange(at, at + size), described.swizzle)
        event = w.clocks.start(w.number, BULK)
        ended = w.clocks.ended(event)
        block.races.read(slice(at // WORD, (at + size) // WORD), event, "a TMA store")

        def leave() -> None:
            data = block.read_by_unit(place, "TMA store")
            if described.store(w.cluster.memory, column, rows, data, ended):
                w.cluster.log.note("global bytes were written twice")

        work = Pending("store", leave, w, event.time)
        w.issue("bulk", work)
        w.cluster.engine.issue(work)

    def run(w: Warp) -> None:
        for lane in w.active():
            issue(w, lane)

    return run
