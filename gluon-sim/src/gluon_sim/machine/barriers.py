"""Barriers: mbarriers (arrivals, bytes, phase) and named barriers (threads).

An mbarrier completes a phase when its pending arrivals and its pending bytes are both zero. It
then flips its phase bit and starts again with `count` arrivals. `wait(phase=p)` passes while the
phase bit differs from p, so a fresh barrier lets `wait(1)` pass and blocks `wait(0)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gluon_sim.machine.clocks import Clock, Component
from gluon_sim.report.findings import Kind

Reporter = Callable[..., None]  # Agent.report, or the same bound to the line of an operation


@dataclass(slots=True)
class MBarrier:
    """One mbarrier. `generation` counts completed phases; its parity is the phase bit."""

    name: str
    count: int
    stage: int | None = None
    pending: int = 0
    bytes: int = 0
    generation: int = 0
    completed_at: float = 0.0
    arriving: Clock = field(default_factory=Clock)
    published: Clock = field(default_factory=Clock)
    arrived: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def phase(self) -> int:
        """The bit of the phase in progress."""
        return self.generation & 1

    @property
    def label(self) -> str:
        """Name as findings print it."""
        return self.name if self.stage is None else f"{self.name}[{self.stage}]"

    def arrive(self, clock: Clock, count: int, who: str, at: float, report: Reporter) -> None:
        """Take `count` arrivals that carry `clock`, at nominal time `at`."""
        self.arriving.join(clock)
        self.arrived.append(who)
        self.pending -= count
        if self.pending < 0:
            report(
                Kind.ARRIVE,
                f"{who} arrives {count} times on {self.label}, which was initialized with count "
                f"{self.count} and has {self.pending + count} arrivals left in this phase",
                buffer=self.name,
                stage=self.stage,
                phase=self.phase,
            )
            self.pending = 0
        self.settle(at)

    def expect(self, nbytes: int) -> None:
        """Announce bytes that this phase must receive."""
        self.bytes += nbytes

    def receive(
        self, clock: Clock, nbytes: int, issued_in: int, at: float, report: Reporter
    ) -> None:
        """Bytes of a copy land. `issued_in` is the generation in which the copy was issued."""
        self.arriving.join(clock)
        if issued_in != self.generation:
            report(
                Kind.BYTES,
                f"{self.label} completed a phase before a copy delivered its {nbytes} bytes: the "
                "expected byte count is too small, or the copy was never expected",
                buffer=self.name,
                stage=self.stage,
                phase=issued_in & 1,
            )
            return
        self.bytes -= nbytes
        if self.bytes < 0 and self.pending == 0:
            report(
                Kind.BYTES,
                f"{self.label} received {-self.bytes} bytes more than expected",
                buffer=self.name,
                stage=self.stage,
                phase=self.phase,
            )
            self.bytes = 0
        self.settle(at)

    def settle(self, at: float) -> None:
        """Complete the phase when nothing is pending."""
        if self.pending or self.bytes:
            return
        self.published.join(self.arriving)
        self.arriving = Clock()
        self.arrived = []
        self.pending = self.count
        self.generation += 1
        self.completed_at = at

    def passes(self, phase: int) -> bool:
        """Whether `wait(phase)` returns now."""
        return self.phase != phase

    def stuck(self) -> list[tuple[Kind, str]]:
        """What is wrong with a barrier that nothing will complete any more."""
        if self.bytes > 0 and self.pending == 0:
            return [(Kind.BYTES, f"{self.label} expects {self.bytes} bytes that no copy brings")]
        if self.bytes < 0:
            return [(Kind.BYTES, f"{self.label} received {-self.bytes} bytes nobody expected")]
        if 0 < self.pending < self.count:
            came = self.count - self.pending
            return [(Kind.ARRIVE, f"{came} of {self.count} arrivals came on {self.label}")]
        return []

    def describe(self) -> str:
        """State, for a deadlock report."""
        got = f", arrived: {', '.join(self.arrived)}" if self.arrived else ""
        tx = f", {self.bytes} bytes missing" if self.bytes else ""
        return (
            f"{self.label} (phase bit {self.phase}, {self.pending} of {self.count} arrivals "
            f"missing{tx}{got})"
        )


@dataclass(slots=True)
class NamedBarrier:
    """`bar.sync` / `bar.arrive` number `number` of one CTA, counted in threads."""

    number: int
    threads: int
    arrived: int = 0
    generation: int = 0
    completed_at: float = 0.0
    arriving: Clock = field(default_factory=Clock)
    published: Clock = field(default_factory=Clock)
    came: dict[Component, int] = field(default_factory=dict)  # and when
    before: dict[Component, int] = field(default_factory=dict)  # the same of the last generation

    def arrive(
        self, clock: Clock, threads: int, at: float, report: Reporter, who: Component
    ) -> int:
        """Count `threads` arrivals of `who`; returns the generation they belong to.

        Who arrives must know that all have arrived in the generation before. Otherwise it could
        have come before them, and counted in their place.
        """
        generation = self.generation
        unknown = [str(c) for c, time in self.before.items() if clock.seen.get(c, 0) < time]
        if who in self.came:
            self._misused("the same warps arrive twice in one generation", report)
        elif unknown:
            others = " and ".join(unknown)
            self._misused(f"these warps could have arrived twice before {others} came", report)
        self.came[who] = clock.seen[who]
        self.arriving.join(clock)
        self.arrived += threads
        if self.arrived > self.threads:
            self._misused(f"it expects {self.threads} threads, {self.arrived} came", report)
        if self.arrived >= self.threads:
            self.published = self.arriving
            self.arriving = Clock()
            self.arrived = 0
            self.before, self.came = self.came, {}
            self.generation += 1
            self.completed_at = at
        return generation

    def _misused(self, message: str, report: Reporter) -> None:
        text = f"named barrier {self.number}: {message}"
        report(Kind.ARRIVE, text, buffer=f"barrier {self.number}")
