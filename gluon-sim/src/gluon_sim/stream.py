"""Launches of one stream, and which of them may run at the same time.

They run one after another, except that a launch with `launch_pdl` (programmatic dependent launch)
may begin as soon as every program of the one in front has ended, or has executed
`griddepcontrol.launch_dependents`. `griddepcontrol.wait` blocks until the launch in front has ended
and its writes can be seen. So what a dependent launch does before its wait, or in a warp that heard
of no wait, is not ordered after the launch in front.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def contended_by(kernel: Any) -> tuple[str, ...]:
    """Arguments in which programs of a launch overwrite one another's stores on purpose.

    A kernel has them as an attribute: `kernel.contended = ("map_ptr",)`. Any of the stores to an
    element may be the one that lasts, and the kernel must be right with each.
    """
    names: tuple[str, ...] = getattr(kernel, "contended", ())
    return names


@dataclass
class Launch:
    """One launch: which earlier ones may still run when it begins, and what its programs said."""

    number: int
    kernel: str
    running: frozenset[int] = frozenset()
    """Launches that may not have ended when this one begins."""
    in_front: Launch | None = None
    """The launch that `griddepcontrol.wait` waits for; None when it had ended before."""
    waited: bool = False
    """A program has waited for the launch in front, so it ended before this one did."""
    waited_first: bool = False
    """A program waited before it let the next launch begin."""
    released: set[int] = field(default_factory=set)
    """Programs that have let the next launch begin."""

    def release(self, program: int) -> None:
        """griddepcontrol.launch_dependents, or the end of a program."""
        self.released.add(program)

    def wait(self, program: int) -> frozenset[int]:
        """griddepcontrol.wait: returns the launches that have ended now."""
        if self.in_front is None:
            return frozenset()
        self.waited = True
        self.waited_first |= program not in self.released
        return self.in_front.ended_with_it()

    def ended_with_it(self) -> frozenset[int]:
        """Launches that have ended when this one has."""
        return (self.running if self.waited else frozenset()) | {self.number}

    def running_after_it(self) -> frozenset[int]:
        """Launches that may still run when a dependent launch behind this one begins.

        It begins when every program of this one has let it. If one of them did so only after its
        own wait, what that waited for has ended.
        """
        return frozenset({self.number}) | (frozenset() if self.waited_first else self.running)


class Stream:
    """Launches in their order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def begin(self, kernel: str, dependent: bool) -> Launch:
        """The next launch; a `dependent` one may begin before the one in front has ended."""
        launch = Launch(len(self.launches), kernel)
        if dependent and self.launches:
            launch.in_front = self.launches[-1]
            launch.running = launch.in_front.running_after_it()
        self.launches.append(launch)
        return launch
