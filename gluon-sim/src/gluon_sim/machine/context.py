"""Which partition is running on this Python thread. A leaf module, so that values can reach it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gluon_sim.machine.scheduler import Agent

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_local = threading.local()


class Location(NamedTuple):
    """A line of a kernel file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def enter(agent: Agent) -> None:
    """Bind the running Python thread to `agent`."""
    _local.agent = agent


def current() -> Agent:
    """The partition that is executing; kernels only run inside `simulate`."""
    try:
        agent: Agent = _local.agent
    except AttributeError:
        raise RuntimeError("a simulated operation was called outside simulate()") from None
    return agent


def here() -> Location:
    """The innermost line that is not the simulator's own: a line of the kernel."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)
