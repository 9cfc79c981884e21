"""`openmla check --execute`: random cases on a target's compiled kernels, executed on this CPU."""

from __future__ import annotations

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from openmla.cli.failures import progress_bar


def check_executed_command(console: Console, target: str, cases: int, seed: int) -> bool:
    """Whether every result was accepted, the same under all schedules, and no fault was found."""
    try:
        import triton

        from openmla.testing.executed.fuzz import run_executed
        from openmla.testing.executed.prepare import ARCHITECTURES
    except ImportError as error:
        raise typer.BadParameter(f"execute: needs numpy and Triton ({error})") from None
    if target not in ARCHITECTURES:
        named = ", ".join(ARCHITECTURES)
        raise typer.BadParameter(f"target: expected one of {named}, got {target or 'none'!r}")
    console.print(
        f"{cases} random cases from seed {seed} on, compiled for {ARCHITECTURES[target]} by Triton "
        f"{triton.__version__} and executed on the CPU"
    )
    with progress_bar(console) as bar:
        task = bar.add_task("cases", total=cases)
        report = run_executed(
            cases, seed, target, progress=lambda done, total, note: bar.update(task, completed=done)
        )
    table = Table(box=box.SIMPLE, show_header=False)
    rows = [(form, str(number)) for form, number in sorted(report.ran.items())]
    rows += [
        ("cases that ran", f"{report.cases} of {report.draws} drawn"),
        ("failures", f"{len(report.failures)}"),
        ("largest share of the error bound", f"{report.worst:.2f}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"refused: {why}", f"{n}") for why, n in report.refused.most_common()]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for failure in report.failures:
        console.print(f"{failure.kind}: {failure.case}\n{failure.message}", markup=False)
    if report.ok(cases):
        console.print("[green]all right, and nothing found[/green]")
    return report.ok(cases)
