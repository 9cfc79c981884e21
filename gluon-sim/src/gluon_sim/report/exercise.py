"""What runs exercised: waits that had to wait, rings that turned, branches and where they went.

>>> with gluon_sim.recording() as exercise:                                # doctest: +SKIP
...     gluon_sim.simulate(kernel, grid, args, kwargs)
>>> print(*gaps(exercise.total(), [kernel_file]), sep=chr(10))             # doctest: +SKIP

A wait that was never early is one whose removal no run can notice, and so is an empty barrier of a
ring that turns once. `gaps` names them. Nothing is recorded, and nothing costs time, outside of
`recording`. Records of several processes are merged by way of JSON.

A ring is what is indexed, or waited for with a parity, that is known at run time only. It turns
once when each of its stages has been used once: of an array of mbarriers, when all have completed a
phase; of memory of two stages or more, when all were written after what they held was read.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gluon_sim.machine.context import PACKAGE
from gluon_sim.report.sites import Part, Place, source_of
from gluon_sim.values.tensors import Tensor

if TYPE_CHECKING:
    from gluon_sim.machine.clusters import Cluster
    from gluon_sim.memory.views import MemoryView


class Wait(NamedTuple):
    """A wait in the source, and what it was for: the name of a barrier, or a kind of operation."""

    place: Place
    awaited: str


class Ring(NamedTuple):
    """An allocation by its name, and how many stages it had."""

    place: Place
    name: str
    stages: int


@dataclass
class Waited:
    """How often a wait was reached, and how often what it waits for was not yet there."""

    times: int = 0
    blocked: int = 0


@dataclass
class Branched:
    """How often a branch went either way, and whether its condition was in a register."""

    true: int = 0
    false: int = 0
    at_run_time: bool = False


@dataclass
class Record:
    """What the launches of one kernel, or of several, exercised."""

    launches: int = 0
    waits: dict[Wait, Waited] = field(default_factory=dict)
    rings: dict[Ring, int] = field(default_factory=dict)
    """Most turns in one program."""
    branches: dict[Place, Branched] = field(default_factory=dict)

    def add(self, other: Record) -> None:
        """Take in what other launches exercised."""
        self.launches += other.launches
        for wait, waited in other.waits.items():
            mine = self.waits.setdefault(wait, Waited())
            mine.times += waited.times
            mine.blocked += waited.blocked
        for ring, turns in other.rings.items():
            self.rings[ring] = max(self.rings.get(ring, 0), turns)
        for place, branched in other.branches.items():
            went = self.branches.setdefault(place, Branched())
            went.true += branched.true
            went.false += branched.false
            went.at_run_time |= branched.at_run_time

    def to_json(self) -> dict[str, Any]:
        """The record as lists and numbers."""
        return {
            "launches": self.launches,
            "waits": [[*w.place, w.awaited, n.times, n.blocked] for w, n in self.waits.items()],
            "rings": [[*r.place, r.name, r.stages, turns] for r, turns in self.rings.items()],
            "branches": [
                [*place, b.true, b.false, b.at_run_time] for place, b in self.branches.items()
            ],
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Record:
        """The way back."""
        record = cls(kept["launches"])
        for file, line, column, awaited, times, blocked in kept["waits"]:
            record.waits[Wait(Place(file, line, column), awaited)] = Waited(times, blocked)
        for file, line, column, name, stages, turns in kept["rings"]:
            record.rings[Ring(Place(file, line, column), name, stages)] = turns
        for file, line, column, true, false, at_run_time in kept["branches"]:
            record.branches[Place(file, line, column)] = Branched(true, false, at_run_time)
        return record


class Entry(NamedTuple):
    """A kernel that was launched."""

    file: str
    name: str


@dataclass
class Exercise:
    """Records by kernel."""

    records: dict[Entry, Record] = field(default_factory=dict)

    def of(self, file: str, name: str) -> Record:
        """The record of a kernel; empty at first."""
        return self.records.setdefault(Entry(file, name), Record())

    def total(self, files: Iterable[str] | None = None) -> Record:
        """What kernels of these files exercised together, or all kernels."""
        wanted, total = None if files is None else set(files), Record()
        for entry, record in self.records.items():
            if wanted is None or entry.file in wanted:
                total.add(record)
        return total

    def add(self, other: Exercise) -> None:
        """Take in what another process recorded."""
        for entry, record in other.records.items():
            self.of(*entry).add(record)

    def dumps(self) -> str:
        """All records as JSON."""
        return json.dumps([[*entry, record.to_json()] for entry, record in self.records.items()])

    @classmethod
    def loads(cls, text: str) -> Exercise:
        """The way back."""
        kept = json.loads(text)
        return cls({Entry(file, name): Record.from_json(record) for file, name, record in kept})


_active: list[Exercise] = []


@contextlib.contextmanager
def recording() -> Iterator[Exercise]:
    """Record what simulated launches exercise within the block."""
    exercise = Exercise()
    _active.append(exercise)
    try:
        yield exercise
    finally:
        _active.remove(exercise)


def observer_of(kernel: Any) -> Observer | None:
    """Whoever records a launch of a kernel; None if nobody asked."""
    if not _active:
        return None
    code = kernel.fn.__code__
    record = _active[-1].of(code.co_filename, kernel.fn.__name__)
    record.launches += 1
    return Observer(record)


@dataclass
class _Filled:
    """A part of a stage that is written as a whole: how often, and whether it was read since, and
    ever."""

    stage: int
    turns: int = 0
    was_read: bool = True
    is_read: bool = False


@dataclass
class _Memory:
    """An allocation of a running program."""

    place: Place
    name: str
    stage_bytes: int
    filled: dict[int, _Filled] = field(default_factory=dict)
    """By the cells that are written at once."""

    def turns(self, stages: int) -> int:
        """How often all stages were written, and read in between; those aside that are never used,
        as places that make a record as long as a power of two."""
        most = [0] * stages
        for part in self.filled.values():
            if part.is_read and part.stage < stages:
                most[part.stage] = max(most[part.stage], part.turns)
        return min(filter(None, most), default=0)


class Observer:
    """Sees one launch, and adds to a record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._memory: dict[int, _Memory] = {}  # by the identity of an allocation that is in use

    # -- what the machine tells
    def allocated(self, view: MemoryView) -> None:
        """A kernel allocated memory."""
        stage_bytes = view.strides[0] if view.shape else 1
        self._memory[id(view.alloc)] = _Memory(*_name_of_allocation(), stage_bytes)

    def waited_on(self, barrier: MemoryView, blocked: bool) -> None:
        """A partition waits for an mbarrier, which is not yet complete if it `blocked`."""
        self.waited(self._memory[id(barrier.alloc)].name, blocked)

    def waited(self, awaited: str, blocked: bool) -> None:
        """A partition waits for something else that has a name."""
        wait = self._record.waits.setdefault(Wait(_kernel_place(), awaited), Waited())
        wait.times += 1
        wait.blocked += blocked

    def accessed(self, view: MemoryView, write: bool) -> None:
        """A partition, or an operation that it issues, reads or writes memory on the chip."""
        memory, cells = self._memory[id(view.alloc)], view.cells()
        if write:
            stage = view.offset // memory.stage_bytes
            part = memory.filled.setdefault(cells, _Filled(stage))
            part.turns += part.was_read
            part.was_read = False
        else:
            for mask, part in memory.filled.items():
                if mask & cells:
                    part.was_read = part.is_read = True

    def branch(self, file: str, line: int, column: int, condition: Any) -> bool:
        """Which way a branch goes."""
        taken = bool(condition)
        went = self._record.branches.setdefault(Place(file, line, column), Branched())
        went.at_run_time |= isinstance(condition, Tensor)
        if taken:
            went.true += 1
        else:
            went.false += 1
        return taken

    def ended(self, cluster: Cluster) -> None:
        """A program of the grid has come to its end."""
        for view in cluster.views():
            if not view.alloc.turning or not view.shape:
                continue
            memory, stages = self._memory[id(view.alloc)], view.shape[0]
            phases = cluster.completed(view)
            if phases is None and stages == 1:
                continue
            turns = memory.turns(stages) if phases is None else phases
            ring = Ring(memory.place, memory.name, stages)
            self._record.rings[ring] = max(self._record.rings.get(ring, 0), turns)


