"""`openmla compile`: compile every kernel for its chips, here, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def compile_command(
    target: Annotated[
        list[str] | None, typer.Option(help="Only this target (may be repeated): sm90, gfx950 …")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compile what is cached too")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the reports as JSON lines, and no table")
    ] = False,
) -> None:
    """Compile all kernel configurations and compare registers and memory with the plans."""
    from rich.console import Console

    from openmla.aot import TARGETS
    from openmla.aot_table import compile_all, failures

    for name in target or ():
        if name not in TARGETS:
            raise typer.BadParameter(f"expected one of {', '.join(TARGETS)}, got {name!r}")
    rows = compile_all(targets=target or (), use_cache=not no_cache, console=Console(quiet=as_json))
    if as_json:
        for _, report in rows:
            typer.echo(json.dumps(asdict(report)))
    wrong = failures(rows)
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
