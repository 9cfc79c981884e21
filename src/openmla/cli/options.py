"""Option values that several subcommands check alike."""

import torch
import typer

DEVICE_HELP = "Where to run: cpu, cuda, cuda:1 …; auto: a GPU if there is one."


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