# -- where a kernel is
_Positions = list[tuple[int | None, int | None, int | None, int | None]]
_positions: dict[tuple[str, CodeType], _Positions] = {}  # code of two files may compare equal


def _place_in(frame: FrameType) -> Place:
    """Where the call begins that a frame is in."""
    code = frame.f_code
    key = code.co_filename, code
    if key not in _positions:
        _positions[key] = list(code.co_positions())
    line, _, column, _ = _positions[key][frame.f_lasti // 2]
    return Place(code.co_filename, line or frame.f_lineno, column or 0)


def _kernel_frames() -> Iterator[FrameType]:
    """The kernel's own frames of the running partition, from the inside."""
    frame: FrameType | None = sys._getframe(1)
    inside = False
    while frame is not None:
        own = not frame.f_code.co_filename.startswith(PACKAGE)
        if inside and not own:
            return
        if own:
            inside = True
            yield frame
        frame = frame.f_back


def _kernel_place() -> Place:
    return _place_in(next(_kernel_frames()))


def _name_of_allocation() -> tuple[Place, str]:
    """Where something is allocated, and what the kernel calls it.

    A function that only returns what it allocates does not name it: whoever calls it does.
    """
    parts: tuple[Part, ...] = ()
    place, name = None, ""
    for frame in _kernel_frames():
        place = _place_in(frame)
        found = source_of(place.file).allocated(place, parts)
        name = found.name or name
        if found.returned is None:
            break
        parts = found.returned
    assert place is not None
    return place, name or f"line {place.line}"
