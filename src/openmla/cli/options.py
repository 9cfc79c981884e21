"""Option values that several subcommands check alike."""

from importlib import import_module

import torch
import typer

from openmla.errors import MissingExtra

DEVICE_HELP = "Where to run: cpu, cuda, cuda:1 …; auto: a GPU if there is one."


def require_simulator(part: str) -> None:
    """gluon-sim, which runs kernels on a CPU, is an extra."""
    try:
        import_module("gluon_sim")
    except ImportError as error:
        raise MissingExtra(part, "gluon-sim", "sim", str(error)) from error


def device_here(name: str) -> torch.device:
    """A device that this machine has; `auto` is a GPU if there is one, the CPU otherwise."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:80]
        raise typer.BadParameter(f"no such device here: {name} ({reason})") from None
    return device
