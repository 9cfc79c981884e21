"""What checking one case found, and how a refusal is told."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openmla.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class Result:
    """What checking one case found."""

    status: str
    """right, refused or failed."""
    kind: str = ""
    """What kind of failure: accuracy, error, poison, neighbors, guard, crash or hang."""
    message: str = ""
    """What went wrong, or why the call was refused."""
    family: str = ""
    """Family of the kernel that ran."""
    poisoned: bool = False
    guarded: bool = False
    bound: float = 0.0
    lse: float = 0.0
    """Largest share of the componentwise bound and of the lse limit."""
    fatal: bool = False
    """The GPU cannot be used by this process any more."""


def refusal(error: Unsupported | InvalidArgument) -> str:
    """Why a call was refused, without its numbers: cases refused alike are counted together.

    >>> refusal(Unsupported("no config holds d_nope 112 in 232448 bytes"))
    'no config holds d_nope # in # bytes'
    """
    text = error.reason if isinstance(error, Unsupported) else f"InvalidArgument: {error}"
    return re.sub(r"\d+(\.\d+)?", "#", text)
