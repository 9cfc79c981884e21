"""Seeded defects: implementations with one deliberate mistake each, to test the acceptance rule.

A rule that never rejects anything is worthless, and nobody notices. Here the rule is judged:
`judge_all` runs every defect on the showcases in which it makes a difference, and the correct
implementation on all of them.

>>> defect = catalog()[0]
>>> defect.name, defect.breaks, defect.shows
('scale off by one percent', 'scale 1 % too large', ('dense', 'paged', 'sparse'))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from defects import keys, output, scores, softmax
from defects.blocked import Blocked
from defects.showcases import REGISTER, SEEDS, SHOWCASES, Defect
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import Verdict, judge

__all__ = ["Defect", "DefectVerdict", "catalog", "judge_all", "judge_correct", "judge_defect"]

_FILES = (scores, keys, softmax, output)


@dataclass(frozen=True)
class DefectVerdict:
    """How often the rule rejected one defect; `slipped` are the cases it accepted."""

    defect: Defect
    judged: int
    slipped: tuple[Case, ...]

    @property
    def rejected(self) -> int:
        """Cases in which the rule caught it."""
        return self.judged - len(self.slipped)


def catalog() -> list[Defect]:
    """All defects: scores, keys, softmax, output."""
    files = [module.__name__ for module in _FILES]
    return sorted(REGISTER, key=lambda d: files.index(d.implementation.__module__))


def judge_defect(defect: Defect) -> DefectVerdict:
    """The rule on one defect, on its showcases with every seed."""
    cases = defect.cases()
    slipped = tuple(case for case in cases if _verdict(defect.implementation, case).ok)
    return DefectVerdict(defect, len(cases), slipped)


def judge_all(defects: Sequence[Defect] | None = None) -> list[DefectVerdict]:
    """The rule on all defects."""
    return [judge_defect(defect) for defect in (catalog() if defects is None else defects)]


def judge_correct() -> dict[Case, Verdict]:
    """The rule on the correct implementation, on every showcase with every seed."""
    cases = [replace(case, seed=seed) for case in SHOWCASES.values() for seed in SEEDS]
    return {case: _verdict(Blocked, case) for case in cases}


@cache
def _definition(case: Case) -> BuiltCase:
    """To judge by, never to run: a showcase has one float64 truth for all defects."""
    return build(case)


def _verdict(implementation: type[Blocked], case: Case) -> Verdict:
    return judge(_definition(case), implementation(build(case)).run())
