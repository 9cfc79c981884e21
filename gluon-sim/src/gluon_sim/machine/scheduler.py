"""Who runs when. Partitions are Python threads that pass one baton; nothing runs in parallel.

Whoever gives the baton up decides who gets it next: a partition that can run, or an asynchronous
operation that may finish now. The decision comes from a seeded generator, so one seed is one run.

Policies: "early" finishes every asynchronous operation as soon as it may, "late" only when nothing
else can run, "random" mixes, "timed" advances a nominal clock and gives the pipeline picture.
"unfair" draws priorities: partitions run far ahead of one another, as far as their barriers let
them, and of some channels operations are as late as they may be, of others as early.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from gluon_sim.machine import context
from gluon_sim.machine.clocks import Access, Clock, Component, LaunchEnd
from gluon_sim.machine.context import Location, here
from gluon_sim.machine.warps import Warps
from gluon_sim.report.findings import Finding, Kind, Log
from gluon_sim.report.timeline import NOMINAL, SharedUnit, Timeline

if TYPE_CHECKING:
    from gluon_sim.machine.async_units import AsyncOp
    from gluon_sim.machine.barriers import MBarrier
    from gluon_sim.machine.clusters import Cta
    from gluon_sim.memory.views import MemoryView
    from gluon_sim.report.exercise import Observer

POLICIES = ("random", "early", "late", "unfair", "timed")
LAPSE = 0.1
"""How often an unfair choice is a fair one, after which the chosen has another priority: whoever
waits in a loop that reads memory must not run alone."""
CHANGE = 0.01
"""How often a channel of operations becomes a slow or a quick one."""


class Aborted(BaseException):
    """Unwinds a partition after the run has ended. Not an Exception: kernels must not catch it."""


class Agent:
    """One partition of one CTA: a thread, a vector clock, and what it waits for."""

    def __init__(self, scheduler: Scheduler, cta: Cta, name: str, num_warps: int) -> None:
        self.scheduler = scheduler
        self.cta = cta
        self.name = name
        self.num_warps = num_warps
        self.lane = f"{cta.name}/{name}"
        self.component: Component = self.lane
        self.clock = Clock()
        self.clock.tick(self.component)
        self.time = 0.0
        self.branches = 0
        self.warps = Warps(self.clock, self.component)
        self.queues: dict[str, list[Any]] = {}  # asynchronous operations by unit, in issue order
        self.done = False
        self.result: Any = None
        self.condition: Callable[[], bool] | None = None
        self.reason: Callable[[], str] = str
        self.waits_at: Location | None = None
        self.waits_on: MBarrier | None = None
        self.phase: int | None = None  # parity of the last mbarrier phase waited for
        self._go = threading.Lock()  # held, but for the moment when the baton is handed over
        self._go.acquire()
        self._thread: threading.Thread | None = None

    # -- running
    def start(self, body: Callable[[], Any]) -> None:
        """Create the thread; it runs when it first gets the baton."""

        def run() -> None:
            np.seterr(all="ignore")
            context.enter(self)
            self._go.acquire()
            try:
                if not self.scheduler.ended:
                    self.result = body()
            except Aborted:
                pass
            except BaseException as error:  # a defect of the kernel, or of the simulator
                self.scheduler.fail(self, error)
            self.done = True
            self.scheduler.retire(self)

        self._thread = threading.Thread(target=run, daemon=True, name=self.lane)
        self._thread.start()

    def resume(self) -> None:
        """Hand the baton to this partition."""
        self._go.release()

    def _sleep(self) -> None:
        self._go.acquire()
        if self.scheduler.ended:
            raise Aborted

    def interrupt(self) -> None:
        """Raise `Aborted` in this partition's thread at its next bytecode."""
        if self._thread is not None and self._thread.ident is not None and not self.done:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self._thread.ident), ctypes.py_object(Aborted))
            with suppress(RuntimeError):  # it was given the baton already
                self.resume()

    def join_thread(self) -> None:
        """Wait until the thread is gone."""
        if self._thread is not None:
            self._thread.join()

    def count_step(self) -> None:
        """A branch of the kernel: bounds loops that never synchronize.

        A loop may also poll global memory, so now and then somebody else gets to run.
        """
        self.scheduler.step()
        self.branches += 1
        if self.branches % 16 == 0:
            self.yield_()

    def yield_(self) -> None:
        """A point where another partition or an asynchronous operation may go first."""
        self.wait(None, str)

    def wait(
        self,
        condition: Callable[[], bool] | None,
        reason: Callable[[], str],
        woken_at: Callable[[], float] = float,
        barrier: MBarrier | None = None,
    ) -> None:
        """Give up the baton until `condition` holds; `barrier` is named if it never does."""
        self.condition, self.reason, self.waits_on = condition, reason, barrier
        started = self.time
        if condition is not None:
            self.waits_at = here()
        chosen = self.scheduler.choose()
        if chosen is not self:
            if chosen is not None:
                chosen.resume()
            self._sleep()
        self.condition = None
        if condition is not None:
            self.time = max(self.time, woken_at())
            if self.time > started:
                self.scheduler.note(self.lane, "wait", reason(), started, self.time)

    # -- launches
    @property
    def launch(self) -> int:
        """The number of the launch that it belongs to."""
        return self.cta.cluster.machine.launched.number

    def let_next_begin(self) -> None:
        """griddepcontrol.launch_dependents."""
        self.cta.cluster.machine.launched.release(self.cta.program)

    def wait_for_launch_in_front(self) -> None:
        """griddepcontrol.wait."""
        for launch in self.cta.cluster.machine.launched.wait(self.cta.program):
            self.clock.seen[LaunchEnd(launch)] = 1

    # -- effects
    def charge(self, amount: Any, unit: str = "vector", split: int | None = None) -> None:
        """Advance the nominal clock by the cost of `amount` elements on `unit`.

        A CTA pays for its share of a tensor that its cluster splits.
        """
        if self.scheduler.timed:
            rates = self.scheduler.rates
            work = float(amount) / rates.cost[unit]
            work /= 1 if split is None else self.cta.cluster.size
            end = self.time + work * 4 / self.num_warps
            if rates.shared:
                lane = f"{self.cta.name} {unit}"
                end = max(end, self.scheduler.take(lane, unit, self.time, work))
            self.scheduler.note(self.lane, unit, unit, self.time, end)
            self.time = end

    def report(
        self,
        kind: Kind,
        message: str,
        *,
        buffer: str = "",
        stage: int | None = None,
        phase: int | None = None,
        where: Location | None = None,
    ) -> None:
        """Record a finding at the kernel line that is executing."""
        at = where or here()
        phase = self.phase if phase is None else phase
        finding = Finding(
            kind, message, at.file, at.line, self.name, self.cta.program, buffer, stage, phase
        )
        self.scheduler.log.add(finding)
        if self.scheduler.log.full:
            self.scheduler.end("too many findings")

    def access(self, view: MemoryView, write: bool, what: str) -> None:
        """An ordinary access of this partition to shared or tensor memory."""
        made = Access(
            view.cells(),
            write,
            self.component,
            self.clock.seen[self.component],
            what,
            here(),
            generic=view.alloc.space == "shared",
        )
        self.warps.touched |= view.alloc.space == "shared"
        self.warps.unmet |= view.alloc.space == "tensor"
        if write and view.alloc.space == "shared":
            self._check_own_wgmma(view, made)
        elif not write and not view.fully_written:
            self.report(
                Kind.UNWRITTEN,
                f"{view.label} is read before it was completely written",
                buffer=view.alloc.name,
                stage=view.stage,
            )
        self.check(view, made, self.clock)

    def _check_own_wgmma(self, view: MemoryView, made: Access) -> None:
        """A warp that waited for its wgmma says nothing about the other warps of the group."""
        for old in view.alloc.shadow.accesses():
            mine = old.component == (self.component, "wgmma")
            if mine and old.epoch == self.warps.barriers and old.cells & made.cells:
                self.report(
                    Kind.RACE,
                    f"{made.what} with no barrier since the wait for {old.what} ({old.where}): "
                    "other warps of the partition may still be reading",
                    buffer=view.alloc.name,
                    stage=view.stage,
                )

    def check(self, view: MemoryView, made: Access, clock: Clock) -> None:
        """Record an access in the shadow and report what it is not ordered after."""
        if self.scheduler.observer is not None:
            self.scheduler.observer.accessed(view, made.write)
        for conflict in view.alloc.shadow.check(made, clock):
            old = conflict.earlier
            doing = "write" if old.write else "read"
            if conflict.fence:
                message = (
                    f"{made.what} through the asynchronous proxy: no proxy fence after the "
                    f"ordinary write, {old.what} ({old.where})"
                )
            else:
                message = f"{made.what} is not ordered after the {doing}, {old.what} ({old.where})"
            self.report(
                Kind.FENCE if conflict.fence else Kind.RACE,
                message,
                buffer=view.alloc.name,
                stage=view.stage,
                where=made.where,
            )


