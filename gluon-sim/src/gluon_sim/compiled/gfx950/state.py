"""The machine that gfx950 code runs on: waves of 64 lanes, and the LDS that a workgroup shares.

Every register knows which of its lanes were written, and every byte of LDS whether it was. A load
or a copy occupies its bytes and its destination from its issue to the wait that covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, MASK64, Array
from gluon_sim.compiled.core.report import Fault, Finding, Kind, Location, Log
from gluon_sim.compiled.core.schedule import Engine, Pending, Schedule, Strand
from gluon_sim.compiled.gfx950.races import Races

if TYPE_CHECKING:
    from gluon_sim.compiled.core.memory import Memory
    from gluon_sim.compiled.gfx950.parse import Kernel

LANES = np.arange(64)
_ALL = np.ones(64, bool)
VCC, M0, EXEC = 106, 124, 126
ACCUMULATORS = 256  # a0 is vector register 256: they are one file
_VECTOR_REGISTERS, _SCALAR_REGISTERS = 512, 128


def lanes_of(word: int) -> Array:
    """The lanes whose bits are set."""
    raw = np.frombuffer(word.to_bytes(8, "little"), np.uint8)
    lanes: Array = np.unpackbits(raw, bitorder="little").astype(bool)
    return lanes


def word_of(lanes: Array) -> int:
    """One bit per lane."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Access(Pending):
    """A memory instruction that is counted until a wait covers it."""

    __slots__ = ("bytes", "epoch", "into", "products", "values", "write")

    def __init__(
        self,
        wave: Wave,
        run: Callable[[], object],
        lds: Array | None = None,
        write: bool = False,
        into: Sequence[int] = (),
        values: Array | None = None,
    ) -> None:
        super().__init__("access", run, wave)
        self.bytes, self.write, self.into, self.epoch = lds, write, into, wave.epoch
        self.values = values  # of the bytes that it writes, if they are known when it is issued
        self.products = wave.products

    def overlaps(self, at: Array) -> bool:
        """Whether it touches any of these bytes of LDS."""
        own = self.bytes
        if own is None or not own.size or not at.size:
            return False
        if int(own.max()) < int(at.min()) or int(at.max()) < int(own.min()):
            return False
        return bool(np.isin(at, own, kind="table").any())


