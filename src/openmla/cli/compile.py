"""`openmla compile`: compile every kernel for its chips, here, without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def compile_command(
    target: Annotated[
        list[str] | None, typer.Option(help="Only this target (may be repeated): sm90, gfx950 …")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compile what is cached too")
    ] = False,
) -> None:
    """Compile all kernel configurations and compare registers and memory with the plans."""
    from openmla.aot import TARGETS
    from openmla.aot_cli import compile_all, failures

    for name in target or ():
        if name not in TARGETS:
            raise typer.BadParameter(f"expected one of {', '.join(TARGETS)}, got {name!r}")
    wrong = failures(compile_all(targets=target or (), use_cache=not no_cache))
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
