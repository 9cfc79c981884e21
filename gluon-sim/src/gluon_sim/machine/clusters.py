"""The machine a kernel runs on: clusters of one or two CTAs, their memories and barriers."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from typing import Any

from gluon_sim.machine.async_units import AsyncOp
from gluon_sim.machine.barriers import MBarrier, NamedBarrier
from gluon_sim.machine.clocks import Clock, Component
from gluon_sim.machine.context import current, here
from gluon_sim.machine.scheduler import Agent, Scheduler
from gluon_sim.memory.history import History
from gluon_sim.memory.views import MemoryView, allocate
from gluon_sim.report.findings import Kind
from gluon_sim.stream import Launch
from gluon_sim.values.dtypes import DType
from gluon_sim.values.layouts import cta_basis, is_barrier_layout, split_axis

NAMED_BARRIERS = 16  # of a CTA
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(?::[^=]+)?=[^=]")


class Cluster:
    """The CTAs that run one program of the grid, and what they share."""

    def __init__(self, machine: Machine, program: tuple[int, int, int]) -> None:
        self.machine = machine
        self.program = program
        self.size = machine.num_ctas
        self.ctas = [Cta(self, rank) for rank in range(self.size)]
        self._views: dict[tuple[str, int, int], MemoryView] = {}
        self._barriers: dict[tuple[int, int, int], MBarrier] = {}
        self.paired_products = False
        self._initialized: dict[tuple[int, int], set[int]] = {}
        self._waiting = 0
        self._generation = 0
        self._arriving = Clock()
        self._published = Clock()

    def allocate(
        self, agent: Agent, space: str, dtype: DType, shape: Sequence[int], layout: Any
    ) -> MemoryView:
        """The allocation a line makes; in a cluster both CTAs share it, split by its layout."""
        count = agent.queues.setdefault("allocations", [])
        count.append(None)
        shared = split_axis(layout) is not None or is_barrier_layout(layout)
        key = (agent.name, len(count), -1 if shared else agent.cta.rank)
        if key not in self._views:
            view = allocate(_variable(space), space, dtype, shape, layout)
            self._views[key] = view
            self.machine.count_memory(self, view)
            if agent.scheduler.observer is not None:
                agent.scheduler.observer.allocated(view)
        return self._views[key]

    def views(self) -> list[MemoryView]:
        """All allocations so far."""
        return list(self._views.values())

    # -- mbarriers
    def barrier(self, view: MemoryView, rank: int) -> MBarrier:
        """The mbarrier at `view` that CTA `rank` uses. A pair barrier lives in CTA 0 only."""
        key = self._key(view, rank)
        if key not in self._barriers:
            current().report(
                Kind.BARRIER,
                f"mbarrier {view.label} is used before it was initialized",
                buffer=view.alloc.name,
                stage=view.stage,
            )
            self._barriers[key] = MBarrier(view.alloc.name, 1, view.stage)
        return self._barriers[key]

    def initialize(self, view: MemoryView, rank: int, count: int) -> None:
        """mbarrier.init by CTA `rank`.

        The compiler makes the CTAs meet after it, so the first one to come initializes for both. A
        pair barrier takes the arrivals of both CTAs, hence twice the count.
        """
        pair = self.shared_by_pair(view)
        again = rank in self._initialized.setdefault((id(view.alloc), view.offset), set())
        self._initialized[id(view.alloc), view.offset].add(rank)
        for other in range(self.size):
            key = self._key(view, other)
            if key not in self._barriers or (again and other == rank):
                total = count * (self.size if pair else 1)
                self._barriers[key] = MBarrier(view.alloc.name, total, view.stage)

    def completed(self, view: MemoryView) -> int | None:
        """Phases that all mbarriers of an allocation have completed, in the CTA with most of them;
        None if it has no mbarriers."""
        phases: dict[int, list[int]] = {}
        for (alloc, _, rank), barrier in self._barriers.items():
            if alloc == id(view.alloc):
                phases.setdefault(rank, []).append(barrier.generation)
        return max(map(min, phases.values())) if phases else None

    def shared_by_pair(self, view: MemoryView) -> bool:
        """Whether both CTAs use the same mbarrier: its layout gives the second CTA no step."""
        if self.size == 1 or not self.machine.pair_barriers:
            return False
        basis = cta_basis(view.layout)
        return basis is not None and not any(basis)

    def _key(self, view: MemoryView, rank: int) -> tuple[int, int, int]:
        return id(view.alloc), view.offset, 0 if self.shared_by_pair(view) else rank

    def sync(self, agent: Agent) -> None:
        """A barrier of all threads of all CTAs; it never completes for a part of the threads."""
        if self.size == 1:
            return
        if agent.name != "main":
            agent.report(
                Kind.BARRIER,
                "a cluster barrier (of its own, or in front of a two-CTA product) inside a "
                "partition: the hardware waits for all threads of the cluster",
            )
        generation = self._generation
        self._arriving.join(agent.clock)
        agent.clock.tick(agent.component)
        self._waiting += 1
        if self._waiting == self.size:
            self._waiting, self._generation = 0, generation + 1
            self._published, self._arriving = self._arriving, Clock()
        if agent.scheduler.observer is not None:
            agent.scheduler.observer.waited("the cluster", self._generation == generation)
        agent.wait(lambda: self._generation != generation, lambda: "the cluster barrier")
        agent.clock.join(self._published)


class Cta:
    """One CTA: a rank in its cluster, and its named barriers."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        x, y, z = cluster.program
        width, height, _ = cluster.machine.grid
        self.program = x + width * (y + height * z)
        suffix = f".{rank}" if cluster.size > 1 else ""
        self.name = f"cta{self.program}{suffix}"
        self._named: dict[int, NamedBarrier] = {}
        self._workers: int | None = None
        self.issued: dict[Component, tuple[int, AsyncOp]] = {}  # the last operation per channel

    def check_exit(self, clock: Clock) -> None:
        """At the end of the main partition every operation must be known to have finished."""
        for channel, (time, op) in self.issued.items():
            if clock.seen.get(channel, 0) < time:
                op.report(Kind.IN_FLIGHT, f"{op.what} may still be in flight when the kernel ends")

    def named_barrier(self, number: int, threads: int) -> NamedBarrier:
        """Named barrier `number`; every use must agree on its thread count."""
        self._check_free(number)
        if not 0 <= number < NAMED_BARRIERS or threads % 32 or not threads:
            _misused(number, f"there is none for {threads} threads, which must be whole warps")
        barrier = self._named.setdefault(number, NamedBarrier(number, threads))
        if barrier.threads != threads:
            current().report(
                Kind.ARRIVE,
                f"named barrier {number} is used with {threads} and with {barrier.threads} threads",
                buffer=f"barrier {number}",
            )
        return barrier

    def specialize(self, workers: int) -> None:
        """The kernel splits its warps into the default partition and `workers` others."""
        self._workers = workers
        for number in self._named:
            self._check_free(number)

    def _check_free(self, number: int) -> None:
        """The compiler's own barriers (Triton 3.6 and 3.9): 0 for the default partition's warps;
        in a kernel with other partitions 1 to start and end them, 2, 3 … for the warps of each."""
        if number < (1 if self._workers is None else 2 + self._workers):
            _misused(number, "the compiler uses it for the barriers that it adds")


