"""`openmla check`: random cases against the float64 reference, on this machine."""

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openmla.cli.check_executed import check_executed_command
from openmla.cli.check_simulated import check_simulated_command
from openmla.cli.options import DEVICE_HELP, device_here
from openmla.cli.reports import conclude, require_saved_case, show, with_progress
from openmla.planning import BACKENDS
from openmla.testing.fuzz import one_thread, replay, run_fuzz
from openmla.testing.indexer_fuzz import check_index_call

INDEX_SHARE = 5  # one call of the indexer for so many of attention


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
        ok = check_executed_command(console, target, cases, seed, save_dir)
    elif replay_file is not None:
        ok = _replay(console, replay_file, backend, device)
    else:
        run = partial(
            run_fuzz, cases, seed, backend, device, save_dir=save_dir, jobs=jobs,
            max_failures=max_failures, variants=variants,
            most_seconds=60 * minutes or math.inf,
        )  # fmt: skip
        last = seed + (cases - 1) // variants
        console.print(
            f"{cases} random cases, seeds {seed} to {last}, backend {backend}, on {device}"
        )
        report = with_progress(console, cases, run)
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        ok = conclude(console, report)
        ok &= _index_calls(console, -(-cases // INDEX_SHARE), seed, backend, device)
    raise typer.Exit(0 if ok else 1)


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


def _replay(console: Console, path: Path, backend: str, device: str) -> bool:
    require_saved_case(path)
    failure = replay(path, backend, device)
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure)
    return False
