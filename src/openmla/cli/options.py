"""Option values that several subcommands check alike."""

from __future__ import annotations

import torch
import typer


def device_here(name: str) -> torch.device:
    """A device that this machine has."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:80]
        raise typer.BadParameter(f"no such device here: {name} ({reason})") from None
    return device
