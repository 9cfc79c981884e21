"""Happens-before: vector clocks, and the shadow of a memory that finds unordered accesses.

Every partition is a component of the clock, and so is every channel of asynchronous operations that
finish in order (the wgmma queue of a partition, the tcgen05 pipe of a CTA, the copies into one
buffer). A barrier carries the clocks of those who arrived to those who waited. Two accesses to the
same bytes, one of them a write, race when the later one's clock does not cover the earlier one:
this holds for every schedule with the same barriers, not only for the one that ran.

A second clock, `fenced`, counts only what a proxy fence has published. An access through the
asynchronous proxy (TMA, wgmma, tcgen05) must cover earlier ordinary writes in that clock too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from gluon_sim.machine.context import Location

Component = Hashable


class CopyChannel(NamedTuple):
    """The copies (TMA, cp.async) of one CTA into one piece of one allocation."""

    cta: str
    alloc: int
    offset: int
    shape: tuple[int, ...]


class LaunchEnd(NamedTuple):
    """Whoever has heard of it knows that a launch has ended and sees its writes."""

    launch: int


class Clock:
    """A vector clock and its fenced part. Components that never ticked are absent."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen: dict[Component, int] = {}
        self.fenced: dict[Component, int] = {}

    def copy(self) -> Clock:
        """An independent copy."""
        other = Clock()
        other.seen = dict(self.seen)
        other.fenced = dict(self.fenced)
        return other

    def join(self, other: Clock) -> None:
        """Learn everything `other` knows."""
        _join(self.seen, other.seen)
        _join(self.fenced, other.fenced)

    def tick(self, component: Component) -> int:
        """Advance one component and return its new value."""
        value = self.seen.get(component, 0) + 1
        self.seen[component] = value
        return value

    def forget(self, component: Component) -> None:
        """Drop one component."""
        self.seen.pop(component, None)
        self.fenced.pop(component, None)

    def fence(self, component: Component) -> None:
        """Publish everything seen so far to the asynchronous proxy.

        What `component`, whose fence it is, does from now on is not fenced.
        """
        self.fenced = dict(self.seen)
        self.tick(component)

    def trust_copies(self) -> None:
        """Publish the copies seen so far, and no ordinary writes."""
        self.fenced.update((c, t) for c, t in self.seen.items() if isinstance(c, CopyChannel))


def _join(into: dict[Component, int], other: dict[Component, int]) -> None:
    for key, value in other.items():
        if value > into.get(key, 0):
            into[key] = value


@dataclass(slots=True)
class Access:
    """One access: which cells of an allocation (a bit mask), by whom, when, and from which line."""

    cells: int
    write: bool
    component: Component
    time: int
    what: str
    where: Location
    generic: bool  # through the ordinary (not the asynchronous) proxy
    epoch: int = -1  # wgmma reads: the issuer's barrier count when it waited, -1 before


@dataclass(slots=True)
class Conflict:
    """An unordered pair; `fence` when only the proxy fence is missing."""

    earlier: Access
    fence: bool


class Shadow:
    """The accesses to one allocation that a later access could still conflict with."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def check(self, new: Access, clock: Clock) -> list[Conflict]:
        """Record `new`, made by someone who knows `clock`; return what it is not ordered after."""
        found: list[Conflict] = []
        keep: list[Access] = []
        for old in self._accesses:
            overlap = old.cells & new.cells
            if not overlap:
                keep.append(old)
                continue
            ordered = clock.seen.get(old.component, 0) >= old.time
            if (old.write or new.write) and not ordered:
                found.append(Conflict(old, fence=False))
            elif (
                old.write
                and old.generic
                and not new.generic
                and not new.write
                and clock.fenced.get(old.component, 0) < old.time
            ):
                found.append(Conflict(old, fence=True))
            if self._superseded(old, new, ordered):
                old.cells &= ~new.cells
            if old.cells:
                keep.append(old)
        keep.append(new)
        self._accesses = keep
        return found

    @staticmethod
    def _superseded(old: Access, new: Access, ordered: bool) -> bool:
        """Whether whoever conflicts with `old` would conflict with `new` just as well."""
        if not ordered:
            return False
        if new.write:
            return True
        same_kind = old.generic == new.generic and old.component == new.component
        return not old.write and same_kind

    def accesses(self) -> list[Access]:
        """The live accesses (for checks that need more than ordering)."""
        return self._accesses
