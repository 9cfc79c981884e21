"""The errors gluon-sim raises."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument of `simulate` or `intercept` is wrong."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")


class Unsupported(NotImplementedError):
    """The kernel does something that the simulator does not model."""
