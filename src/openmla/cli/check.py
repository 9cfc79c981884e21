"""`openmla check`: random cases against the float64 reference, on this machine."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from openmla.cli.check_executed import check_executed_command
from openmla.cli.check_simulated import check_simulated_command
from openmla.cli.failures import progress_bar, require_saved_case, show
from openmla.cli.options import DEVICE_HELP, device_here
from openmla.planning import BACKENDS
from openmla.testing.fuzz import FuzzReport, one_thread, replay, run_fuzz
from openmla.testing.indexer_fuzz import check_index_call

INDEX_SHARE = 5  # one call of the indexer for so many of attention
MOST_REASONS = 20  # shown; the JSON has all


def check_command(
    cases: Annotated[int, typer.Option(min=1, help="How many random cases.")] = 500,
    seed: Annotated[int, typer.Option(help="Case i is made from seed + i.")] = 0,
    backend: Annotated[str, typer.Option(help="auto, or one kernel family.")] = "auto",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    jobs: Annotated[
        int, typer.Option(min=0, help="Child processes; 0: none on the CPU, one on a GPU.")
    ] = 0,
    max_failures: Annotated[int, typer.Option(min=1, help="Stop after this many failures.")] = 20,
    minutes: Annotated[
        float, typer.Option(help="Begin no more cases after this time; 0: all of them.")
    ] = 0,
    variants: Annotated[
        int, typer.Option(min=1, help="Cases per compiled kernel: other lengths and numbers.")
    ] = 1,
    save_dir: Annotated[
        Path, typer.Option(help="Failing cases are saved here, shrunk, as JSON.")
    ] = Path("openmla-failures"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report here.")
    ] = None,
    replay_file: Annotated[
        Path | None, typer.Option("--replay", help="Run one saved case again instead.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option(help="Run the Gluon kernels of --target in the simulator instead.")
    ] = False,
    execute: Annotated[
        bool, typer.Option(help="Compile for --target and execute that code on the CPU instead.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="With --simulate or --execute: h200, b200 or mi355x.")
    ] = "",
) -> None:
    """Check openmla on this machine: accuracy, unused memory, memory bounds."""
    console = Console()
    device = str(device_here(device))
    if backend not in BACKENDS:
        raise typer.BadParameter(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"json: there is no folder {json_file.parent}")
    if simulate:
        ok = check_simulated_command(console, target, cases, seed, save_dir, replay_file)
    elif execute:
        ok = check_executed_command(console, target, cases, seed)
    elif replay_file is not None:
        ok = _replay(console, replay_file, backend, device)
    else:
        run = partial(
            run_fuzz, cases, seed, backend, device, save_dir=save_dir, jobs=jobs,
            max_failures=max_failures, variants=variants,
            most_seconds=60 * minutes or math.inf,
        )  # fmt: skip
        console.print(
            f"{cases} random cases, seeds {seed} to {seed + cases - 1}, backend {backend}, "
            f"on {device}"
        )
        ok = _fuzz(console, cases, run, json_file)
        ok &= _index_calls(console, -(-cases // INDEX_SHARE), seed, backend, device)
    raise typer.Exit(0 if ok else 1)


def _fuzz(
    console: Console, cases: int, run: Callable[..., FuzzReport], json_file: Path | None
) -> bool:
    with progress_bar(console) as bar:
        task = bar.add_task("cases", total=cases)
        report = run(
            progress=lambda done, total, note: bar.update(task, completed=done, total=total)
        )
    console.print(_summary(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    for failure in report.failures:
        show(console, failure)
    if report.ok:
        console.print("[green]every case is right or refused[/green]")
    elif not report.right:
        console.print("[red]nothing ran: no case is right there[/red]")
    elif report.cases < report.asked:
        console.print(f"[red]stopped after {len(report.failures)} failures[/red]")
    return report.ok


def _index_calls(console: Console, calls: int, seed: int, backend: str, device: str) -> bool:
    with one_thread():
        results = [check_index_call(seed + i, backend, device) for i in range(calls)]
    counts = Counter(result.status for result in results)
    for i, result in enumerate(results):
        if result.status == "failed":
            console.print(
                f"[red]indexer seed {seed + i}, {result.call}[/red]: {result.problems[0]}"
            )
    said = ", ".join(f"{counts[status]} {status}" for status in ("right", "refused", "failed"))
    console.print(f"{calls} calls of the indexer: {said}")
    return not counts["failed"]


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


def _replay(console: Console, path: Path, backend: str, device: str) -> bool:
    require_saved_case(path)
    failure = replay(path, backend, device)
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure)
    return False
