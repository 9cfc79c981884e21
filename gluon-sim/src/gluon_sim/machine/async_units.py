"""Asynchronous units: operations that are issued now and finish when the scheduler says so.

An operation reads and writes memory at some moment between its issue and its end; the simulator
moves the data at the end, and the race check treats the whole span as the access. Operations on
one channel (`after`) finish in order. What an operation publishes to a barrier is its own
completion and what its issuer had waited for before the issue, but not the issuer's own reads and
writes: those take an arrive of the issuer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gluon_sim.machine.clocks import Access, Clock, Component
from gluon_sim.machine.context import current, here
from gluon_sim.report.findings import Kind

if TYPE_CHECKING:
    from gluon_sim.machine.scheduler import Agent
    from gluon_sim.memory.views import MemoryView
    from gluon_sim.values.tensors import Tensor


class AsyncOp:
    """One operation in flight."""

    def __init__(self, agent: Agent, unit: str, what: str, work: float) -> None:
        self.agent = agent
        self.unit = unit  # "copy" or "mma", for the nominal clock
        self.what = what
        self.where = here()
        self.done = False
        self.waited = False
        self.paired = False  # spans both CTAs of a cluster
        self.after: Sequence[AsyncOp] = ()
        self.accesses: list[Access] = []
        self.completion = Clock()
        self.channel: Component = None
        self.time = 0  # of its channel, from its issue on
        self.run: Callable[[], None] = lambda: None
        self.on_done: list[Callable[[], None]] = []
        self.start_time = 0.0
        self.finish_time = 0.0
        self._work = work
        self._smem = 0

    def issue(
        self,
        channel: Component,
        reads: Sequence[MemoryView] = (),
        writes: Sequence[MemoryView] = (),
        in_order: bool = True,
        generic: bool = False,
    ) -> None:
        """Check the accesses against everything before, and take off.

        `in_order`: operations of this channel follow one another without synchronization.
        `generic`: it goes through the ordinary proxy, so wgmma and TMA must be fenced from it.
        """
        agent = self.agent
        time = agent.scheduler.next_time(channel)
        self.channel, self.time = channel, time
        known = agent.clock.copy()
        if in_order:
            known.seen[channel] = time
        for view, write in [(v, False) for v in reads] + [(v, True) for v in writes]:
            made = Access(view.cells(), write, channel, time, self.what, self.where, generic)
            if not write and not view.fully_written:
                self._report_unwritten(view)
            agent.check(view, made, known)
            self.accesses.append(made)
        self.completion = agent.clock.copy()
        self.completion.forget(agent.component)
        self.completion.seen[channel] = time
        if not generic:
            self.completion.fenced[channel] = time
        agent.warps.touched |= any(v.alloc.space == "shared" for v in (*reads, *writes))
        if self.accesses:
            agent.cta.issued[channel] = (time, self)
        agent.clock.tick(agent.component)
        self._smem = sum(v.nbytes for v in (*reads, *writes) if v.alloc.space == "shared")
        self._smem //= 2 if self.paired else 1  # each CTA reads its own half, for both
        self._schedule()
        agent.scheduler.flying.append(self)

    def _report_unwritten(self, view: MemoryView) -> None:
        """A read may be satisfied by an operation ahead of it on the same channel."""
        pending = any(
            a.write and a.cells & view.cells() for op in self._ahead() for a in op.accesses
        )
        if not pending:
            self.report(
                Kind.UNWRITTEN,
                f"{self.what}: {view.label} was not completely written",
                buffer=view.alloc.name,
                stage=view.stage,
            )

    def _ahead(self) -> list[AsyncOp]:
        found, stack = [], list(self.after)
        while stack:
            op = stack.pop()
            if not op.done:
                found.append(op)
                stack.extend(op.after)
        return found

    def _schedule(self) -> None:
        scheduler = self.agent.scheduler
        if not scheduler.timed:
            return
        rates, cta = scheduler.rates, self.agent.cta.name
        lane = f"{cta} {self.unit}"
        self.start_time = max(self.agent.time, scheduler.unit_free.get(lane, 0.0))
        end = self.start_time + self._work / rates.cost[self.unit]
        if rates.smem_bytes and self._smem:
            served = self.start_time + self._smem / rates.smem_bytes
            scheduler.note(f"{cta} smem", "smem", self.what, self.start_time, served)
            end = max(end, served)
        scheduler.unit_free[lane] = end
        earlier = max((op.finish_time for op in self.after), default=0.0)
        self.finish_time = max(end + rates.latency[self.unit], earlier)
        if self._work:
            scheduler.note(lane, self.unit, self.what, self.start_time, end)

    def may_finish(self) -> bool:
        """Whether everything ahead on its channel has finished."""
        return all(op.done for op in self.after)

    def finish(self) -> None:
        """Move the data, signal, and leave."""
        if self.done:
            return
        for op in self.after:
            op.finish()
        self.run()
        self.done = True
        self.after = ()
        self.agent.scheduler.flying.remove(self)
        for signal in self.on_done:
            signal()

    def report(self, kind: Kind, message: str, **details: Any) -> None:
        """A finding at the line that issued the operation."""
        self.agent.report(kind, message, **{"where": self.where, **details})

    def check_finished(self, tensor: Tensor) -> None:
        """Called when a kernel reads an accumulator: it must have been waited for."""
        if not self.waited:
            current().report(
                Kind.ACCUMULATOR,
                f"the result of {self.what} ({self.where}) is used before a wait that covers it",
            )
            self.finish()
        tensor.pending = None


class Queue:
    """Operations of one partition and unit that finish in issue order."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent = agent
        self.channel = (agent.component, name)
        self.last: AsyncOp | None = None
        self.open: list[AsyncOp] = []  # issued and not waited for
        self.covered = Clock()  # completions that an earlier arrive already stands for

    def issue(
        self,
        op: AsyncOp,
        reads: Sequence[MemoryView] = (),
        writes: Sequence[MemoryView] = (),
    ) -> None:
        """Issue behind the last operation of this queue."""
        op.after = (self.last,) if self.last is not None and not self.last.done else ()
        op.issue(self.channel, reads, writes)
        self.last = op
        self.open.append(op)

    def wait(self, outstanding: int, reason: str) -> list[AsyncOp]:
        """Wait until at most `outstanding` operations are open; returns those now finished."""
        agent = self.agent
        keep = max(len(self.open) - outstanding, 0)
        finished, self.open = self.open[:keep], self.open[keep:]
        wait_for_all(agent, finished, reason)
        return finished


def wait_for_all(agent: Agent, ops: Sequence[AsyncOp], reason: str) -> None:
    """Block until all of `ops` are done, and learn that they are."""
    blocked = any(not op.done for op in ops)
    if agent.scheduler.observer is not None:
        agent.scheduler.observer.waited(reason, blocked)
    if blocked:
        agent.wait(
            lambda: all(op.done for op in ops),
            lambda: reason,
            lambda: max(op.finish_time for op in ops),
        )
    else:
        agent.yield_()
    for op in ops:
        op.waited = True
        agent.clock.join(op.completion)


def queue(name: str) -> Queue:
    """The running partition's queue for a unit."""
    agent = current()
    found = agent.queues.get(name)
    if found is None:
        made = Queue(agent, name)
        agent.queues[name] = [made]
        return made
    only: Queue = found[0]
    return only
