"""The `openmla` command. One file per subcommand; this one only puts them together."""

import importlib
import sys

from openmla.errors import MissingExtra

# Subcommand -> (module, function).
COMMANDS = {
    "demo": ("openmla.cli.demo", "demo_command"),
    "plan": ("openmla.cli.plan", "plan_command"),
    "explain": ("openmla.cli.explain", "explain_command"),
    "check": ("openmla.cli.check", "check_command"),
    "validate": ("openmla.cli.validate", "validate_command"),
    "bench": ("openmla.cli.bench", "bench_command"),
    "compile": ("openmla.cli.compile", "compile_command"),
    "warmup": ("openmla.cli.warmup", "warmup_command"),
    "doctor": ("openmla.cli.doctor", "doctor_command"),
}


def main() -> None:
    """Entry point of the `openmla` script."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.exit(str(MissingExtra("openmla", "packages for the command line", "cli", str(error))))
    app = typer.Typer(
        name="openmla",
        help="Multi-head Latent Attention prefill: try it, plan it, check it, time it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, (module, function) in COMMANDS.items():
        # A known command needs its own module only; anything else shows the list of them all.
        if asked not in COMMANDS or asked == name:
            app.command(name)(getattr(importlib.import_module(module), function))
    app.callback()(lambda: None)  # keeps `openmla demo` a subcommand when it is the only one
    try:
        app()
    except MissingExtra as error:
        sys.exit(str(error))
