"""Synchronization in compiled kernels that nothing would miss, and why not.

Taking an instruction out that orders others must be noticed: by a fault, or by another result. What
is not noticed is here, by its kind and the file of the Gluon source that it comes from, with the
largest number of such places in one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openmla.lab.testing.executed.sensitivity import Removal

ANYWHERE = ""


@dataclass(frozen=True)
class Redundant:
    """Places of one kind in one file, at most so many, and the reason."""

    kind: str
    file: str
    most: int
    reason: str


ORDERED = (
    "the compiler puts a barrier of the partition's warps in front of most copies, waits and "
    "arrivals; by vector clocks, all that it orders is ordered without it"
)
REDUNDANT: dict[str, tuple[Redundant, ...]] = {
    "h200": (
        Redundant("barrier", ANYWHERE, 80, ORDERED),
        Redundant(
            "wait",
            "scheduler.py",
            2,
            "for a slot to be read, and for the next work item to be wanted: who asks for it has "
            "heard that the slot was read, so either wait does for both",
        ),
        Redundant(
            "wait",
            "producer.py",
            1,
            "for the slot of a work item's first K: V of the item before was waited for since",
        ),
        Redundant(
            "wait",
            "work_items.py",
            4,
            "work items lie in two slots: tiles of the item between were waited for by the same "
            "warps",
        ),
        Redundant(
            "wait",
            "kernel.py",
            3,
            "for the flags of a list's block, which were stored before its last tile, and that was "
            "waited for",
        ),
        Redundant(
            "arrive",
            "kernel.py",
            2,
            "says that Q was read: of a program's last work item, nobody asks",
        ),
        Redundant(
            "arrive",
            "rows.py",
            2,
            "the flags of a list's block are there: without a list, nobody waits for them",
        ),
    ),
    "b200": (
        Redundant("barrier", ANYWHERE, 80, ORDERED),
        Redundant(
            "wait for loads",
            ANYWHERE,
            20,
            "in the machine code, the first use of what was loaded waits for it; so it is executed "
            "where a text relies on that (Triton 3.9)",
        ),
        Redundant(
            "wait for stores",
            "correction.py",
            2,
            "parts of a row in turn: the wait behind the last part covers them all",
        ),
        Redundant("wait for stores", "softmax.py", 1, "a later wait of the same warp covers it"),
        Redundant(
            "cluster barrier",
            ANYWHERE,
            4,
            "all warps of both blocks wait for the cluster, and the warps of a block meet behind "
            "it: it is enough that some do",
        ),
        Redundant("wait", "load.py", 1, "the first wait for a slot that has never been filled"),
        Redundant(
            "wait for bulk stores",
            "softmax.py",
            1,
            "the kernel ends behind it, and its end waits for stores",
        ),
    ),
    "mi355x": (
        Redundant("wait for copies", "kernel.py", 1, "a wait that follows covers it"),
        Redundant(
            "wait for copies", "scores.py", 1, "the last block's: by then no copy is in flight"
        ),
        Redundant(
            "barrier",
            "kernel.py",
            2,
            "behind the last wait, before Q, or where a wait for indices has drained all copies: "
            "every wave reads only what it copied itself, or what was met for before",
        ),
    ),
}


def unexplained(target: str, removals: Iterable[Removal]) -> list[Removal]:
    """Removals that were not noticed, and of which the table says nothing or allows fewer."""
    used: Counter[Redundant] = Counter()
    left = []
    for removal in removals:
        if removal.noticed:
            continue
        file = Path(removal.where.file).name
        known = [r for r in REDUNDANT[target] if r.kind == removal.kind and r.file in (file, "")]
        if known and used[known[0]] < known[0].most:
            used[known[0]] += 1
        else:
            left.append(removal)
    return left
