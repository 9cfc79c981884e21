"""What both kinds of `openmla check` show: a progress bar, a failure, the case of a saved one."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from openmla.testing.fuzz import Failure, load


def progress_bar(console: Console) -> Progress:
    """Cases done, of how many, and since when."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def show(console: Console, failure: Failure, command: str = "openmla check") -> None:
    """What failed, how small it stays failing, and the command that runs it again."""
    console.print(f"[red]{failure.kind}[/red] {failure.case}")
    if failure.shrunk != failure.case:
        console.print(f"  shrunk to: {failure.shrunk}")
    console.print(f"  {failure.message}", markup=False)
    if failure.path is not None:
        console.print(f"  again: {command} --replay {failure.path}", soft_wrap=True)


def require_saved_case(path: Path) -> None:
    """A file that a failure was saved in."""
    try:
        load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"replay: {path} is not a saved case ({error!r:.100})") from None
