"""What a simulation reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gluon_sim.report.outputs import Stores
    from gluon_sim.report.timeline import Timeline


class Kind(Enum):
    """The classes of defect the simulator looks for."""

    RACE = "race"
    ACCUMULATOR = "accumulator in flight"
    UNWRITTEN = "read of unwritten memory"
    BOUNDS = "global access out of bounds"
    DEADLOCK = "deadlock"
    BYTES = "wrong byte expectation"
    ARRIVE = "arrive count mismatch"
    FENCE = "missing proxy fence"
    IN_FLIGHT = "in flight at exit"
    OUTPUT = "output not written exactly once"
    BARRIER = "misused barrier"
    LIMIT = "step limit"
    ERROR = "kernel error"


# What is wrong by itself, what happens where an order is missing, and how a run ends after both.
_CAUSES = (Kind.ERROR, Kind.BOUNDS, Kind.BYTES, Kind.ARRIVE, Kind.BARRIER, Kind.FENCE)
_BETWEEN = (Kind.RACE, Kind.ACCUMULATOR, Kind.UNWRITTEN)
_ENDS = (Kind.DEADLOCK, Kind.IN_FLIGHT, Kind.OUTPUT, Kind.LIMIT)
RANK = {kind: rank for rank, kinds in enumerate((_CAUSES, _BETWEEN, _ENDS)) for kind in kinds}


@dataclass(frozen=True)
class Finding:
    """One defect: what, where in the kernel, who, and on which buffer, stage and phase.

    `phase` is that of the barrier named in `buffer`; for an access to memory it is the phase the
    partition last waited for.
    """

    kind: Kind
    message: str
    file: str = ""
    line: int = 0
    partition: str = ""
    program: int = 0
    buffer: str = ""
    stage: int | None = None
    phase: int | None = None

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}: " if self.file else ""
        extra = [f"partition {self.partition}"] if self.partition else []
        extra += [f"buffer {self.buffer}"] if self.buffer else []
        extra += [f"stage {self.stage}"] if self.stage is not None else []
        extra += [f"phase {self.phase}"] if self.phase is not None else []
        tail = f" [{', '.join(extra)}]" if extra else ""
        return f"{where}{self.kind.value}: {self.message}{tail}"


class Log:
    """Collects findings; the same defect at the same line is kept once."""

    def __init__(self, limit: int, ignore: Iterable[Kind] = ()) -> None:
        self.findings: list[Finding] = []
        self._seen: set[tuple[object, ...]] = set()
        self._limit = limit
        self._ignore = frozenset(ignore)

    def add(self, finding: Finding) -> None:
        """Record a finding, unless it is ignored or known."""
        key = (finding.kind, finding.file, finding.line, finding.partition, finding.buffer)
        if finding.kind in self._ignore or key in self._seen:
            return
        self._seen.add(key)
        self.findings.append(finding)

    @property
    def full(self) -> bool:
        """Whether enough was found to stop."""
        return len(self.findings) >= self._limit


@dataclass(frozen=True)
class Report:
    """The result of one simulation.

    `reason` says why the run ended: "finished", "deadlock", "step limit", "time limit",
    "kernel error" or "too many findings". `shared_bytes` and `tmem_columns` are the largest
    per-CTA allocations seen (logical bytes: no padding, no reuse of dead buffers). `stores` says
    how often each element of global memory was stored.
    """

    findings: tuple[Finding, ...]
    reason: str
    steps: int
    seconds: float
    seed: int
    schedule: str
    shared_bytes: int = 0
    tmem_columns: int = 0
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    stores: Stores = field(default_factory=dict, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """True when the run finished and nothing was found."""
        return not self.findings and self.reason == "finished"

    def kinds(self) -> frozenset[Kind]:
        """The kinds of defect found."""
        return frozenset(f.kind for f in self.findings)

    def ranked(self) -> list[Finding]:
        """The findings, likely causes before what tends to follow from them, then by time.

        A barrier that expects too few bytes lets a reader go early (a race), and the reader frees
        the slot early (another), until somebody waits for ever (a deadlock).
        """
        return sorted(self.findings, key=lambda finding: RANK[finding.kind])

    def __str__(self) -> str:
        """The likely cause in full, and under it one line for each place of the others."""
        head = f"{self.reason} after {self.steps} steps, seed {self.seed}, {self.schedule}"
        lines = [f"{head}: {len(self.findings)} findings"]
        ranked = self.ranked()
        lines += map(str, ranked[:1])
        folded = Counter((f.kind, Path(f.file).name, f.line) for f in ranked[1:])
        if folded:
            lines.append("may follow from it (`details()` has them in full):")
        for (kind, file, line), count in folded.items():
            times = f", {count} times" if count > 1 else ""
            lines.append(
                f"  {file}:{line}: {kind.value}{times}" if file else f"  {kind.value}{times}"
            )
        return "\n".join(lines)

    def details(self) -> str:
        """Every finding in full, likely causes first."""
        return "\n".join(map(str, self.ranked()))

    def raise_if_bad(self) -> None:
        """Raise `AssertionError` with the report and all details unless `ok`."""
        if not self.ok:
            raise AssertionError(f"{self}\n\n{self.details()}")
