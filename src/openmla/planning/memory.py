"""A map of shared memory (or LDS) as data: named regions, one after another."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from openmla.errors import Unsupported

MOST_REGIONS = 4096
"""A map of more regions is of a config that no planner made, such as one with a billion stages."""


class Region(NamedTuple):
    """Bytes `offset` to `offset + size - 1`. `kind` groups regions for a picture's colors."""

    name: str
    kind: str
    offset: int
    size: int


class Wanted(NamedTuple):
    """A region before it has a place: its size, and the multiple its start must be."""

    name: str
    kind: str
    size: int
    align: int = 16


@dataclass(frozen=True, slots=True)
class Columns:
    """A range of tensor-memory columns."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Regions in order, and the most that one block may use."""

    regions: tuple[Region, ...]
    limit: int

    @property
    def used(self) -> int:
        """Bytes up to the end of the last region."""
        return self.regions[-1].offset + self.regions[-1].size if self.regions else 0

    def explain(self) -> list[str]:
        """One line per region: where it starts and how many bytes it takes."""
        lines = [f"{r.offset:>7}  {r.name}: {r.size} bytes" for r in self.regions]
        return [*lines, f"{self.used:>7}  end, of {self.limit}"]


def lay_out(wanted: Iterable[Wanted], limit: int) -> MemoryMap:
    """Place regions one after another; empty ones vanish. Raises Unsupported for too many.

    >>> placed = lay_out([Wanted("Q", "q", 100), Wanted("-", "q", 0), Wanted("K", "k", 64)], 256)
    >>> [(region.name, region.offset) for region in placed.regions], placed.used
    ([('Q', 0), ('K', 112)], 176)
    """
    regions: list[Region] = []
    at = 0
    for item in wanted:
        if not item.size:
            continue
        if len(regions) == MOST_REGIONS:
            raise Unsupported(f"a block has at most {MOST_REGIONS} regions of shared memory")
        at = -(-at // item.align) * item.align
        regions.append(Region(item.name, item.kind, at, item.size))
        at += item.size
    return MemoryMap(tuple(regions), limit)
