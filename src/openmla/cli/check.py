"""`openmla check`: random cases against the float64 reference, on this machine."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from openmla.cli.check_drawn import executing, replay_drawn, run_drawn, simulating
from openmla.cli.options import (
    DEVICE_HELP,
    INTERRUPTED,
    device_here,
    writable_file,
    writable_folder,
    write_file,
)
from openmla.cli.reports import conclude, require_saved_case, show, with_progress
from openmla.lab.progress import progress
from openmla.lab.testing.fuzz import one_thread, replay, run_fuzz
from openmla.lab.testing.indexer_fuzz import IndexResult, check_index_call
from openmla.planning import BACKENDS
from openmla.problem import Backend

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
        str, typer.Option(help="With --simulate or --execute: whose kernels, h200, b200 or mi355x.")
    ] = "",
) -> None:
    """Run random cases, and compare each with the float64 reference: accuracy, memory, bounds."""
    console = Console()
    device = str(device_here(device))
    if backend not in BACKENDS:
        raise typer.BadParameter(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if simulate and execute:
        raise typer.BadParameter(
            "--simulate runs a kernel's source and --execute its compiled code: ask for one of them"
        )
    if target and not (simulate or execute):
        raise typer.BadParameter(f"--target {target} goes with --simulate or --execute")
    if replay_file is not None and json_file is not None:
        raise typer.BadParameter("json: one replayed case has no report")
    way = simulating(target) if simulate else executing(target) if execute else None
    if replay_file is not None:
        if way is not None:
            ok = replay_drawn(console, way, replay_file)
        else:
            ok = _replay(console, replay_file, backend, device)
        raise typer.Exit(0 if ok else 1)
    writable_file("json", json_file)
    writable_folder("save-dir", save_dir)
    calls = IndexCalls()
    if way is not None:
        report = run_drawn(console, way, cases, seed, save_dir)
        conclude(console, report, way.command)
    else:
        run = partial(
            run_fuzz,
            cases,
            seed,
            backend,
            device,
            save_dir=save_dir,
            jobs=jobs,
            max_failures=max_failures,
            variants=variants,
            most_seconds=60 * minutes or math.inf,
        )
        last = seed + (cases - 1) // variants
        console.print(
            f"{cases} random cases, seeds {seed} to {last}, backend {backend}, on {device}"
        )
        report = with_progress(console, cases, run)
        conclude(console, report)
        if not report.interrupted:
            calls = _index_calls(console, -(-cases // INDEX_SHARE), seed, backend, device)
    ok = report.ok and calls.ok
    if json_file is not None:
        record = {**report.to_json(), "ok": ok, "indexer": calls.to_json()}
        write_file("json", json_file, json.dumps(record, indent=1) + "\n")
    if report.interrupted or calls.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if ok else 1)


@dataclass
class IndexCalls:
    """What calls of the indexer gave."""

    results: list[IndexResult] = field(default_factory=list)
    interrupted: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """How many were right, refused and failed."""
        counted = Counter(result.status for result in self.results)
        return {status: counted[status] for status in ("right", "refused", "failed")}

    @property
    def ok(self) -> bool:
        """Whether all of them were right or refused."""
        return not self.counts["failed"] and not self.interrupted

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        failed = [result for result in self.results if result.status == "failed"]
        messages = [f"{result.call}: {result.problems[0]}" for result in failed]
        return {**self.counts, "interrupted": self.interrupted, "failures": messages}


def _index_calls(console: Console, calls: int, seed: int, backend: str, device: str) -> IndexCalls:
    done = IndexCalls()
    try:
        with one_thread(), progress(console, "calls of the indexer", calls) as tell:
            for i in range(calls):
                tell(i, "")
                done.results.append(check_index_call(seed + i, cast(Backend, backend), device))
    except KeyboardInterrupt:
        done.interrupted = True
    for i, result in enumerate(done.results):
        if result.status == "failed":
            console.print(
                f"[red]indexer seed {seed + i}, {result.call}[/red]: {result.problems[0]}"
            )
    said = ", ".join(f"{n} {status}" for status, n in done.counts.items())
    console.print(f"{len(done.results)} calls of the indexer: {said}")
    if done.interrupted:
        console.print("[red]interrupted[/red]")
    return done


def _replay(console: Console, path: Path, backend: str, device: str) -> bool:
    require_saved_case(path)
    failure = replay(path, backend, device)
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure)
    return False
