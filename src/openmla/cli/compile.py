"""`openmla compile`: compile every kernel for its chips, here, without a GPU."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from openmla.cli.options import writable_folder


def compile_command(
    target: Annotated[
        list[str] | None, typer.Option(help="Only this target (may be repeated): sm90, gfx950 …")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compile what is cached too")
    ] = False,
    update: Annotated[
        Path | None, typer.Option(help="Write the golden files of this folder (tests/compiled).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile side by side.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the reports as JSON lines, and no table")
    ] = False,
) -> None:
    """Compile all kernel configurations and compare registers and memory with the plans."""
    from rich.console import Console

    from openmla.lab.compiling import store
    from openmla.lab.compiling.table import TARGET_NAMES, compile_all, failures

    for name in target or ():
        if name not in TARGET_NAMES:
            raise typer.BadParameter(f"expected one of {', '.join(TARGET_NAMES)}, got {name!r}")
    if update is not None:
        writable_folder("update", update)
        os.environ["OPENMLA_COMPILE_CACHE"] = str(update)
    rows = compile_all(
        targets=target or (),
        use_cache=not no_cache,
        processes=jobs,
        console=Console(quiet=as_json),
    )
    if as_json:
        for _, report in rows:
            typer.echo(json.dumps(asdict(report)))
    if update is not None and not target:
        labels = [job.label for job, _ in rows]
        for label in store.prune(labels, rows[0][1].triton):
            typer.echo(f"no such job any more: {label}", err=True)
    wrong = failures(rows)
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
