"""A block: shared memory with its barriers, tensor memory, and the queue of tcgen05.

Shared memory has two views, that of ordinary loads and stores and that of the asynchronous units
(TMA, wgmma, tcgen05). An ordinary store reaches the second one at a proxy fence; until then a unit
that reads those bytes is a fault.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind, Location
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.races import TENSOR_CELLS, WORD, Event, Shadow, joined

if TYPE_CHECKING:
    from gluon_sim.compiled.ptx.state import Cluster

SHARED_BASE = 0x400  # what lies below belongs to the driver
_TENSOR_LANES, _TENSOR_COLUMNS = 128, 512
_MOST_TX = (1 << 20) - 1

STORED, COPIED = 1, 2
"""How bytes that no fence has published came: by an ordinary store, or by cp.async."""


@dataclass
class MBarrier:
    """Arrivals and bytes that the current phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    told: Array | None = None
    """What those who arrived in this phase pass on, and in the phase before."""
    known: Array | None = None


@dataclass
class NamedBarrier:
    """Warps that have arrived, and how often the barrier was complete."""

    threads: int
    arrived: set[int] = field(default_factory=set)
    turns: int = 0
    told: Array | None = None
    known: Array | None = None


class Block:
    """A CTA: shared memory, tensor memory, barriers, and its tcgen05 queue."""

    def __init__(self, cluster: Cluster, rank: int, number: int, shared: int) -> None:
        schedule = cluster.engine.schedule
        self.cluster = cluster
        self.rank: int = rank
        self.number: int = number
        self.size = SHARED_BASE + shared
        self.shared = np.full(self.size, schedule.poison_byte, np.uint8)
        self.seen_by_units = self.shared.copy()
        self.unpublished = np.zeros(self.size, np.uint8)
        clocks = cluster.clocks
        self.races = Shadow(-(-self.size // WORD), clocks)
        self.tensor_races = Shadow(TENSOR_CELLS if cluster.kernel.sm >= 100 else 1, clocks)
        self.tensor = np.full((_TENSOR_LANES, _TENSOR_COLUMNS), schedule.poison_word, np.uint32)
        self.narrow = np.zeros(-(-self.size // WORD), np.uint8)
        """A bit for each byte of every word: whether a narrower store wrote it since the last store
        of a whole word. Two warps may store to different bytes of a word."""
        self.columns: int | None = None
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.queue: deque[Pending] = deque()
        self.free_registers = cluster.kernel.pool
        self.products = 0

    def check(self, first: int, size: int, what: str) -> None:
        """Bytes of this block's shared memory."""
        if first < SHARED_BASE or first + size > self.size:
            raise Fault(Kind.BOUNDS, f"{what}: shared bytes {first:#x}+{size} of {self.size:#x}")

    def beside(self, at: Array) -> Array:
        """Which of narrow stores to bytes [n, size] go to others than the narrow stores before."""
        cells = at[:, 0] // WORD
        mine = ((1 << at.shape[1]) - 1 << at[:, 0] % WORD).astype(np.uint8)
        before = self.narrow[cells]
        apart: Array = (before != 0) & (before & mine == 0)
        self.narrow[cells[~apart]] = 0
        np.bitwise_or.at(self.narrow, cells, mine)
        return apart

    def store(self, at: Array, data: Array, how: int = STORED) -> None:
        """An ordinary store: it ends the life of a barrier that lies there."""
        if data.shape[-1] >= WORD:
            self.narrow[at[..., ::WORD] // WORD] = 0
        self.shared[at] = data
        self.unpublished[at] = np.where(self.seen_by_units[at] == data, 0, how)
        if self.mbarriers:
            low, high = int(at.min()), int(at.max())
            for place in [b for b in self.mbarriers if b + 8 > low and b <= high]:
                if ((at >= place) & (at < place + 8)).any():
                    del self.mbarriers[place]
                    self.cluster.log.note("an mbarrier's bytes were used for something else")

    def write_by_unit(self, at: Array, data: Array | int) -> None:
        """A write of an asynchronous unit, seen by all once it is complete."""
        self.shared[at] = data
        self.seen_by_units[at] = data
        self.unpublished[at] = 0

    def read_by_unit(self, at: Array, what: str) -> Array:
        """What an asynchronous unit reads."""
        self.check(int(at.min()), 1, what)
        self.check(int(at.max()), 1, what)
        pending = self.unpublished[at]
        if pending.any():
            if (pending == STORED).any():
                raise Fault(Kind.FENCE, f"{what} reads stored bytes that no proxy fence published")
            self.cluster.log.note("cp.async bytes were read by a unit without a proxy fence")
            copied = at[pending == COPIED]
            self.seen_by_units[copied] = self.shared[copied]
        found: Array = self.seen_by_units[at]
        return found

    def publish(self, heard: Array) -> None:
        """fence.proxy.async: units see every store that whoever fences has heard of."""
        at = np.flatnonzero(self.unpublished)
        at = at[self.races.known(at // WORD, heard)]
        self.seen_by_units[at] = self.shared[at]
        self.unpublished[at] = 0

    def barrier(self, at: int, event: Event | None = None) -> MBarrier:
        """The mbarrier at an address; whoever uses it must have heard of its initialization."""
        if at not in self.mbarriers:
            raise Fault(Kind.UNINITIALIZED, f"there is no mbarrier at {at:#x}")
        if event is not None:
            self.races.check(slice(at // WORD, at // WORD + 2), event, "use of an mbarrier")
        return self.mbarriers[at]

    def arrive(self, at: int, count: int, told: Array) -> None:
        """Arrivals at an mbarrier, with what they pass on."""
        barrier = self.barrier(at)
        barrier.told = joined(barrier.told, told)
        if barrier.pending < count:
            message = f"arrival at mbarrier {at:#x}, which expects {barrier.pending} more"
            raise Fault(Kind.BARRIER, message)
        barrier.pending -= count
        self._turn(barrier)

    def expect(self, at: int, size: int, copied: Array | None = None) -> None:
        """Bytes that a phase waits for in addition; negative ones have come, by a copy."""
        barrier = self.barrier(at)
        if copied is not None:
            barrier.told = joined(barrier.told, copied)
        barrier.bytes += size
        if abs(barrier.bytes) > _MOST_TX:
            raise Fault(Kind.BARRIER, f"byte count of mbarrier {at:#x} overflows")
        if size < 0:
            self._turn(barrier)

    def trace_copy(self, at: int, issued: tuple[Location, int]) -> None:
        """A copy was issued that the current phase of an mbarrier waits for."""
        if self.cluster.log.trace is not None:
            key = (self.number, at, self.barrier(at).phase)
            self.cluster.log.trace.copy(key, *issued)

    def _turn(self, barrier: MBarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.known, barrier.told = barrier.told, None
            barrier.phase += 1
            barrier.pending = barrier.count
            self.cluster.engine.progress()
