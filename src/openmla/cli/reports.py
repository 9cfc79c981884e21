"""What both kinds of `openmla check` show: a progress bar, the result, a failure."""

from collections.abc import Callable
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from openmla.errors import InvalidArgument
from openmla.lab.progress import progress
from openmla.lab.testing.fuzz import Failure, FuzzReport, Interrupted, load

MOST_REASONS = 20  # shown; the JSON has all


def with_progress(console: Console, cases: int, run: Callable[..., FuzzReport]) -> FuzzReport:
    """What a run that tells its progress reports; if Ctrl-C ends it, what it did until then."""
    with progress(console, "cases", cases) as tell:
        try:
            # Cases that run again between guard pages are counted past the last one.
            return run(
                progress=lambda done, total, note: tell(
                    min(done, cases), note.partition(":")[0] if done > cases else ""
                )
            )
        except Interrupted as stop:
            return stop.report


def conclude(console: Console, report: FuzzReport, command: str = "openmla check") -> bool:
    """Print the result and every failure; whether all is well."""
    console.print(_summary(report))
    for failure in report.failures:
        show(console, failure, command)
    if report.ok:
        console.print("[green]every case is right or refused[/green]")
    elif report.interrupted:
        console.print(f"[red]interrupted after {report.cases} cases[/red]")
    elif not report.right:
        console.print("[red]nothing ran: no case is right there[/red]")
        _say_why(console, report)
    elif report.cases < report.asked:
        console.print(f"[red]stopped after {len(report.failures)} failures[/red]")
    elif not report.failures:
        console.print(f"[red]only {report.right} of {report.least} cases ran[/red]")
        _say_why(console, report)
    return report.ok


def _say_why(console: Console, report: FuzzReport) -> None:
    """Why cases are refused, in one line."""
    for why, times in report.refused.most_common(1):
        total = report.refused.total()
        console.print(f"refused: {total}, {times} of them because: {why}", markup=False)


def _summary(report: FuzzReport) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    rows = [
        ("cases", f"{report.cases}"),
        ("right", f"{report.right}"),
        ("refused", f"{report.refused.total()}"),
        ("failures", f"{len(report.failures)}"),
        ("with random widths", f"{report.random_widths}"),
        ("with poisoned memory", f"{report.poisoned}"),
        ("with guarded memory", f"{report.guarded}"),
        ("largest share of the error bound", f"{report.worst.get('bound', 0):.2f}"),
        ("largest share of the lse limit", f"{report.worst.get('lse', 0):.2f}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [
        (f"right: {form}, {name}", f"{n}") for (form, name), n in sorted(report.served.items())
    ]
    rows += [(f"refused: {why}", f"{n}") for why, n in report.refused.most_common(MOST_REASONS)]
    for name, value in rows:
        table.add_row(name, value)
    return table


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
    except (OSError, InvalidArgument) as error:
        raise typer.BadParameter(f"replay: {path} is not a saved case ({error})") from None
