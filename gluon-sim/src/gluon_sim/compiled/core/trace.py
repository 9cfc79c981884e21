"""What a run shows about speed: products between copies and their waits, loops and what is in them.

    report = execute(compiled, 1, arguments, schedule=EQUAL, trace=True)
    print(*report.trace.slack_of_lines(), *report.trace.loops(parse(compiled)), sep="\\n")

Under `EQUAL` every warp issues at the same rate and all work completes at once, so that the number
of products between a copy's issue and its wait says how long the copy may take before anybody
stands still. It is no performance model: see which copies have no slack, and compare kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from gluon_sim.compiled.core.report import Location
from gluon_sim.compiled.core.schedule import Schedule

EQUAL = Schedule("early", "equal")
_BARRIERS = ("bar.sync", "barrier.sync", "barrier.cta.sync", "s_barrier")
_WAITS = ("mbarrier.try_wait", "s_waitcnt", "cp.async.wait", "wgmma.wait", "tcgen05.wait")
_PRODUCTS = ("wgmma.mma", "tcgen05.mma", "v_mfma")
_SPIN = 8  # instructions of a loop that only waits
_ALIKE = 0.5  # share of instructions that warps of one role have in common


@dataclass(frozen=True)
class Slack:
    """One copy, the wait that needed it, and the products that were issued between the two."""

    copy: Location
    wait: Location
    products: int


@dataclass(frozen=True)
class LineSlack:
    """All runs of one copy of the source; nothing hides the first of a kernel."""

    copy: str
    wait: str
    products: tuple[int, ...]

    @property
    def typical(self) -> int:
        """The median: what the loop has."""
        return median_low(self.products)

    def __str__(self) -> str:
        least, most = min(self.products), max(self.products)
        return f"{self.copy} -> {self.wait}: {self.typical} products ({least} to {most})"


@dataclass(frozen=True)
class Loop:
    """The busiest loop of a group of warps that do the same: what one iteration of one warp has."""

    warps: tuple[int, ...]
    where: str
    iterations: int
    instructions: float
    products: float
    barriers: float
    waits: float

    def __str__(self) -> str:
        span = f"{self.warps[0]}-{self.warps[-1]}" if len(self.warps) > 1 else f"{self.warps[0]}"
        return (
            f"warps {span}, {self.where}: {self.iterations} iterations of {self.instructions:.0f} "
            f"instructions, {self.products:.0f} products, {self.barriers:.1f} barriers, "
            f"{self.waits:.1f} waits"
        )


@dataclass
class Trace:
    """Collects what happens while a kernel runs."""

    slack: list[Slack] = field(default_factory=list)
    hits: dict[int, list[int]] = field(default_factory=dict)
    """How often each warp of the longest program executed each instruction."""
    _copies: dict[Hashable, tuple[Location, int]] = field(default_factory=dict)

    def program(self, warps: Iterable[Any]) -> None:
        """A program has ended."""
        hits = {warp.index: warp.hits for warp in warps}
        if _total(hits) > _total(self.hits):
            self.hits = hits

    def copy(self, key: Hashable, where: Location, products: int) -> None:
        """A copy was issued; `key` names what its wait will know it by."""
        self._copies.setdefault(key, (where, products))

    def wait(self, key: Hashable, where: Location, products: int) -> None:
        """Somebody needed it; whoever comes later does not count."""
        found = self._copies.pop(key, None)
        if found is not None:
            self.slack.append(Slack(found[0], where, products - found[1]))

    def slack_of_lines(self) -> list[LineSlack]:
        """Copies by their line of the Gluon source, in the order of their first run."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for one in self.slack:
            groups[one.copy.source, one.wait.source].append(one.products)
        return [LineSlack(*key, tuple(found)) for key, found in groups.items()]

    def loops(self, kernel: Any) -> list[Loop]:
        """The busiest loop of every role."""
        found = []
        for warps in self._roles():
            hits = self.hits[warps[0]]
            inside = max(
                _loops(kernel, hits), key=lambda span: sum(hits[slice(*span)]), default=None
            )
            if inside is not None:
                found.append(_loop(kernel, warps, hits, inside))
        return found

    def _roles(self) -> list[tuple[int, ...]]:
        """Warps that executed mostly the same instructions."""
        roles: list[list[int]] = []
        ran = {w: {at for at, n in enumerate(hits) if n} for w, hits in self.hits.items()}
        for warp in sorted(ran):
            for role in roles:
                one, other = ran[role[0]], ran[warp]
                if len(one & other) > _ALIKE * len(one | other):
                    role.append(warp)
                    break
            else:
                roles.append([warp])
        return [tuple(role) for role in roles]


def _total(hits: dict[int, list[int]]) -> int:
    return sum(map(sum, hits.values()))


def _loops(kernel: Any, hits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Innermost loops that ran and do more than wait: the first instruction, one past the last."""
    spans = []
    for at, target in kernel.jumps_back():
        if at - target >= _SPIN and at < len(hits) and hits[at] > 1:
            spans.append((target, at + 1))
    for first, end in spans:
        if not any((first, end) != (a, b) and first <= a and b <= end for a, b in spans):
            yield first, end


def _loop(kernel: Any, warps: tuple[int, ...], hits: Sequence[int], span: tuple[int, int]) -> Loop:
    first, end = span
    turns = max(1, hits[first])

    def each(names: tuple[str, ...] = ("",)) -> float:
        return (
            sum(
                n
                for at, n in enumerate(hits[first:end], first)
                if kernel.code[at].op.startswith(names)
            )
            / turns
        )

    busiest = max(range(first, end), key=lambda at: hits[at])
    return Loop(
        warps,
        kernel.code[busiest].where.source,
        turns,
        each(),
        each(_PRODUCTS),
        each(_BARRIERS),
        each(_WAITS),
    )
