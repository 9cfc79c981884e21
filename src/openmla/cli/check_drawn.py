"""`openmla check --simulate` and `--execute`: a target's kernels, checked on this CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from openmla.cli.options import gluon_chip, require_simulator
from openmla.cli.reports import require_saved_case, show, with_progress
from openmla.dispatch import triton_version
from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.testing.fuzz import FuzzReport
from openmla.planning.registry import families_of
from openmla.planning.target import target_by_name

if TYPE_CHECKING:
    from openmla.lab.testing.simulate.fuzz import Check


@dataclass(frozen=True)
class Way:
    """How cases run on the kernels of a target."""

    option: str
    target: str
    words: str
    check: Check

    @property
    def command(self) -> str:
        """What runs a saved case again, but for its file."""
        return f"openmla check --{self.option} --target {self.target}"


def simulating(target: str) -> Way:
    """The source of the kernels, in the simulator."""
    require_simulator("openmla check --simulate")
    try:
        import triton  # noqa: F401

        from openmla.lab.testing.simulate import FAMILIES, check_simulated
    except ImportError as error:
        raise typer.BadParameter(f"simulate: needs Triton ({error})") from None
    target = gluon_chip(target, "--simulate")
    words = f"{FAMILIES[target]} kernels for {target}, simulated on the CPU"
    return Way("simulate", target, words, check_simulated)


def executing(target: str) -> Way:
    """What the compiler makes of the kernels, instruction by instruction."""
    require_simulator("openmla check --execute")
    try:
        import triton

        from openmla.lab.testing.executed.check import check_executed
        from openmla.lab.testing.executed.prepare import ARCHITECTURES
    except ImportError as error:
        raise typer.BadParameter(f"execute: needs Triton ({error})") from None
    target = gluon_chip(target, "--execute")
    kernels = families_of(target_by_name(target))[0].kernels
    first = min(kernel.first_triton for kernel in kernels if kernel.launcher)
    if triton_version() < first:
        needed = ".".join(map(str, first))
        raise typer.BadParameter(
            f"execute: Triton {needed} is the first that compiles kernels for {target}, "
            f"{triton.__version__} is installed"
        )
    compiled = f"compiled for {ARCHITECTURES[target]} by Triton {triton.__version__}"
    return Way("execute", target, f"{compiled} and executed on the CPU", check_executed)


def run_drawn(console: Console, way: Way, cases: int, seed: int, save_dir: Path) -> FuzzReport:
    """Random cases, drawn until so many ran."""
    from openmla.lab.testing.simulate.fuzz import run_simulated

    console.print(f"{cases} random cases from seed {seed} on, {way.words}")
    run = partial(run_simulated, cases, seed, way.target, save_dir=save_dir, check=way.check)
    return with_progress(console, cases, run)


def replay_drawn(console: Console, way: Way, path: Path) -> bool:
    """Whether nothing is wrong with a saved case any more."""
    from openmla.lab.testing.simulate.fuzz import replay_simulated

    require_saved_case(path)
    try:
        failure = replay_simulated(path, way.target, way.check)
    except (InvalidArgument, Unsupported) as error:
        console.print(f"{path}: refused: {error}", markup=False)
        return True
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure, way.command)
    return False