class Scheduler:
    """The baton, the agents, the operations in flight, and the end of the run."""

    def __init__(self, policy: str, seed: int, step_limit: int, log: Log, record: bool) -> None:
        if policy not in POLICIES:
            raise ValueError(f"schedule: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self.policy = policy
        self.load_alignment = 1
        self.fp8_bits = 0
        self.timed = policy == "timed"
        self.rates = NOMINAL
        self.observer: Observer | None = None
        self.random = random.Random(seed)
        self.log = log
        self.steps = 0
        self.step_limit = step_limit
        self.agents: list[Agent] = []
        self.flying: list[AsyncOp] = []
        self.ended = ""
        self.error: BaseException | None = None
        self.timeline = Timeline() if record else None
        self.unit_free: dict[str, float] = {}  # when each asynchronous unit can take more work
        self.shared_units: dict[str, SharedUnit] = {}
        self._channel_time: dict[Component, int] = {}
        self.on_idle: Callable[[], bool] = bool  # starts more CTAs; false when there are none
        self.last_end = 0.0  # nominal time at which the latest partition ended
        self.changed = True  # an agent came or went since `on_idle` last had nothing to do
        self._over = threading.Semaphore(0)
        self._priority: dict[Agent, float] = {}
        self._slow: dict[Component, bool] = {}

    # -- picture
    def take(self, lane: str, unit: str, ready: float, clocks: float) -> float:
        """Use a unit that others use too, whenever it is free from `ready` on; returns the end."""
        spans = self.shared_units.setdefault(lane, SharedUnit()).take(ready, clocks)
        for start, end in spans:
            self.note(lane, unit, unit, start, end)
        return spans[-1][1] if spans else ready

    def note(self, lane: str, kind: str, label: str, start: float, end: float) -> None:
        """Add a bar to the picture."""
        if self.timeline is not None:
            self.timeline.add(lane, kind, label, start, end)

    def next_time(self, channel: Component) -> int:
        """The next clock value of a channel of asynchronous operations."""
        self._channel_time[channel] = self._channel_time.get(channel, 0) + 1
        return self._channel_time[channel]

    # -- steps and endings
    def step(self) -> None:
        """Count one step; past the limit the run ends."""
        self.steps += 1
        if self.steps > self.step_limit and not self.ended:
            agent = context.current()
            agent.report(Kind.LIMIT, f"the run was stopped after {self.step_limit} steps")
            self.end("step limit")

    def end(self, reason: str) -> None:
        """End the run from inside a partition."""
        self.ended = self.ended or reason
        raise Aborted

    def fail(self, agent: Agent, error: BaseException) -> None:
        """A partition raised: keep the error, end the run."""
        if not self.ended:
            self.ended = "kernel error"
            self.error = error

    def retire(self, agent: Agent) -> None:
        """Called by a partition's thread as its last act."""
        self.changed = True
        self.last_end = max(self.last_end, agent.time)
        if self.ended:
            self._over.release()
            return
        try:
            chosen = self.choose()
        except Aborted:
            chosen = None
        except BaseException as error:
            self.fail(agent, error)
            chosen = None
        if chosen is not None:
            chosen.resume()
        else:
            self._over.release()

    def run(self, seconds: float) -> None:
        """Drive the run from the caller's thread until it ends, then unwind what is left."""
        self.on_idle()
        self.agents[0].resume()
        if not self._over.acquire(timeout=seconds):
            self._interrupt(seconds)
        self.ended = self.ended or "finished"
        for agent in self.agents:
            if not agent.done:
                agent.resume()
            agent.join_thread()

    def _interrupt(self, seconds: float) -> None:
        """The kernel loops without a step the simulator could count: stop its thread."""
        self.log.add(Finding(Kind.LIMIT, f"the run was stopped after {seconds:g} seconds"))
        self.ended = "time limit"
        for agent in self.agents:
            agent.interrupt()
        self._over.acquire()

    # -- choosing
    def choose(self) -> Agent | None:
        """Finish operations until a partition is to run; None when everything is done."""
        while True:
            self.step()
            ready = [
                a for a in self.agents if not a.done and (a.condition is None or a.condition())
            ]
            op = self._pick_operation(bool(ready), ready)
            if op is not None:
                op.finish()
                continue
            if self.changed and self.on_idle():
                continue
            if ready:
                return self._pick_agent(ready)
            if all(a.done for a in self.agents):
                return None
            self._deadlock()

    def _pick_agent(self, ready: list[Agent]) -> Agent:
        if self.timed:
            return min(ready, key=lambda a: a.time)
        if self.policy == "unfair" and len(ready) > 1:
            return self._pick_unfairly(ready)
        return ready[self.random.randrange(len(ready))] if len(ready) > 1 else ready[0]

    def _pick_unfairly(self, ready: list[Agent]) -> Agent:
        """The partition with the highest priority; now and then any, which gets another one."""
        for agent in ready:
            self._priority.setdefault(agent, self.random.random())
        if self.random.random() < LAPSE:
            chosen = ready[self.random.randrange(len(ready))]
            self._priority[chosen] = self.random.random()
            return chosen
        return max(ready, key=self._priority.__getitem__)

    def _pick_operation(self, any_ready: bool, ready: list[Agent]) -> AsyncOp | None:
        able = [op for op in self.flying if op.may_finish()]
        if not able:
            return None
        if self.timed:
            op = min(able, key=lambda o: o.finish_time)
            late = any_ready and min(a.time for a in ready) < op.finish_time
            return None if late else op
        if self.policy == "early":
            return able[0]
        if self.policy == "unfair":
            return self._pick_quick(able, any_ready)
        if any_ready and (self.policy == "late" or self.random.random() > 0.3):
            return None
        return able[self.random.randrange(len(able))]

    def _pick_quick(self, able: list[AsyncOp], any_ready: bool) -> AsyncOp | None:
        """An operation of a quick channel, or of a slow one where nothing else can happen."""
        for op in able:
            if op.channel not in self._slow or self.random.random() < CHANGE:
                self._slow[op.channel] = self.random.random() < 0.5
        quick = [op for op in able if not self._slow[op.channel]]
        if not quick and any_ready and self.random.random() >= LAPSE:
            return None
        chosen = quick or able
        return chosen[self.random.randrange(len(chosen))]

    def _deadlock(self) -> None:
        """Nobody can run and nothing is in flight: say who waits for what, and why it stays."""
        for agent in self.agents:
            if agent.done or agent.condition is None:
                continue
            details: dict[str, Any] = {"where": agent.waits_at}
            barrier = agent.waits_on
            if barrier is not None:
                details |= {"buffer": barrier.name, "stage": barrier.stage}
                for kind, message in barrier.stuck():
                    agent.report(kind, message, **details)
            agent.report(Kind.DEADLOCK, f"waits for {agent.reason()}", **details)
        self.end("deadlock")
