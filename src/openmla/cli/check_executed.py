"""`openmla check --execute`: random cases on a target's compiled kernels, executed on this CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from openmla.cli.options import require_simulator
from openmla.cli.reports import conclude, with_progress


def check_executed_command(
    console: Console, target: str, cases: int, seed: int, save_dir: Path
) -> bool:
    """Whether every result was accepted, the same under all schedules, and no fault was found."""
    require_simulator("openmla check --execute")
    try:
        import triton

        from openmla.testing.executed.check import check_executed
        from openmla.testing.executed.prepare import ARCHITECTURES
        from openmla.testing.simulate.fuzz import run_simulated
    except ImportError as error:
        raise typer.BadParameter(f"execute: needs Triton ({error})") from None
    if target not in ARCHITECTURES:
        named = ", ".join(ARCHITECTURES)
        raise typer.BadParameter(f"target: expected one of {named}, got {target or 'none'!r}")
    console.print(
        f"{cases} random cases from seed {seed} on, compiled for {ARCHITECTURES[target]} by Triton "
        f"{triton.__version__} and executed on the CPU"
    )
    run = partial(run_simulated, cases, seed, target, save_dir=save_dir, check=check_executed)
    return conclude(console, with_progress(console, cases, run))
