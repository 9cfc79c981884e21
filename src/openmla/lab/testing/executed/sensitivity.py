"""Which synchronization of a compiled kernel would be missed: one at a time is taken out.

A removal is noticed when, under any schedule, a fault is found or a bit of the result changes. What
is not noticed is redundant on this case, or beyond what the interpreter sees.

    removals = list(sensitivity(prepare(case, "h200")))
    print(share(removals), [str(r.where) for r in removals if not r.noticed])
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gluon_sim.compiled import SCHEDULES, Location, Schedule, parse
from gluon_sim.compiled.removal import synchronizations, without
from openmla.lab.testing.executed.prepare import PreparedCase
from openmla.lab.testing.memory.poison import differences


@dataclass(frozen=True)
class Removal:
    """One instruction that was taken out; `noticed` says by what, or is empty."""

    kind: str
    where: Location
    noticed: str


def sensitivity(
    prepared: PreparedCase,
    launch: int = 0,
    schedules: Sequence[Schedule] = SCHEDULES,
    known: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
) -> Iterator[Removal]:
    """Every instruction of a launch that orders others and was executed, taken out in turn, but for
    places that are `known`. Part (i, n) is every n-th of them, from i on."""
    expected, reports = prepared.run(schedules[0])
    compiled = prepared.launches[launch].compiled
    code, executed, at_once = parse(compiled), reports[launch].executed, "ptx" in compiled.asm
    for at, kind in list(synchronizations(code).items())[part[0] :: part[1]]:
        if at >= len(executed) or not executed[at] or str(code.code[at].where) in known:
            continue
        changed, noticed = without(code, at), ""
        # A barrier orders accesses, and an unordered one is found whatever happens first.
        for schedule in schedules[: 1 if kind == "barrier" and at_once else None]:
            outcome, reports = prepared.run(schedule, {launch: changed})
            faults = [finding for report in reports for finding in report.findings]
            if faults or differences(outcome, expected):
                noticed = faults[0].kind.value if faults else "another result"
                break
        yield Removal(kind, code.code[at].where, noticed)


def share(removals: Sequence[Removal]) -> float:
    """The share of removals that were noticed."""
    return sum(bool(removal.noticed) for removal in removals) / len(removals)
