"""`openmla check --simulate`: random cases on a target's Gluon kernels, simulated on this CPU."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openmla.errors import InvalidArgument, Unsupported
from openmla.testing.fuzz import Failure, load


def check_simulated_command(
    console: Console, target: str, cases: int, seed: int, save_dir: Path, replay_file: Path | None
) -> bool:
    """Whether everything that ran was right, and nothing was found in the way it ran."""
    try:
        import triton  # noqa: F401

        from openmla.testing.simulate import FAMILIES
    except ImportError as error:
        raise typer.BadParameter(f"simulate: needs numpy and Triton ({error})") from None
    if target not in FAMILIES:
        named = ", ".join(FAMILIES)
        raise typer.BadParameter(f"target: expected one of {named}, got {target or 'none'!r}")
    if replay_file is not None:
        return _replay(console, replay_file, target)
    return _run(console, target, cases, seed, save_dir)


def _run(console: Console, target: str, cases: int, seed: int, save_dir: Path) -> bool:
    from openmla.testing.simulate import FAMILIES
    from openmla.testing.simulate_fuzz import run_simulated

    console.print(
        f"{cases} random cases from seed {seed} on, {FAMILIES[target]} kernels for {target}, "
        "simulated on the CPU"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("cases", total=cases)
        report = run_simulated(
            cases, seed, target, save_dir=save_dir,
            progress=lambda done, total, note: bar.update(task, completed=done),
        )  # fmt: skip
    table = Table(box=box.SIMPLE, show_header=False)
    rows = [(form, str(number)) for form, number in sorted(report.ran.items())]
    rows += [
        ("cases that ran", f"{report.cases} of {report.draws} drawn"),
        ("with poisoned memory", f"{report.poisoned}"),
        ("failures", f"{len(report.failures)}"),
        ("largest share of the error bound", f"{report.worst:.2f}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"refused: {why}", f"{n}") for why, n in report.refused.most_common()]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for failure in report.failures:
        _show(console, failure, target)
    ok = report.ok(cases)
    if ok:
        console.print("[green]all right, and nothing found[/green]")
    elif not report.failures:
        console.print(f"[red]only {report.cases} of {report.draws} draws ran[/red]")
    return ok


def _replay(console: Console, path: Path, target: str) -> bool:
    from openmla.testing.simulate_fuzz import replay_simulated

    try:
        load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"replay: {path} is not a saved case ({error!r:.100})") from None
    try:
        failure = replay_simulated(path, target)
    except (InvalidArgument, Unsupported) as error:
        console.print(f"{path}: refused: {error}", markup=False)
        return True
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    _show(console, failure, target)
    return False


def _show(console: Console, failure: Failure, target: str) -> None:
    console.print(f"[red]{failure.kind}[/red] {failure.case}")
    if failure.shrunk != failure.case:
        console.print(f"  shrunk to: {failure.shrunk}")
    console.print(f"  {failure.message}", markup=False)
    if failure.path is not None:
        again = f"openmla check --simulate --target {target} --replay {failure.path}"
        console.print(f"  again: {again}", soft_wrap=True)
