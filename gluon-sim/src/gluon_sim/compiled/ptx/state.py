"""The machine that PTX runs on: warps with their registers, and the blocks of a cluster."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind, Location, Log
from gluon_sim.compiled.core.schedule import Engine, Pending, Schedule, Strand
from gluon_sim.compiled.ptx.block import Block, NamedBarrier
from gluon_sim.compiled.ptx.races import BULK, COPIES, LOADS, PRODUCTS, Clocks, Event

if TYPE_CHECKING:
    from gluon_sim.compiled.core.memory import Memory
    from gluon_sim.compiled.ptx.parse import Instruction, Kernel
    from gluon_sim.compiled.ptx.units.tensor_map import TensorMap
    from gluon_sim.stream import Launch as StreamLaunch

LANES = np.arange(32)
ALL = np.ones(32, bool)
PARAMETER_BASE = 0x7FEE_0000_0000  # generic address of the first tensor map
PARAMETER_STEP = 256
RANK_SHIFT = 24  # of a shared address: the block of the cluster
OFFSET = (1 << RANK_SHIFT) - 1


class Warp(Strand):
    """32 lanes with their registers, and the work that this warp waits for itself."""

    def __init__(self, block: Block, index: int) -> None:
        cluster = block.cluster
        self.block: Block = block
        self.cluster: Cluster = cluster
        self.kernel: Kernel = cluster.kernel
        self.index, self.pc, self.done = index, 0, False
        self.number = block.rank * (self.kernel.threads // 32) + index
        self.clocks: Clocks = cluster.clocks
        self.mask, self.full = ALL, True
        self.splits: list[Split] = []
        self.threads: Array = (index * 32 + LANES).astype(np.uint32)
        word = cluster.engine.schedule.poison_word
        sizes = self.kernel.names.sizes
        u16 = np.full((sizes["b16"] + 1, 32), word & 0xFFFF, np.uint16)
        u32 = np.full((sizes["b32"] + 1, 32), word, np.uint32)
        u64 = np.full((sizes["b64"] + 1, 32), word << 32 | word, np.uint64)
        self.regs: dict[str, Array] = {
            "u16": u16,
            "s16": u16.view(np.int16),
            "u32": u32,
            "s32": u32.view(np.int32),
            "f32": u32.view(np.float32),
            "u64": u64,
            "s64": u64.view(np.int64),
            "f64": u64.view(np.float64),
            "pred": np.full((sizes["pred"] + 1, 32), bool(cluster.engine.schedule.seed % 2)),
        }
        self.hits = [0] * len(self.kernel.code)
        self.registers = self.kernel.registers
        self.waiting_at: tuple[str, int, int] | None = None
        self.met = 0
        self.waits = True  # False: waits for mbarriers return at once
        self.groups: dict[str, deque[list[Pending]]] = {k: deque() for k in GROUPS}
        self.open: dict[str, list[Pending]] = {k: [] for k in GROUPS}
        self.loads: list[Pending] = []
        self.stores: list[Pending] = []
        self.loading: frozenset[int] = frozenset()
        self.in_flight: frozenset[int] = frozenset()
        """Registers that wgmma writes until it is waited for."""
        self.first_copy: tuple[Location, int] | None = None
        """The first cp.async since the last arrival or wait, and the products before it."""

    def where(self) -> Location:
        """The instruction it is at."""
        code = self.kernel.code
        return code[self.pc].where if self.pc < len(code) else Location()

    def who(self) -> str:
        """Block and warp."""
        return f"block {self.block.number} warp {self.index}"

    def own_pending(self) -> list[Pending]:
        """tcgen05.ld and st, which no queue orders."""
        return [*self.loads, *self.stores]

    def together(self, what: str) -> None:
        """Fault unless all lanes are here."""
        if not self.full:
            raise Fault(Kind.DIVERGENCE, f"{what} by some lanes of a warp")

    def one(self, values: Array) -> int:
        """The value that all active lanes have."""
        active = values if self.full else values[self.mask]
        if not (active == active[0]).all():
            raise Fault(Kind.DIVERGENCE, "lanes differ in an operand that must be the same in all")
        return int(active[0])

    def active(self) -> list[int]:
        """The lanes that execute this instruction."""
        return [int(lane) for lane in np.flatnonzero(self.mask)]

    def issue(self, kind: str, work: Pending) -> None:
        """Work that the warp collects in groups and waits for."""
        self.open[kind].append(work)

    def event(self) -> Event:
        """An access of this warp, now."""
        return self.clocks.now(self.number)

    def let_next_launch_begin(self) -> None:
        """griddepcontrol.launch_dependents."""
        self.cluster.launch.stream.release(self.cluster.program)

    def wait_for_launch_in_front(self) -> None:
        """griddepcontrol.wait."""
        ended = self.cluster.launch.stream.wait(self.cluster.program)
        for slot, launch in enumerate(self.cluster.memory.running):
            if launch.number in ended:
                self.clocks.hear_launch_end(self.number, slot)

    def commit(self, kind: str) -> None:
        """Close the open group."""
        if (
            self.first_copy is not None
            and self.cluster.log.trace is not None
            and kind == "cp.async"
        ):
            self.cluster.log.trace.copy(id(self.open[kind]), *self.first_copy)
            self.first_copy = None
        self.groups[kind].append(self.open[kind])
        self.open[kind] = []

    def wait(self, kind: str, left: int) -> None:
        """Complete all groups but the youngest `left`."""
        if self.cluster.log.trace is not None and kind == "cp.async":
            for group in list(self.groups[kind])[: len(self.groups[kind]) - left]:
                self.cluster.log.trace.wait(id(group), self.where(), self.block.products)
        while len(self.groups[kind]) > left:
            for work in self.groups[kind].popleft():
                work.finish()
                self.clocks.finish(self.number, WORK[kind], work.time)
        if kind == "wgmma":
            waiting = [*self.open[kind], *(x for group in self.groups[kind] for x in group)]
            self.in_flight = frozenset().union(*(work.registers for work in waiting))

    def advance(self, quantum: int) -> int:
        """Run up to so many instructions; returns how many."""
        code, ran = self.kernel.code, 0
        while ran < quantum and not self.done:
            if self.splits:
                self._meet()
            at = self.pc
            instruction = code[at]
            if self.loading and not self.loading.isdisjoint(instruction.uses):
                self._finish_loads()
            if self.in_flight and not self.in_flight.isdisjoint(instruction.uses):
                self._check_in_flight(instruction)
            mask, full = self.mask, self.full
            if instruction.guard is not None:
                on = self.regs["pred"][instruction.guard]
                self.mask = (~on if instruction.negated else on) & mask
                self.full = bool(self.mask.all())
                if not self.mask.any():
                    self.mask, self.full = mask, full
                    self.pc += 1
                    ran += 1
                    continue
            if instruction.jumps:
                self._branch(instruction.target, mask, full)
            else:
                if instruction.run(self) is True:
                    self.mask, self.full = mask, full
                    return ran
                self.mask, self.full = mask, full
                if self.pc == at:
                    self.pc = at + 1
            ran += 1
            self.hits[at] += 1
        return ran

    def _check_in_flight(self, instruction: Instruction) -> None:
        if not instruction.op.startswith("wgmma"):
            raise Fault(Kind.IN_FLIGHT, "a register that a product in flight writes")

    def _finish_loads(self) -> None:
        """The machine waits for a tcgen05.ld at the first use of what it loads."""
        for load in self.loads:
            load.finish()
        self.clocks.finish(self.number, LOADS)
        self.loading = frozenset()

    def _branch(self, target: int, mask: Array, full: bool) -> None:
        taken = self.mask
        self.mask, self.full = mask, full
        if (taken == mask).all():
            self.pc = target
            return
        meeting = self.kernel.meetings[self.pc]
        self.splits.append(Split(meeting, mask, np.zeros(32, bool), [(target, taken.copy())]))
        self.mask, self.full = mask & ~taken, False
        self.pc += 1
        self.cluster.log.note("divergent branch")

    def _meet(self) -> None:
        """Lanes of a split stop where they meet until all of them are there."""
        while self.splits and self.pc == self.splits[-1].meeting:
            split = self.splits[-1]
            split.here = split.here | self.mask
            if split.others:
                self.pc, self.mask = split.others.pop()
            else:
                self.mask = split.here
                self.splits.pop()
        self.full = bool(self.mask.all())


@dataclass
class Split:
    """Lanes that parted at a branch: where they meet, who is there, and who has yet to run."""

    meeting: int
    all: Array
    here: Array
    others: list[tuple[int, Array]]


WORK = {"wgmma": PRODUCTS, "bulk": BULK, "cp.async": COPIES}
GROUPS = tuple(WORK)
"""Work that a warp commits in groups."""


@dataclass
class Launch:
    """What all clusters of a launch share."""

    kernel: Kernel
    memory: Memory
    shared: int
    parameters: dict[str, bytes]
    maps: dict[int, TensorMap]
    blocks: int
    stream: StreamLaunch
    strict_loads: bool = True


class Cluster:
    """The blocks that run together."""

    def __init__(self, launch: Launch, first: int, size: int, schedule: Schedule, log: Log) -> None:
        self.launch, self.kernel, self.memory = launch, launch.kernel, launch.memory
        self.log = log
        self.engine = Engine(schedule, log)
        self.program = first // size
        self.clocks = Clocks(size * (self.kernel.threads // 32), size)
        self.blocks: list[Block] = [
            Block(self, rank, first + rank, launch.shared) for rank in range(size)
        ]
        self.engine.queues = [block.queue for block in self.blocks]
        warps = range(self.kernel.threads // 32)
        self.warps = [Warp(block, index) for block in self.blocks for index in warps]
        self.meeting = NamedBarrier(32 * len(self.warps))

    def place(self, address: int) -> tuple[Block, int]:
        """The block and the offset of a shared::cluster address."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.blocks):
            raise Fault(Kind.BOUNDS, f"no block has shared address {address:#x}")
        return self.blocks[rank], address & OFFSET

    def run(self) -> int:
        """Run to the end; returns the number of instructions."""
        total = self.engine.run(self.warps)
        for work in self.engine.pool:
            if work.kind == "store":
                work.finish()  # the grid ends when its stores are done
            elif not work.done:
                self.log.note(f"{work.kind} in flight at exit")
        for block in self.blocks:
            if block.queue:
                kinds = ", ".join(sorted({work.kind for work in block.queue}))
                self.log.note(f"tcgen05 work in flight at exit: {kinds}")
            if block.columns is not None:
                raise Fault(Kind.AT_EXIT, "tensor memory was not freed")
        return total
