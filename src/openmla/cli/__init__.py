"""The `openmla` command. One file per subcommand; this one only puts them together.

A subcommand's module is imported when the subcommand is asked for, so help comes at once: torch
takes seconds to import.
"""

import importlib
import sys
from typing import Annotated, NamedTuple

from openmla import __version__
from openmla.errors import MissingExtra


class Command(NamedTuple):
    """Where a subcommand is, and what the list of all of them says of it."""

    module: str
    function: str
    help: str


COMMANDS = {
    "demo": Command(
        "openmla.cli.demo",
        "demo_command",
        "Run dense, latent and sparse calls on this machine, and check each against float64.",
    ),
    "plan": Command(
        "openmla.cli.plan", "plan_command", "Say which kernel a model gets on a chip, and why."
    ),
    "explain": Command(
        "openmla.cli.explain",
        "explain_command",
        "Say what `plan --verbose` says, and predict how fast the kernel should be.",
    ),
    "doctor": Command(
        "openmla.cli.doctor",
        "doctor_command",
        "Say what this machine has, which kernel each call gets, and what to do next.",
    ),
    "bench": Command(
        "openmla.cli.bench",
        "bench_command",
        "Time openmla and its peers on this machine, side by side.",
    ),
    "warmup": Command(
        "openmla.cli.warmup",
        "warmup_command",
        "Compile the kernels of a model on this GPU before its first request.",
    ),
    "check": Command(
        "openmla.cli.check",
        "check_command",
        "Run random cases, and compare each with the float64 reference.",
    ),
    "validate": Command(
        "openmla.cli.validate",
        "validate_command",
        "Run every kernel of a chip once, easy cases first, and write the results to a file.",
    ),
    "compile": Command(
        "openmla.cli.compile",
        "compile_command",
        "Compile every kernel for its chips without a GPU, and compare each with its plan.",
    ),
}
"""In the order in which a newcomer needs them."""


def main() -> None:
    """Entry point of the `openmla` script."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.exit(str(MissingExtra("openmla", "packages for the command line", "cli", str(error))))
    app = typer.Typer(
        name="openmla",
        help="Multi-head Latent Attention: try it, plan it, check it, time it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, command in COMMANDS.items():
        function = _listed_only
        if asked == name:
            function = getattr(importlib.import_module(command.module), command.function)
        app.command(name, help=command.help)(function)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"openmla {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version and exit."
            ),
        ] = False,
    ) -> None:
        """Options that stand before a subcommand."""

    try:
        app()
    except MissingExtra as error:
        sys.exit(str(error))


def _listed_only() -> None:
    """Stands for a subcommand that was not asked for."""
