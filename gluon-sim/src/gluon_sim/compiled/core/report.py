"""What an execution of compiled code reports: faults with the line of the Gluon source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gluon_sim.compiled.core.trace import Trace


class Kind(Enum):
    """The classes of fault that both interpreters look for."""

    BOUNDS = "access out of bounds"
    ALIGNMENT = "misaligned access"
    READ_ONLY = "store to an input"
    BARRIER = "misused barrier"
    PHASE = "missed phase"
    UNINITIALIZED = "use of something never written"
    IN_FLIGHT = "use of a result in flight"
    AT_EXIT = "work in flight at exit"
    RACE = "race between barriers"
    FENCE = "missing proxy fence"
    DESCRIPTOR = "malformed descriptor"
    DIVERGENCE = "lanes that should be together are not"
    DEADLOCK = "deadlock"
    LIMIT = "step limit"


@dataclass(frozen=True)
class Location:
    """A line of the compiled text and the line of the Gluon source that it came from."""

    text: str = ""
    line: int = 0
    file: str = ""
    source_line: int = 0
    callers: tuple[str, ...] = ()
    """Where the function was called from that the line belongs to, innermost first."""

    @property
    def source(self) -> str:
        """The line of the Gluon source and those it was called from."""
        return " < ".join([f"{Path(self.file).name}:{self.source_line}", *self.callers])

    def __str__(self) -> str:
        source = f"{Path(self.file).name}:{self.source_line}: " if self.file else ""
        return f"{source}{self.text[:90]} (line {self.line})"


class Fault(Exception):
    """The program does what the machine forbids; the run ends."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = Location()
        self.who = ""

    def at(self, where: Location, who: str) -> Fault:
        """This fault with its place, unless it has one."""
        if not self.where.text:
            self.where, self.who = where, who
        return self


class UnknownInstruction(NotImplementedError):
    """The interpreter does not know an instruction, or not this form of it."""


@dataclass(frozen=True)
class Finding:
    """One fault: what, where, and which warp or wave of which block."""

    kind: Kind
    message: str
    where: Location = Location()
    who: str = ""

    def __str__(self) -> str:
        who = f" [{self.who}]" if self.who else ""
        return f"{self.kind.value}: {self.message} at {self.where}{who}"


@dataclass
class Log:
    """Collects findings, one per kind and place, and counts what is worth knowing but no fault."""

    findings: list[Finding] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    _seen: set[tuple[Kind, int]] = field(default_factory=set)

    def add(self, finding: Finding) -> None:
        """Record a finding unless its place is known."""
        key = (finding.kind, finding.where.line)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(finding)

    def note(self, text: str, count: int = 1) -> None:
        """Count something that is no fault."""
        self.notes[text] += count


@dataclass(frozen=True)
class Report:
    """The result of one execution. `executed`: how often each instruction of the text ran."""

    findings: tuple[Finding, ...]
    notes: dict[str, int]
    instructions: int
    seconds: float
    schedule: str
    executed: tuple[int, ...] = field(default=(), repr=False)
    trace: Trace | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def kinds(self) -> frozenset[Kind]:
        """The kinds of fault found."""
        return frozenset(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        head = f"{self.instructions} instructions, {self.schedule}, {len(self.findings)} findings"
        return "\n".join([head, *map(str, self.findings)])

    def raise_if_bad(self) -> None:
        """Raise `AssertionError` with the whole report unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))
