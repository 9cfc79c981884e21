"""Targets: the chips a problem can be planned for, as numbers. No GPU needed, no torch imported."""

from __future__ import annotations

from dataclasses import dataclass

from openmla.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Target:
    """One chip. `backend` names the kernel family that serves it first."""

    name: str
    backend: str


TARGETS = {"cpu": Target("cpu", backend="cpu")}


def target_by_name(name: str) -> Target:
    """The target called `name`, or an error that lists the known ones."""
    if name not in TARGETS:
        raise InvalidArgument("target", "one of " + ", ".join(TARGETS), repr(name))
    return TARGETS[name]
