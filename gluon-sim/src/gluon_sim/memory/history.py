"""Who read and wrote global memory, over all launches of a block: races between partitions, between
programs of one launch, and between launches that overlap (`gluon_sim.stream`).

Whoever makes an access has a vector clock (`machine.clocks`). An earlier access of the same launch
is ordered before it when the clock covers it; one of an earlier launch, when that launch had ended
before this one began, or when the clock has heard of its end. Atomics do not race with one another.
An atomic that is not relaxed also hands on clocks, as a release and an acquire do. Stores to what a
kernel calls contended (`stream.contended_by`) do not race with one another either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from gluon_sim.machine.clocks import Clock, Component, LaunchEnd
from gluon_sim.machine.context import Location
from gluon_sim.memory.unreserved import unreserved
from gluon_sim.report.findings import Kind
from gluon_sim.stream import Launch, Stream
from gluon_sim.values.dtypes import Array

if TYPE_CHECKING:
    from gluon_sim.machine.scheduler import Agent

_MANY_CELLS = 1 << 26
_INDEX_BITS = 24
"""An access has a number: who made it, shifted by so many bits, and which of theirs it is."""


class GlobalAccess(NamedTuple):
    """One instruction's access to global memory."""

    launch: int
    component: Component
    time: int
    what: str
    where: Location
    atomic: bool
    contended: bool


class Cells:
    """The last accesses to every element of a storage, by their numbers; 0 is none.

    A cell is as wide as the narrowest element type that the storage was seen with, so far.
    """

    def __init__(self, storage: torch.UntypedStorage, width: int) -> None:
        self.storage = storage  # kept alive, so that its address is not given to another one
        self.width = width
        number = storage.nbytes() // width
        self.written = _numbers(number)
        self.read = _numbers(number)
        self.read_too = _numbers(number)
        """The last read by somebody else than the last reader."""
        self.any_written = False

    def split(self, width: int) -> None:
        """Make cells narrower. A storage of very many forgets what was recorded, which would take
        up memory for all of them."""
        pieces = self.width // width
        number = len(self.written) * pieces
        for name in ("written", "read", "read_too"):
            before = getattr(self, name)
            after = np.repeat(before, pieces) if number < _MANY_CELLS else _numbers(number)
            setattr(self, name, after)
        self.width = width

    def of(self, position: Array, itemsize: int) -> Array:
        """The cells of elements."""
        pieces = itemsize // self.width
        if pieces == 1:
            return position
        cells: Array = (position[..., None] * pieces + np.arange(pieces)).reshape(-1)
        return cells


def _numbers(size: int) -> Array:
    """`size` zeros; memory is taken where they are touched, if there are many."""
    if size < _MANY_CELLS:
        return np.zeros(size, np.int64)
    return np.frombuffer(unreserved(8 * size), np.int64)


class History:
    """The launches of a stream, and the accesses that a later one could race with."""

    def __init__(self) -> None:
        self.stream = Stream()
        self._accesses: dict[int, GlobalAccess] = {}
        self._numbers: dict[GlobalAccess, int] = {}
        self._owners: dict[tuple[int, Component], int] = {}
        self._made: dict[int, int] = {}
        self._cells: dict[int, Cells] = {}
        self._handed_on: dict[tuple[int, int], Clock] = {}

    def cells(self, tensor: torch.Tensor) -> Cells:
        """The record of a tensor's storage."""
        storage, width = tensor.untyped_storage(), tensor.element_size()
        found = self._cells.setdefault(storage.data_ptr(), Cells(storage, width))
        if found.storage.nbytes() < storage.nbytes():  # torch gave the address to a larger one
            found = self._cells[storage.data_ptr()] = Cells(storage, width)
        if width < found.width:
            found.split(width)
        return found

    def access(
        self,
        cells: Cells,
        at: Array,
        access: GlobalAccess,
        write: bool,
        clock: Clock,
        launch: Launch,
    ) -> Iterator[GlobalAccess]:
        """Record an access to `at`; yields what it races with."""
        if not np.size(at):
            return
        earlier: set[int] = set()
        if cells.any_written or write:
            earlier |= _different(cells.written[at])
        if write:
            earlier |= _different(cells.read[at]) | _different(cells.read_too[at])
        for old in sorted(earlier - {0}):
            before = self._accesses[old]
            expected = (before.atomic and access.atomic) or (before.contended and access.contended)
            if not expected and not _ordered(before, clock, launch):
                yield before
        number = self._number(access)
        if write:
            cells.written[at] = number
            cells.any_written = True
            cells.read[at] = cells.read_too[at] = 0
            return
        last = cells.read[at]
        others = last >> _INDEX_BITS != number >> _INDEX_BITS
        if others.any():
            cells.read_too[at] = np.where(others & (last != 0), last, cells.read_too[at])
        cells.read[at] = number

    def hand_on(self, cells: Cells, at: Array, clock: Clock) -> None:
        """An atomic with acquire and release: learn what earlier ones knew, and tell later ones."""
        for cell in np.unique(at):
            kept = self._handed_on.setdefault((id(cells), int(cell)), Clock())
            clock.join(kept)
            kept.join(clock)

    def _number(self, access: GlobalAccess) -> int:
        key = access._replace(what="")
        if key not in self._numbers:
            owner = self._owners.setdefault(
                (access.launch, access.component), len(self._owners) + 1
            )
            self._made[owner] = self._made.get(owner, 0) + 1
            self._numbers[key] = owner << _INDEX_BITS | self._made[owner]
            self._accesses[self._numbers[key]] = access
        return self._numbers[key]

    def kernel_of(self, access: GlobalAccess) -> str:
        """The kernel that made an access."""
        return self.stream.launches[access.launch].kernel


def _different(numbers: Array) -> set[int]:
    """The distinct numbers of an array, of which most have one or two."""
    low, high = int(numbers.min()), int(numbers.max())
    return {low} if low == high else {int(n) for n in np.unique(numbers)}


def _ordered(before: GlobalAccess, clock: Clock, launch: Launch) -> bool:
    if before.launch != launch.number:
        return before.launch not in launch.running or LaunchEnd(before.launch) in clock.seen
    return clock.seen.get(before.component, 0) >= before.time


def report_races(
    agent: Agent, cells: Cells, at: Array, access: GlobalAccess, write: bool, buffer: str
) -> None:
    """Record an access of the running kernel, and report what it races with."""
    machine = agent.cta.cluster.machine
    history, launch = machine.history, machine.launched
    for old in history.access(cells, at, access, write, agent.clock, launch):
        if old.launch == launch.number:
            who = "which nothing orders before it"
        else:
            who = f"of {history.kernel_of(old)}, which may still run: no griddepcontrol.wait"
        agent.report(
            Kind.RACE,
            f"{access.what} of {buffer} races with the {old.what} ({old.where}) {who}",
            buffer=buffer,
            where=access.where,
        )
