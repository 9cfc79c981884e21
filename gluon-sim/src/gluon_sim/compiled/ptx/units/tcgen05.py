"""Blackwell's tensor memory: allocation, loads and stores of warps, copies, commits."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.block import Block
from gluon_sim.compiled.ptx.operands import Form, elements
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import LOADS, STORES, WORD, tensor_cells
from gluon_sim.compiled.ptx.state import LANES, OFFSET, Warp
from gluon_sim.compiled.ptx.units.matrices import Shape, cells, descriptor, raw_bytes
from gluon_sim.compiled.ptx.units.tcgen05_mma import mma

_COLUMNS_OF_COPY = 8  # 256 bits of every lane


def tcgen05(form: Form) -> Run:
    """All tcgen05 instructions."""
    what = form.parts[1].split("::")[0]
    builders: dict[str, Callable[[Form], Run]] = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "wait": _wait,
        "ld": _load,
        "st": _store,
        "commit": _commit,
        "cp": _copy,
        "mma": mma,
    }
    if what in ("fence", "relinquish_alloc_permit"):
        return lambda w: None
    if what not in builders:
        raise form.unknown()
    return builders[what](form)


def _blocks(form: Form, w: Warp) -> list[Block]:
    return w.cluster.blocks if "cta_group::2" in form.op else [w.block]


def _alloc(form: Form) -> Run:
    address, columns = form.address(0), form.read(1, "u32")

    def run(w: Warp) -> None:
        w.together("tcgen05.alloc")
        if w.block.columns is not None:
            raise Fault(Kind.DEADLOCK, "a second allocation of tensor memory")
        at = w.one(address(w)) & OFFSET
        w.block.check(at, 4, "tcgen05.alloc")
        w.block.columns = w.one(columns(w))
        w.block.races.write(slice(at // WORD, at // WORD + 1), w.event(), "tcgen05.alloc")
        w.block.write_by_unit(np.arange(at, at + 4), np.zeros(4, np.uint8))

    return run


def _dealloc(form: Form) -> Run:
    address = form.read(0, "u32")

    def run(w: Warp) -> None:
        block = w.block
        if block.columns is None or w.one(address(w)) != 0:
            raise Fault(Kind.BOUNDS, "tensor memory that is not allocated is freed")
        warps = [x for x in w.cluster.warps if x.block is block]
        working = any(work.kind != "commit" for work in block.queue)
        if working or any(x.loads or x.stores for x in warps):
            raise Fault(Kind.AT_EXIT, "tensor memory is freed with work in flight")
        block.columns = None

    return run


def _wait(form: Form) -> Run:
    loads = "wait::ld" in form.op

    def run(w: Warp) -> None:
        waiting = w.loads if loads else w.stores
        for work in waiting:
            work.finish()
        waiting.clear()
        w.clocks.finish(w.number, LOADS if loads else STORES)
        if loads:
            w.loading = frozenset()

    return run


def _cells(w: Warp, address: int, shape: str, count: int, gap: int) -> tuple[Array, Array]:
    """Lanes and columns [count, 32] that a warp's registers correspond to.

    32x32b: lane i of the warp has lane i of its quarter. 16x32bx2: lanes 16 to 31 have the same 16
    lanes as 0 to 15, `gap` columns further.
    """
    lane, column = address >> 16, address & 0xFFFF
    if w.block.columns is None:
        raise Fault(Kind.UNINITIALIZED, "tensor memory is not allocated")
    quarter = 32 * (w.index % 4)
    starts = (quarter,) if shape == "32x32b" else (quarter, quarter + 16)
    if lane not in starts:
        raise Fault(Kind.BOUNDS, f"tensor memory lane {lane} from warp {w.index}")
    step = np.arange(count)[:, None]
    if shape == "32x32b":
        lanes, columns = lane + LANES[None, :] + 0 * step, column + step + 0 * LANES[None, :]
    else:
        lanes = lane + LANES[None, :] % 16 + 0 * step
        columns = column + step + gap * (LANES[None, :] // 16)
    if int(columns.max()) >= w.block.columns:
        raise Fault(Kind.BOUNDS, f"tensor memory column {int(columns.max())}")
    return lanes, columns


def _record(lanes: Array, columns: Array) -> Array:
    """Cells of the record of races."""
    return tensor_cells(lanes[0], int(columns.min()), int(columns.max()) + 1)


def _shape(form: Form, registers: int, gap_operand: int) -> tuple[str, int]:
    found = re.search(r"\.(32x32b|16x32bx2)\.x(\d+)\.", form.op)
    if found is None or int(found[2]) != registers or form.has("pack", "unpack", "red"):
        raise form.unknown()
    return found[1], int(form.operands[gap_operand]) if found[1] == "16x32bx2" else 0


def _load(form: Form) -> Run:
    registers = np.array([form.register(name) for name in elements(form.operands[0])])
    shape, gap = _shape(form, len(registers), 2)
    address, names = form.address(1), frozenset(registers.tolist())

    def run(w: Warp) -> None:
        w.together("tcgen05.ld")
        place = _cells(w, w.one(address(w)), shape, len(registers), gap)
        event = w.clocks.start(w.number, LOADS)
        w.block.tensor_races.read(_record(*place), event, "tcgen05.ld")
        words = w.regs["u32"]
        words[registers] = w.cluster.engine.schedule.poison_word

        def arrive() -> None:
            words[registers] = w.block.tensor[place]

        work = Pending("ld", arrive, w)
        w.loads.append(work)
        if not w.cluster.launch.strict_loads:
            w.loading |= names
        if w.cluster.engine.early(copy=False):
            work.finish()

    return run


def _store(form: Form) -> Run:
    registers = np.array([form.register(name) for name in elements(form.operands[-1])])
    shape, gap = _shape(form, len(registers), 1)
    address = form.address(0)

    def run(w: Warp) -> None:
        w.together("tcgen05.st")
        place = _cells(w, w.one(address(w)), shape, len(registers), gap)
        event = w.clocks.start(w.number, STORES)
        w.block.tensor_races.write(_record(*place), event, "tcgen05.st")
        words, tensor = w.regs["u32"][registers].copy(), w.block.tensor

        def arrive() -> None:
            tensor[place] = words

        work = Pending("st", arrive, w)
        w.stores.append(work)
        if w.cluster.engine.early(copy=False):
            work.finish()
        else:
            tensor[place] = w.cluster.engine.schedule.poison_word

    return run


def _commit(form: Form) -> Run:
    """An arrival, in one block or several, after all earlier tcgen05 work."""
    address = form.address(0)
    several = form.read(1, "u16") if len(form.operands) > 1 else None

    def issue(w: Warp, lane: int) -> None:
        block, at = w.cluster.place(int(address(w)[lane]))
        chosen = 1 << block.rank if several is None else int(several(w)[lane])
        if chosen >> len(w.cluster.blocks):
            raise Fault(Kind.BOUNDS, "commit to a block outside of the cluster")

        event = w.clocks.queue(w.number, w.block.rank)
        told = event.heard
        for other in w.cluster.blocks:
            if chosen >> other.rank & 1:
                other.barrier(at, w.event())

        def arrive() -> None:
            for other in w.cluster.blocks:
                if chosen >> other.rank & 1:
                    other.arrive(at, 1, told)

        w.cluster.engine.enqueue(w.block.queue, Pending("commit", arrive, w))

    def run(w: Warp) -> None:
        for lane in w.active():
            issue(w, lane)

    return run


def _copy(form: Form) -> Run:
    """cp 128x256b: 32 bytes of row r go to 8 columns of lane r."""
    if "128x256b" not in form.op or "b8x16" in form.op:
        raise form.unknown()
    address, source = form.address(0), form.read(1, "u64")

    def issue(w: Warp, lane: int) -> None:
        place, word = int(address(w)[lane]), int(source(w)[lane])
        matrix, column = descriptor(word, w.kernel.sm), place & 0xFFFF
        event = w.clocks.queue(w.number, w.block.rank)
        written = tensor_cells(np.arange(128), column, column + _COLUMNS_OF_COPY)
        for block in _blocks(form, w):
            block.races.read(cells(matrix, Shape(128, "bf16")), event, "tcgen05.cp")
            block.tensor_races.write(written, event, "tcgen05.cp")

        def arrive() -> None:
            for block in _blocks(form, w):
                if place >> 16 or column + _COLUMNS_OF_COPY > (block.columns or 0):
                    raise Fault(Kind.BOUNDS, f"tcgen05.cp to {place:#x}")
                raw = raw_bytes(block, matrix, Shape(128, "bf16"), "tcgen05.cp")
                words = np.ascontiguousarray(raw).view(np.uint32)
                block.tensor[:, column : column + _COLUMNS_OF_COPY] = words

        w.cluster.engine.enqueue(w.block.queue, Pending("cp", arrive, w))

    def run(w: Warp) -> None:
        for lane in w.active():
            issue(w, lane)

    return run
