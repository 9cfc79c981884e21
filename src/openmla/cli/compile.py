"""`openmla compile`: compile every kernel for its chips, here, without a GPU."""

import json
import os
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from openmla.cli.options import named_target, writable_folder


def compile_command(
    target: Annotated[
        list[str] | None,
        typer.Option(help="Only this target (may be repeated): h200, sm_90, gfx950 …"),
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
    """Compile every kernel for its chips without a GPU, and compare each with its plan."""
    from rich.console import Console

    from openmla.lab.compiling import store
    from openmla.lab.compiling.table import TARGET_NAMES, compile_all, failures

    archs = [_compiled_arch(name, TARGET_NAMES) for name in target or ()]
    if update is not None:
        writable_folder("update", update)
        os.environ["OPENMLA_COMPILE_CACHE"] = str(update)
    rows = compile_all(
        targets=archs,
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


def _compiled_arch(name: str, archs: Collection[str]) -> str:
    """The architecture of a target, as compile jobs name it: "sm90"."""
    chip = named_target(name)
    arch = chip.arch.replace("_", "")
    if arch not in archs:
        raise typer.BadParameter(
            f"target: {name} is {chip.arch}; kernels are compiled for {', '.join(archs)}"
        )
    return arch
