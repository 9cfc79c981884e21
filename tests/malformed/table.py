"""The malformed calls, all of them: see arguments.py for what an entry means.

`python -O -m malformed.table`, run in tests/, judges every entry without pytest.
"""

from __future__ import annotations

import sys

from malformed.arguments import Malformed, judge
from malformed.attention import ATTENTION
from malformed.others import OTHERS

ENTRIES: list[Malformed] = [*ATTENTION, *OTHERS]


def main() -> int:
    """Judge every entry; one line per failure, and a count."""
    failures = [f"{entry}: {problem}" for entry in ENTRIES if (problem := judge(entry))]
    print(*failures, sep="\n")
    print(f"{len(ENTRIES) - len(failures)} of {len(ENTRIES)} refused as they should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
