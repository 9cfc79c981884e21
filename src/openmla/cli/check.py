"""`openmla check`: random cases against the float64 reference, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openmla.cli.check_simulated import check_simulated_command
from openmla.cli.options import device_here
from openmla.plan import BACKENDS
from openmla.testing.defects import catalog, judge_correct, judge_defect
from openmla.testing.fuzz import Failure, FuzzReport, load, one_thread, replay, run_fuzz

REQUIRED_SHARE = 0.95


def check_command(
    cases: Annotated[int, typer.Option(min=1, help="How many random cases.")] = 500,
    seed: Annotated[int, typer.Option(help="Case i is made from seed + i.")] = 0,
    backend: Annotated[str, typer.Option(help="auto, or one kernel family.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the tensors live: cpu, cuda …")] = "cpu",
    save_dir: Annotated[
        Path, typer.Option(help="Failing cases are saved here, shrunk, as JSON.")
    ] = Path("openmla-failures"),
    replay_file: Annotated[
        Path | None, typer.Option("--replay", help="Run one saved case again instead.")
    ] = None,
    defects: Annotated[
        bool, typer.Option(help="Judge the acceptance rule on seeded defects instead.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option(help="Run the Gluon kernels of --target in the simulator instead.")
    ] = False,
    target: Annotated[str, typer.Option(help="With --simulate: h200, b200 or mi355x.")] = "",
) -> None:
    """Check openmla on this machine: accuracy, unused memory, memory bounds."""
    console = Console()
    device_here(device)
    if backend not in BACKENDS:
        raise typer.BadParameter(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if simulate:
        ok = check_simulated_command(console, target, cases, seed, save_dir, replay_file)
    elif defects:
        ok = _judge_defects(console)
    elif replay_file is not None:
        ok = _replay(console, replay_file, backend, device)
    else:
        ok = _fuzz(console, cases, seed, backend, device, save_dir)
    raise typer.Exit(0 if ok else 1)


def _fuzz(
    console: Console, cases: int, seed: int, backend: str, device: str, save_dir: Path
) -> bool:
    console.print(
        f"{cases} random cases, seeds {seed} to {seed + cases - 1}, backend {backend}, on {device}"
    )
    with _progress(console) as bar:
        task = bar.add_task("cases", total=cases)
        report = run_fuzz(
            cases, seed, backend, device, save_dir=save_dir,
            progress=lambda done, total, note: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    console.print(_summary(report))
    for failure in report.failures:
        _show(console, failure)
    if report.ok:
        console.print("[green]all accepted[/green]")
    elif not report.failures:
        console.print("[red]nothing ran: every case is unsupported there[/red]")
    return report.ok


def _summary(report: FuzzReport) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    rows = [
        ("cases", f"{report.cases}"),
        ("with poisoned memory", f"{report.poisoned}"),
        ("against guard pages", f"{report.guarded}" if report.guarded else "0 (CPU only)"),
        ("failures", f"{len(report.failures)}"),
        ("largest share of the error bound", f"{report.worst.get('bound', 0):.2f}"),
        ("largest share of the lse limit", f"{report.worst.get('lse', 0):.2f}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"unsupported: {why}", f"{n}") for why, n in report.unsupported.most_common()]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _show(console: Console, failure: Failure) -> None:
    console.print(f"[red]{failure.kind}[/red] {failure.case}")
    if failure.shrunk != failure.case:
        console.print(f"  shrunk to: {failure.shrunk}")
    console.print(f"  {failure.message}", markup=False)
    if failure.path is not None:
        console.print(f"  again: openmla check --replay {failure.path}", soft_wrap=True)


def _replay(console: Console, path: Path, backend: str, device: str) -> bool:
    try:
        load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"replay: {path} is not a saved case ({error!r:.100})") from None
    failure = replay(path, backend, device)
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    _show(console, failure)
    return False


def _judge_defects(console: Console) -> bool:
    """Every defect must be seen, 95 % of all its appearances, and nothing correct rejected."""
    table = Table("defect", "what it breaks", "rejected", box=box.SIMPLE)
    judged = rejected = unseen = 0
    defects = catalog()
    with _progress(console) as bar, one_thread():
        for defect in bar.track(defects, description="defects"):
            verdict = judge_defect(defect)
            judged, rejected = judged + verdict.judged, rejected + verdict.rejected
            unseen += verdict.rejected == 0
            color = "green" if not verdict.slipped else "yellow" if verdict.rejected else "red"
            count = f"[{color}]{verdict.rejected}/{verdict.judged}[/{color}]"
            table.add_row(defect.name, defect.breaks, count)
        correct = judge_correct()
    console.print(table)
    accepted = sum(verdict.ok for verdict in correct.values())
    console.print(
        f"{rejected} of {judged} broken results rejected ({rejected / judged:.1%}), "
        f"{len(defects) - unseen} of {len(defects)} defects seen; "
        f"{accepted} of {len(correct)} correct results accepted"
    )
    return rejected >= REQUIRED_SHARE * judged and not unseen and accepted == len(correct)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
