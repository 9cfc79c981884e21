"""Progress without a terminal: a line for the first step, then one every few seconds."""

from __future__ import annotations

import io

from rich.console import Console

from openmla.lab.progress import progress, tracked


def test_lines_come_now_and_then() -> None:
    out, clock = io.StringIO(), iter([0.0, 1.0, 9.0, 10.0, 12.0])
    with progress(Console(file=out), "cases", 5, 10.0, lambda: next(clock)) as tell:
        for done in range(5):
            tell(done, f"case {done}")
    assert out.getvalue().splitlines() == ["cases: 0 of 5, case 0", "cases: 3 of 5, case 3"]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    assert list(tracked("ab", console, "compiling", 2)) == ["a", "b"]
    assert "compiling" in out.getvalue()
