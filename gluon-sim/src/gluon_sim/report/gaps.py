"""What no run exercised: the part of a record that is missing, by the text of the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gluon_sim.report.exercise import Record, Wait, Waited
from gluon_sim.report.sites import Place, Site, Way, source_of

TWICE = 2
NEVER_BLOCKS = "never blocks"
NEVER_RUNS = "never runs"
NEVER_TRUE = "is never true"
NEVER_FALSE = "is never false"
DOES_NOT_TURN = "does not turn twice"


@dataclass(frozen=True)
class Gap:
    """A wait, a condition, a ring or a whole function, and what no run has shown of it."""

    file: str
    line: int
    function: str
    text: str
    """The name of a ring, or the condition; empty for a function."""
    what: str

    def __str__(self) -> str:
        named = f"{self.text} " if self.text else ""
        return f"{Path(self.file).name}:{self.line}: {self.function}: {named}{self.what}"


def gaps(total: Record, files: Iterable[str], own: Record | None = None) -> list[Gap]:
    """What runs leave out of the device functions of `files`.

    `own` are launches of the kernels in question, `total` (the same where it is not given) those of
    others too that use these files. Rings and waits are judged by `own`, conditions by `total`.
    What `own` uses in other files counts as well: waits, and conditions in registers.
    """
    own = total if own is None else own
    inside = sorted(set(files))
    found: list[Gap] = []
    for file in inside:
        found += _of_file(total, file) + _waits(own, file)
    outside = {wait.place.file for wait in own.waits} | {place.file for place in own.branches}
    for file in sorted(outside - set(inside)):
        source = source_of(file)
        sites = [site for site in source.branches if _at_run_time(own, site)]
        found += [gap for site in sites for gap in _one_way(own, site)]
        found += _waits(own, file)
    found += _rings(own)
    return sorted(set(found), key=lambda gap: (gap.file, gap.line, gap.text, gap.what))


def _of_file(total: Record, file: str) -> list[Gap]:
    source = source_of(file)
    missing: dict[Place, list[Gap]] = {}
    reached = {wait.place for wait in total.waits} | set(total.branches)
    sites = {site.place: site for site in (*source.branches, *source.waits)}
    idle = {site.function for site in sites.values()} - {
        site.function for site in sites.values() if site.place in reached
    }
    found = [_never_ran(file, function, sites.values()) for function in sorted(idle)]
    for site in source.branches:
        missing[site.place] = _one_way(total, site)
    for site in sites.values():
        if site.function in idle or not _can_be_reached(total, site.inside):
            continue
        if site.place in missing:
            found += missing[site.place]
        elif site.place not in reached:
            found.append(Gap(file, site.place.line, site.function, site.text, NEVER_RUNS))
    return found


def _never_ran(file: str, function: str, sites: Iterable[Site]) -> Gap:
    line = min(site.place.line for site in sites if site.function == function)
    return Gap(file, line, function, "", NEVER_RUNS)


def _can_be_reached(record: Record, inside: tuple[Way, ...]) -> bool:
    """Whether the branches around a site went there: else they are the gap, not the site."""
    for condition, taken in inside:
        went = record.branches.get(condition)
        if went is None or not (went.true if taken else went.false):
            return False
    return True


def _one_way(record: Record, site: Site) -> list[Gap]:
    went = record.branches.get(site.place)
    if went is None:
        return [Gap(site.place.file, site.place.line, site.function, site.text, NEVER_RUNS)]
    ways = [(went.true, NEVER_TRUE), (went.false, NEVER_FALSE)]
    return [
        Gap(site.place.file, site.place.line, site.function, site.text, what)
        for times, what in ways
        if not times
    ]


def _at_run_time(record: Record, site: Site) -> bool:
    went = record.branches.get(site.place)
    return went is not None and went.at_run_time


def _waits(record: Record, file: str) -> list[Gap]:
    """Waits that never blocked; by barrier where only some of those of a statement did not."""
    by_place: dict[Place, list[tuple[Wait, Waited]]] = {}
    for wait, waited in record.waits.items():
        if wait.place.file == file:
            by_place.setdefault(wait.place, []).append((wait, waited))
    found = []
    source = source_of(file)
    for place, waits in by_place.items():
        function, text = source.function(place), source.text(place)
        idle = [wait for wait, waited in waits if not waited.blocked]
        some = len(idle) < len(waits)
        for wait in idle:
            named = f"{text} of {wait.awaited}" if some else text
            found.append(Gap(file, place.line, function, named, NEVER_BLOCKS))
    return found


def turns_by_stages(record: Record) -> dict[tuple[Place, str], dict[int, int]]:
    """The most turns of every ring (where it is allocated, its name), by number of stages."""
    found: dict[tuple[Place, str], dict[int, int]] = {}
    for ring, turns in record.rings.items():
        found.setdefault((ring.place, ring.name), {})[ring.stages] = turns
    return found


def _rings(record: Record) -> list[Gap]:
    """Rings that did not turn twice, whatever number of stages they had."""
    return [
        Gap(place.file, place.line, source_of(place.file).function(place), name, DOES_NOT_TURN)
        for (place, name), turns in turns_by_stages(record).items()
        if max(turns.values()) < TWICE
    ]
