"""Judge the acceptance rule on seeded defects: `python tests/defects/run.py` prints the table.

Exits with 1 unless every defect is seen, 95 % of its appearances, and nothing correct is rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from defects.catalog import catalog, judge_correct, judge_defect
from defects.showcases import Defect
from openmla.lab.testing.fuzz import one_thread

REQUIRED_SHARE = 0.95


def table(defects: Sequence[Defect]) -> bool:
    """Print how often each defect was rejected, and whether that is enough."""
    judged = rejected = seen = 0
    with one_thread():
        for defect in defects:
            verdict = judge_defect(defect)
            judged, rejected = judged + verdict.judged, rejected + verdict.rejected
            seen += verdict.rejected > 0
            count = f"{verdict.rejected}/{verdict.judged}"
            print(f"{count:>7}  {defect.name:36} {defect.breaks}")
        correct = judge_correct()
    accepted = sum(verdict.ok for verdict in correct.values())
    print(
        f"{rejected} of {judged} broken results rejected ({rejected / judged:.1%}), "
        f"{seen} of {len(defects)} defects seen; "
        f"{accepted} of {len(correct)} correct results accepted"
    )
    enough = rejected >= REQUIRED_SHARE * judged and seen == len(defects)
    return enough and accepted == len(correct)


if __name__ == "__main__":
    sys.exit(0 if table(catalog()) else 1)
