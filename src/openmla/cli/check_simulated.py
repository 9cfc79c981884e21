"""`openmla check --simulate`: random cases on a target's Gluon kernels, simulated on this CPU."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from openmla.cli.failures import progress_bar, require_saved_case, show
from openmla.errors import InvalidArgument, Unsupported


def check_simulated_command(
    console: Console, target: str, cases: int, seed: int, save_dir: Path, replay_file: Path | None
) -> bool:
    """Whether everything that ran was right, and nothing was found in the way it ran."""
    try:
        import triton  # noqa: F401

        from openmla.testing.simulate import FAMILIES
    except ImportError as error:
        raise typer.BadParameter(f"simulate: needs gluon-sim and Triton ({error})") from None
    if target not in FAMILIES:
        named = ", ".join(FAMILIES)
        raise typer.BadParameter(f"target: expected one of {named}, got {target or 'none'!r}")
    if replay_file is not None:
        return _replay(console, replay_file, target)
    return _run(console, target, cases, seed, save_dir)


def _run(console: Console, target: str, cases: int, seed: int, save_dir: Path) -> bool:
    from openmla.testing.simulate import FAMILIES
    from openmla.testing.simulate.fuzz import run_simulated

    console.print(
        f"{cases} random cases from seed {seed} on, {FAMILIES[target]} kernels for {target}, "
        "simulated on the CPU"
    )
    with progress_bar(console) as bar:
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
        show(console, failure, _command(target))
    ok = report.ok(cases)
    if ok:
        console.print("[green]all right, and nothing found[/green]")
    elif not report.failures:
        console.print(f"[red]only {report.cases} of {report.draws} draws ran[/red]")
    return ok


def _replay(console: Console, path: Path, target: str) -> bool:
    from openmla.testing.simulate.fuzz import replay_simulated

    require_saved_case(path)
    try:
        failure = replay_simulated(path, target)
    except (InvalidArgument, Unsupported) as error:
        console.print(f"{path}: refused: {error}", markup=False)
        return True
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure, _command(target))
    return False


def _command(target: str) -> str:
    return f"openmla check --simulate --target {target}"