class Machine:
    """Runs a grid: a few clusters at a time, the next one when one has finished."""

    def __init__(
        self,
        scheduler: Scheduler,
        grid: tuple[int, int, int],
        num_warps: int,
        num_ctas: int,
        pair_barriers: bool,
        history: History,
        launched: Launch,
    ) -> None:
        self.scheduler = scheduler
        self.history = history
        self.launched = launched
        self.grid = grid
        self.num_warps = num_warps
        self.num_ctas = num_ctas
        self.pair_barriers = pair_barriers
        self.shared_bytes = 0
        self.tmem_columns = 0

    def programs(self) -> list[tuple[int, int, int]]:
        """All program ids, x fastest."""
        width, height, depth = self.grid
        return [(x, y, z) for z in range(depth) for y in range(height) for x in range(width)]

    def launch(self, program: tuple[int, int, int], body: Callable[[], None]) -> list[Agent]:
        """Create the main partition of every CTA of a cluster."""
        cluster = Cluster(self, program)
        agents = []
        for cta in cluster.ctas:
            agent = Agent(self.scheduler, cta, "main", self.num_warps)
            agent.time = self.scheduler.last_end
            self.scheduler.agents.append(agent)
            agent.start(body)
            agents.append(agent)
        return agents

    def count_memory(self, cluster: Cluster, view: MemoryView) -> None:
        """Keep the largest per-CTA use of shared and tensor memory."""
        shared = columns = 0
        for v in cluster.views():
            parts = 2 if v.split is not None else 1
            if v.alloc.space == "shared":
                shared += v.nbytes // parts
            else:
                row = v.shape[-1] * v.dtype.itemsize
                stages = v.numel // (v.shape[-1] * v.shape[-2])
                columns += stages * -(-row // 4)
        self.shared_bytes = max(self.shared_bytes, shared)
        self.tmem_columns = max(self.tmem_columns, columns)


def _misused(number: int, message: str) -> None:
    text = f"named barrier {number}: {message}"
    current().report(Kind.BARRIER, text, buffer=f"barrier {number}")


def _variable(fallback: str) -> str:
    """The name the kernel gives to what it is allocating, from its source line."""
    where = here()
    for back in range(4):  # the call may be wrapped over several lines
        found = _ASSIGNED.match(linecache.getline(where.file, where.line - back))
        if found:
            return found.group(1)
    return f"{fallback}@{where.line}"