class Wave(Strand):
    """64 lanes: vector and scalar registers, EXEC, SCC, and the accesses in flight."""

    def __init__(self, group: Workgroup, index: int) -> None:
        word = group.engine.schedule.poison_word
        self.group: Workgroup = group
        self.index, self.done, self.pc = index, False, 0
        self.v = np.full((_VECTOR_REGISTERS, 64), word, np.uint32)
        self.f = self.v.view(np.float32)
        self.written = np.zeros((_VECTOR_REGISTERS, 64), bool)
        self.whole = [False] * _VECTOR_REGISTERS  # every lane was written
        self.s = [word] * _SCALAR_REGISTERS
        self.s_written = [False] * _SCALAR_REGISTERS
        self.scc: int = 0
        self.saturate = False
        self.mask, self.full = _ALL, True
        self.any: bool = True
        self.set64(EXEC, MASK64)
        self.epoch = self.products = 0
        self.at_barrier = self.released = False
        self.scratch: dict[int, Array] = {}
        """Memory of the lanes' own, word by word."""
        self.vector_memory: list[Access] = []
        self.local: list[Access] = []
        self.hits = [0] * len(group.kernel.code)

    def where(self) -> Location:
        """The instruction it is at."""
        code = self.group.kernel.code
        return code[self.pc].where if self.pc < len(code) else Location()

    def who(self) -> str:
        """Workgroup and wave."""
        return f"workgroup {self.group.number} wave {self.index}"

    def own_pending(self) -> list[Pending]:
        """The oldest access of each counter: results come in order."""
        queues = (self.vector_memory, self.local)
        return [next(x for x in q if not x.done) for q in queues if any(not x.done for x in q)]

    def get64(self, number: int) -> int:
        """A pair of scalar registers."""
        return self.s[number] | self.s[number + 1] << 32

    def set64(self, number: int, value: int) -> None:
        """Write a pair of scalar registers."""
        self.set32(number, value & MASK32)
        self.set32(number + 1, (value >> 32) & MASK32)

    def set32(self, number: int, value: int) -> None:
        """Write a scalar register; EXEC decides which lanes are on."""
        self.s[number] = value
        self.s_written[number] = True
        if number in (EXEC, EXEC + 1):
            lanes = self.get64(EXEC)
            self.full, self.any = lanes == MASK64, lanes != 0
            self.mask = _ALL if self.full else lanes_of(lanes)

    def set(self, number: int, values: Array) -> None:
        """Write active lanes of a vector register."""
        if self.full:
            self.v[number] = values
            self.whole[number] = True
            self.written[number] = True
            return
        np.copyto(self.v[number], values, where=self.mask)
        self.mark(number, self.mask, True)

    def setf(self, number: int, values: Array) -> None:
        """Write active lanes with float32 values."""
        self.set(number, values.astype(np.float32).view(np.uint32))

    def mark(self, number: int, lanes: Array, written: Array | bool) -> None:
        """Lanes of a register are written, or in flight."""
        np.copyto(self.written[number], written, where=lanes)
        self.whole[number] = bool(self.written[number].all())

    def issue(self, queue: list[Access], access: Access) -> None:
        """Count an access; its destination is poison until it is complete."""
        queue.append(access)
        if self.group.engine.early(copy=queue is self.vector_memory):
            access.finish()
            return
        for number in access.into:
            self.v[number][self.mask] = self.group.engine.schedule.poison_word
            self.mark(number, self.mask, False)

    def retire(self, queue: list[Access], left: int) -> None:
        """Wait until so many accesses are in flight."""
        trace = self.group.log.trace
        while len(queue) > left:
            access = queue.pop(0)
            access.finish()
            if trace is not None and queue is self.vector_memory and (access.write or access.into):
                trace.copy(id(access), access.where, access.products)
                trace.wait(id(access), self.where(), self.products)
            if access.bytes is not None:
                span, races = range(access.epoch, self.epoch + 1), self.group.races
                if access.write:
                    races.write(access.bytes, self.index, span, access.values)
                else:
                    races.read(access.bytes, self.index, span)

    def advance(self, quantum: int) -> int:
        """Run up to so many instructions; returns how many."""
        code, ran = self.group.kernel.code, 0
        while ran < quantum and not self.done:
            at = self.pc
            instruction = code[at]
            for number in instruction.reads:
                if not self.whole[number] and not self.written[number][self.mask].all():
                    self.report(Kind.UNINITIALIZED, f"v{number} is unwritten or in flight")
            for number in instruction.scalar_reads:
                if not self.s_written[number]:
                    self.report(Kind.UNINITIALIZED, f"s{number} is unwritten or in flight")
            if instruction.run(self) is True:
                return ran
            if self.pc == at:
                self.pc = at + 1
            ran += 1
            self.hits[at] += 1
        return ran

    def report(self, kind: Kind, message: str) -> None:
        """Record a fault that the run survives."""
        self.group.log.add(Finding(kind, message, self.where(), self.who()))


class Workgroup:
    """Waves that run together, their LDS and their barrier."""

    def __init__(
        self, kernel: Kernel, memory: Memory, lds: int, number: int, schedule: Schedule, log: Log
    ) -> None:
        self.kernel, self.memory, self.number, self.log = kernel, memory, number, log
        self.engine = Engine(schedule, log)
        self.lds = np.full(lds, schedule.poison_byte, np.uint8)
        self.lds_written = np.zeros(lds, bool)
        self.races = Races(lds)
        self.waves: list[Wave] = []

    def meet(self) -> None:
        """Open the barrier if every wave that still runs is at it."""
        running = [wave for wave in self.waves if not wave.done]
        if not running or not all(wave.at_barrier for wave in running):
            return
        if len(running) < len(self.waves):
            self.log.note("a barrier without the waves that have ended")
        for wave in running:
            wave.at_barrier, wave.released = False, True
            wave.epoch += 1
        self.engine.progress()

    def run(self) -> int:
        """Run to the end; returns the number of instructions."""
        total = self.engine.run(self.waves)
        for wave in self.waves:
            for access in wave.vector_memory:
                if access.bytes is not None:
                    raise Fault(Kind.AT_EXIT, "a copy to LDS was never waited for").at(
                        access.where, wave.who()
                    )
            wave.retire(wave.vector_memory, 0)
            wave.retire(wave.local, 0)
        for found in self.races.found():
            self.log.add(Finding(Kind.RACE, found, who=f"workgroup {self.number}"))
        self.log.note("waves that write the same bytes of LDS", self.races.shared_writes)
        return total
