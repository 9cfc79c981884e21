"""When asynchronous work completes, which warp runs next, and what unwritten state holds.

A `Schedule` names one of the executions that the machine allows; the same schedule always gives the
same execution. `Engine` runs warps or waves under it. Work that was issued and is not complete is
`Pending`: in a pool (copies, in any order), in a queue (a unit that works in order), or with the
warp that issued it, which waits for it itself.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gluon_sim.compiled.core.report import Fault, Kind, Location, Log

COMPLETIONS = ("early", "late", "random", "copies late", "copies early")
"""When work completes: at once, only when somebody waits for it, or drawn; or copies otherwise than
the rest."""
ORDERS = ("forward", "reverse", "random", "starve", "equal")
"""Which warp runs: the first that can, the last, any with preemption, one only when it must, or all
at the same rate."""
_EQUAL = 8  # instructions that a warp runs before the next one's turn comes
_QUANTA = (1, 7, 50, 400, 5000)
_LONG = 1 << 30
_MOST_INSTRUCTIONS = 20_000_000


@dataclass(frozen=True)
class Schedule:
    """One execution. `seed` also chooses the poison, the starved warp and the elected lane."""

    completion: str = "late"
    order: str = "forward"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.completion not in COMPLETIONS or self.order not in ORDERS:
            raise ValueError(f"no schedule {self.completion!r}, {self.order!r}")

    def __str__(self) -> str:
        return f"{self.completion}/{self.order}/{self.seed}"

    @property
    def poison_word(self) -> int:
        """What registers hold before they are written: a NaN, or 1.1, which looks like data."""
        return 0x3F8CCCCD if self.seed % 2 else 0x7FC0DEAD

    @property
    def poison_byte(self) -> int:
        """What memory holds before it is written: NaN in every float format, or small numbers."""
        return 0x38 if self.seed % 2 else 0xFF


DEFAULT = (
    Schedule("late", "forward"),
    Schedule("early", "reverse", 1),
    Schedule("random", "random", 2),
    Schedule("copies late", "random", 3),
    Schedule("copies early", "starve", 4),
)
"""Five schedules that together complete everything early and late and run warps in every order."""


THOROUGH = (
    *DEFAULT,
    Schedule("late", "forward", 1),
    Schedule("late", "reverse", 2),
    Schedule("early", "starve"),
    Schedule("early", "starve", 1),
    Schedule("early", "starve", 5),
    Schedule("copies early", "starve", 2),
    Schedule("random", "random", 8),
)
"""More of them, for the question whether a missing wait is seen: copies that complete in the other
order, and other warps starved."""


class Pending:
    """Work that was issued; `finish` completes it, once."""

    __slots__ = ("_run", "done", "issuer", "kind", "registers", "time", "where")

    def __init__(self, kind: str, run: Callable[[], object], issuer: Strand, time: int = 0) -> None:
        self.kind, self._run, self.done = kind, run, False
        self.time, self.registers = time, frozenset[int]()
        self.where, self.issuer = issuer.where(), issuer

    def finish(self) -> None:
        """Complete it, if it is not."""
        if self.done:
            return
        self.done = True
        try:
            self._run()
        except Fault as fault:
            raise fault.at(self.where, self.issuer.who()) from None


class Strand(ABC):
    """A warp or a wave: what is scheduled."""

    index: int
    done: bool
    waits_for: str = ""

    @abstractmethod
    def advance(self, quantum: int) -> int:
        """Run up to so many instructions; returns how many, fewer where it must wait."""

    @abstractmethod
    def where(self) -> Location:
        """The instruction it is at."""

    @abstractmethod
    def who(self) -> str:
        """Its name in a report."""

    def own_pending(self) -> Sequence[Pending]:
        """Work that only this strand waits for and that may complete at any time."""
        return ()


class Engine:
    """Runs strands under a schedule until all are done."""

    def __init__(self, schedule: Schedule, log: Log) -> None:
        self.schedule, self.log = schedule, log
        self.rng = random.Random(schedule.seed)
        self.pool: list[Pending] = []
        self.queues: list[deque[Pending]] = []
        self._moved = False

    def early(self, copy: bool) -> bool:
        """Whether work issued now completes at once."""
        completion = self.schedule.completion
        if completion == "random":
            return self.rng.random() < 0.5
        return completion == "early" or completion == ("copies early" if copy else "copies late")

    def issue(self, work: Pending) -> None:
        """A copy that completes whenever it likes."""
        if self.early(copy=True):
            work.finish()
        else:
            self.pool.append(work)

    def enqueue(self, queue: deque[Pending], work: Pending) -> None:
        """Work of a unit that completes in the order of issue."""
        queue.append(work)
        if self.early(copy=False):
            while queue:
                queue.popleft().finish()

    def progress(self) -> None:
        """Say that a barrier turned, so that a blocked strand is worth another look."""
        self._moved = True

    def run(self, strands: Sequence[Strand]) -> int:
        """Run to the end; returns the number of instructions."""
        slow = self._starved(strands)
        total = 0
        while any(not strand.done for strand in strands):
            fast = [s for s in strands if not s.done and s not in slow]
            ran = self._round(fast)
            if not ran and not self._moved and not self._complete_one():
                late = [s for s in strands if not s.done and s in slow]
                ran = self._round(late, short=True)
                if not ran and not self._moved:
                    self._deadlock(strands)
            total += ran
            if total > _MOST_INSTRUCTIONS:
                raise Fault(Kind.LIMIT, f"more than {_MOST_INSTRUCTIONS} instructions")
        return total

    def _starved(self, strands: Sequence[Strand]) -> list[Strand]:
        if self.schedule.order != "starve":
            return []
        chosen = self.schedule.seed % (1 + max(s.index for s in strands))
        return [s for s in strands if s.index == chosen]

    def _round(self, strands: list[Strand], short: bool = False) -> int:
        order = self.schedule.order
        self._moved = False
        ran = 0
        if order == "reverse":
            strands = strands[::-1]
        elif order == "random" or short:
            self.rng.shuffle(strands)
        for strand in strands:
            quantum = self._quantum(short)
            ran += self._advance(strand, quantum)
            if self.schedule.completion == "random":
                self._complete_some(strand)
            if short and ran:
                break
        return ran

    def _quantum(self, short: bool) -> int:
        if self.schedule.order == "random":
            return self.rng.choice(_QUANTA)
        return _EQUAL if self.schedule.order == "equal" else 20 if short else _LONG

    def _advance(self, strand: Strand, quantum: int) -> int:
        try:
            return strand.advance(quantum)
        except Fault as fault:
            raise fault.at(strand.where(), strand.who()) from None

    def _complete_some(self, strand: Strand) -> None:
        rng = self.rng
        if self.pool and rng.random() < 0.4:
            self.pool.pop(rng.randrange(len(self.pool))).finish()
            self._moved = True
        for queue in self.queues:
            for _ in range(rng.randrange(1, 9) if queue and rng.random() < 0.4 else 0):
                if queue:
                    queue.popleft().finish()
                    self._moved = True
        own = strand.own_pending()
        if own and rng.random() < 0.3:
            rng.choice(own).finish()

    def _complete_one(self) -> bool:
        """Nothing can run: some work completes. False when there is none."""
        self.pool = [work for work in self.pool if not work.done]
        waiting = [queue for queue in self.queues if queue]
        choices = len(self.pool) + len(waiting)
        if not choices:
            return False
        if self.schedule.completion == "random":
            chosen = self.rng.randrange(choices)
        else:
            chosen = 0 if self.schedule.seed % 2 else choices - 1
        if chosen < len(self.pool):
            self.pool.pop(chosen).finish()
        else:
            waiting[chosen - len(self.pool)].popleft().finish()
        return True

    def _deadlock(self, strands: Sequence[Strand]) -> NoReturn:
        stuck = [s for s in strands if not s.done]
        waits = "; ".join(f"{s.who()} waits for {s.waits_for}" for s in stuck)
        raise Fault(Kind.DEADLOCK, waits).at(stuck[0].where(), stuck[0].who())
