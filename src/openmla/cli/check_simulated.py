"""`openmla check --simulate`: random cases on a target's Gluon kernels, simulated on this CPU."""

from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from openmla.cli.options import require_simulator
from openmla.cli.reports import conclude, require_saved_case, show, with_progress
from openmla.errors import InvalidArgument, Unsupported


def check_simulated_command(
    console: Console, target: str, cases: int, seed: int, save_dir: Path, replay_file: Path | None
) -> bool:
    """Whether everything that ran was right, and nothing was found in the way it ran."""
    require_simulator("openmla check --simulate")
    try:
        import triton  # noqa: F401

        from openmla.testing.simulate import FAMILIES
    except ImportError as error:
        raise typer.BadParameter(f"simulate: needs Triton ({error})") from None
    if target not in FAMILIES:
        named = ", ".join(FAMILIES)
        raise typer.BadParameter(f"target: expected one of {named}, got {target or 'none'!r}")
    if replay_file is not None:
        return _replay(console, replay_file, target)
    return _run(console, target, cases, seed, save_dir)


def _run(console: Console, target: str, cases: int, seed: int, save_dir: Path) -> bool:
    from openmla.testing.simulate import FAMILIES
    from openmla.testing.simulate.fuzz import run_simulated

    console.print(
        f"{cases} random cases from seed {seed} on, {FAMILIES[target]} kernels for {target}, "
        "simulated on the CPU"
    )
    report = with_progress(
        console, cases, partial(run_simulated, cases, seed, target, save_dir=save_dir)
    )
    return conclude(console, report, _command(target))


def _replay(console: Console, path: Path, target: str) -> bool:
    from openmla.testing.simulate.fuzz import replay_simulated

    require_saved_case(path)
    try:
        failure = replay_simulated(path, target)
    except (InvalidArgument, Unsupported) as error:
        console.print(f"{path}: refused: {error}", markup=False)
        return True
    if failure is None:
        console.print(f"[green]{path}: nothing wrong[/green]")
        return True
    show(console, failure, _command(target))
    return False


def _command(target: str) -> str:
    return f"openmla check --simulate --target {target}"
