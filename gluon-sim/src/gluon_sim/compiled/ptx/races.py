"""Accesses to shared and tensor memory that nothing orders, found by vector clocks.

Everybody who touches memory is an agent with a clock: every warp, its asynchronous work of each
kind, the tcgen05 queue of a block, and the copies that signal one mbarrier. A warp knows how far it
has heard of every agent; what it hears of comes by barriers and by waits for its own work. An
access is ordered after another one when whoever does it had heard of that one. So a missing barrier
is found in any run in which both accesses happen, also when their order was right by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gluon_sim.compiled.core.launches import MOST_RUNNING
from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind

PRODUCTS, LOADS, STORES, COPIES, BULK = range(1, 6)
"""Asynchronous work of a warp: wgmma, tcgen05.ld, tcgen05.st, cp.async, TMA stores."""
_KINDS = ("its own accesses", "wgmma", "tcgen05.ld", "tcgen05.st", "cp.async", "a TMA store")
_MOST_BARRIERS = 160  # of a cluster, that copies signal
WORD = 4
_GROUP = 16  # lanes of tensor memory that are one cell of the record
TENSOR_COLUMNS = 512
TENSOR_CELLS = 128 // _GROUP * TENSOR_COLUMNS

Cells = Array | slice


@dataclass(frozen=True)
class Event:
    """An access: who does it, at which time of theirs, and what they had heard of."""

    agent: int
    time: int
    heard: Array
    told: Array | None = None
    """What its end passes on, where that is known when it begins."""


class Clocks:
    """What every warp of a cluster has heard of every agent."""

    def __init__(self, warps: int, blocks: int) -> None:
        self.warps, self.blocks = warps, blocks
        self.readers = len(_KINDS) * warps + blocks
        self._copiers = self.readers + MOST_RUNNING  # in front of them: ends of launches
        self.times = np.zeros(self._copiers + _MOST_BARRIERS, np.int32)
        self.times[:warps] = 1
        self.heard = np.zeros((warps, len(self.times)), np.int32)
        self.heard[np.arange(warps), np.arange(warps)] = 1
        self._signals: dict[tuple[int, int], int] = {}

    def now(self, warp: int) -> Event:
        """An access of the warp itself."""
        return Event(warp, int(self.times[warp]), self.heard[warp])

    def start(self, warp: int, kind: int) -> Event:
        """Asynchronous work of a warp begins; `finish` is when the warp has waited for it."""
        agent = kind * self.warps + warp
        self.times[agent] += 1
        return Event(agent, int(self.times[agent]), self.heard[warp])

    def queue(self, warp: int, block: int) -> Event:
        """tcgen05 work begins: after all earlier work of its block."""
        agent = len(_KINDS) * self.warps + block
        self.times[agent] += 1
        heard = self.heard[warp].copy()
        heard[agent] = self.times[agent]
        return Event(agent, int(self.times[agent]), heard)

    def copy(self, warp: int, block: int, barrier: int) -> Event:
        """A copy begins that signals an mbarrier."""
        key = (block, barrier)
        agent = self._signals.setdefault(key, self._copiers + len(self._signals))
        if agent >= len(self.times):
            raise Fault(Kind.LIMIT, f"more than {_MOST_BARRIERS} mbarriers that copies signal")
        self.times[agent] += 1
        heard = self.heard[warp].copy()
        told = heard.copy()
        told[agent] = self.times[agent]
        return Event(agent, int(self.times[agent]), heard, told)

    def hear_launch_end(self, warp: int, slot: int) -> None:
        """A warp has waited for an earlier launch, that in place `slot` of those that ran."""
        self.heard[warp, self.readers + slot] = 1

    def ended(self, event: Event) -> Array:
        """Which earlier launches have ended, as far as whoever makes an access knows."""
        known: Array = event.heard[self.readers : self.readers + MOST_RUNNING] > 0
        return known

    def finish(self, warp: int, kind: int, time: int = 0) -> None:
        """A warp has waited for its work up to `time` (0: all of it)."""
        agent = kind * self.warps + warp
        row = self.heard[warp]
        row[agent] = max(row[agent], time or self.times[agent])

    def add_work(self, told: Array, warp: int, kind: int) -> None:
        """Pass on a warp's work so far too: whoever tells waits for it."""
        agent = kind * self.warps + warp
        told[agent] = self.times[agent]

    def tell(self, warp: int) -> Array:
        """What a warp passes on when it arrives somewhere; what it does later is not part of it."""
        told: Array = self.heard[warp].copy()
        self.times[warp] += 1
        self.heard[warp, warp] = self.times[warp]
        return told

    def hear(self, warp: int, told: Array | None) -> None:
        """A warp learns what others passed on."""
        if told is not None:
            np.maximum(self.heard[warp], told, out=self.heard[warp])

    def name(self, agent: int) -> str:
        """An agent in words."""
        kind, number = divmod(agent, self.warps)
        if agent >= self.readers:
            return "a copy"
        if not kind:
            return f"warp {number}"
        return f"{_KINDS[kind]} of warp {number}" if kind < len(_KINDS) else "tcgen05 work"


