"""Namespaces that stand for Triton's modules: what is not modeled raises when it is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gluon_sim.errors import Unsupported


class Namespace(SimpleNamespace):
    """A module substitute. Unknown names raise, so that nothing is silently skipped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"the simulator does not model {name!r} of the Gluon language")


def require_default(name: str, value: Any, default: Any) -> None:
    """Refuse an option that changes what happens and is not modeled."""
    if value is not None and value != default:
        raise Unsupported(f"the simulator does not model {name}={value!r}")
