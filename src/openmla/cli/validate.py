"""`openmla validate`: every kernel of a chip's family, by rising difficulty, into one JSON file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from openmla.cli.options import (
    GLUON_CHIPS,
    INTERRUPTED,
    gluon_chip,
    require_simulator,
    writable_file,
    write_file,
)
from openmla.dispatch import device_target
from openmla.lab.bench.provenance import provenance
from openmla.lab.testing.validate import Validation, steps_of, validate


def validate_command(
    target: Annotated[str, typer.Option(help=f"{', '.join(GLUON_CHIPS)}; empty: this GPU.")] = "",
    simulate: Annotated[
        bool, typer.Option(help="In the simulator on this CPU, to see what a run does.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that are compiled and run at once.")] = 4,
    json_file: Annotated[
        Path, typer.Option("--json", help="Where the results go: the file to send back.")
    ] = Path("openmla-validation.json"),
) -> None:
    """Run every kernel of a chip once, easy cases first, and write the results to a file."""
    console = Console()
    here = "" if not torch.cuda.is_available() else device_target(torch.device("cuda")).name
    if not target and not here:
        raise typer.BadParameter(
            "this machine has no GPU: name a chip whose kernels to simulate, such as "
            "--simulate --target b200"
        )
    target = gluon_chip(target or here, "validate")
    if not simulate and (not here or gluon_chip(here, "validate") != target):
        raise typer.BadParameter(
            f"target: this machine has {here or 'no GPU'}, not {target}; --simulate needs none"
        )
    if simulate:
        require_simulator("openmla validate --simulate")
    writable_file("json", json_file)
    tell = partial(console.print, highlight=False)
    report = validate(target, simulated=simulate, jobs=jobs, tell=tell)
    record: dict[str, Any] = {
        **provenance(f"openmla validate --target {target}", gpu=not simulate),
        **report.to_json(),
    }
    console.print(_summary(report))
    _write(json_file, record)  # whatever becomes of the timings
    if report.interrupted:
        console.print(f"interrupted after {len(report.outcomes)} cases; written: {json_file}")
        raise typer.Exit(INTERRUPTED)
    if not simulate:
        record["speed"] = _speed(console)
        _write(json_file, record)
    console.print(f"written: {json_file}")
    raise typer.Exit(0 if report.ok else 1)


def _write(path: Path, record: dict[str, Any]) -> None:
    write_file("json", path, json.dumps(record, indent=1) + "\n")


def _summary(report: Validation) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("step", "right", "refused", "failed"):
        table.add_column(heading)
    for step in steps_of(report.target):
        table.add_row(step, *map(str, report.counts(step).values()))
    return table


def _speed(console: Console) -> list[dict[str, Any]]:
    """Measured shares of the matmul beside what `openmla explain` predicts of the peak."""
    from openmla.lab.bench.predicted import measured_and_predicted

    rows = []
    for row in measured_and_predicted():
        console.print_json(json.dumps(row))
        rows.append(row)
    return rows