def joined(one: Array | None, other: Array) -> Array:
    """What is known to whoever heard of both."""
    result: Array = other.copy() if one is None else np.maximum(one, other)
    return result


class Shadow:
    """Who wrote each cell of a memory last, and when everybody read it."""

    def __init__(self, cells: int, clocks: Clocks) -> None:
        self._clocks = clocks
        self._writer = np.zeros(cells, np.int16)
        self._written = np.zeros(cells, np.int32)
        self._read = np.zeros((clocks.readers, cells), np.int32)

    def read(self, cells: Cells, event: Event, what: str) -> None:
        """An access that must be ordered after the last write."""
        self._after_writes(cells, event, what)
        if event.agent < self._clocks.readers:
            self._read[event.agent, cells] = event.time

    def write(self, cells: Cells, event: Event, what: str, beside: bool = False) -> None:
        """An access that must be ordered after the last write and all reads since; if it is
        `beside` the last write, in other bytes of the same cells, after the reads alone."""
        if not beside:
            self._after_writes(cells, event, what)
        late = self._read[:, cells] > event.heard[: self._clocks.readers, None]
        late[event.agent : event.agent + 1] = False  # its own reads came before
        if late.any():
            reader = self._clocks.name(int(np.argmax(late.any(axis=1))))
            raise Fault(Kind.RACE, f"{what} writes what {reader} may still read")
        self._writer[cells] = event.agent
        self._written[cells] = event.time

    def touched(self, cells: Array) -> Array:
        """Which cells were ever written."""
        result: Array = self._written[cells] > 0
        return result

    def known(self, cells: Array, heard: Array) -> Array:
        """Which cells' last writes whoever heard this much knows of."""
        result: Array = self._written[cells] <= heard[self._writer[cells]]
        return result

    def check(self, cells: Cells, event: Event, what: str) -> None:
        """A use that is ordered after the last write, without a record of it."""
        self._after_writes(cells, event, what)

    def _after_writes(self, cells: Cells, event: Event, what: str) -> None:
        writers = self._writer[cells]
        late = self._written[cells] > event.heard[writers]
        if late.any():
            late &= writers != event.agent
            if late.any():
                writer = self._clocks.name(int(writers[np.argmax(late)]))
                raise Fault(Kind.RACE, f"{what} does not wait for what {writer} writes")


def words(at: Array) -> Array:
    """Cells of shared memory that bytes [..., n] lie in, n of them together."""
    step = min(WORD, at.shape[-1])
    cells: Array = (at[..., ::step] // WORD).reshape(-1)
    return cells


def tensor_cells(lanes: Array, first: int, end: int) -> Array:
    """Cells of tensor memory in these lanes and columns."""
    groups = np.unique(lanes // _GROUP)
    cells: Array = (groups[:, None] * TENSOR_COLUMNS + np.arange(first, end)[None, :]).reshape(-1)
    return cells
