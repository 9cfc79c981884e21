"""Progress of what takes a while: a bar on a terminal, and without one a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
Tell = Callable[[int, str], None]
"""How many steps are done, and what is done now."""
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(
    console: Console,
    what: str,
    total: int | None,
    every: float = SECONDS_BETWEEN_LINES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tell]:
    """A function that shows how far a command is.

    A file or a pipe gets a line for the first step, then one every `every` seconds at most, so that
    a log neither stays empty nor fills up.
    """
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done, note: bar.update(
                task, completed=done, description=f"{what}: {note}" if note else what
            )
        return
    last = -every

    def tell(done: int, note: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= every:
            last = now
            of = f" of {total}" if total else ""
            console.print(f"{what}: {done}{of}" + f", {note}" * bool(note), highlight=False)

    yield tell


def tracked(items: Iterable[T], console: Console, what: str, total: int | None) -> Iterator[T]:
    """The items, with progress shown while they are taken."""
    with progress(console, what, total) as tell:
        for done, item in enumerate(items, 1):
            tell(done, "")
            yield item
