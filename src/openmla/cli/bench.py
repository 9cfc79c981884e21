"""`openmla bench`: time openmla and its peers in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

TARGETS = ("cpu",)


def bench_command(
    target: Annotated[str, typer.Argument(help="What to measure: " + ", ".join(TARGETS))] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each contestant")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 keeps torch's choice")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, a few seconds")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the results here")] = None,
) -> None:
    """Time openmla against plain torch on this machine: medians, interleaved, one process."""
    from openmla.bench.cpu import Row, run_cpu
    from openmla.bench.report import table, write_json

    if target not in TARGETS:
        raise typer.BadParameter(f"expected one of {', '.join(TARGETS)}, got {target!r}")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        step = progress.add_task("first case (slow peers take a while)")
        for row in run_cpu(rounds, quick):
            rows.append(row)
            progress.update(step, description=f"done: {row.case} {row.dtype}")
    console.print(table(rows))
    if json is not None:
        options = f"--rounds {rounds} --threads {threads}" + " --quick" * quick
        try:
            write_json(json, rows, command=f"openmla bench {target} {options}")
        except OSError as error:
            raise typer.BadParameter(f"json: cannot write {json}: {error.strerror}") from None
        console.print(f"written to {json}")
