"""Arithmetic and checks that plans of every family share: rounding, limits with reasons.

Pure integers. Imports nothing but the errors, so every other planning module may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from openmla.errors import InvalidArgument

T = TypeVar("T")
C = TypeVar("C", contravariant=True)
P = TypeVar("P")


def ceildiv(a: int, b: int) -> int:
    """The number of b-sized pieces that cover a: ``ceildiv(129, 128) == 2``."""
    return -(-a // b)


def round_up(a: int, step: int) -> int:
    """The least multiple of step that is not below a: ``round_up(80, 64) == 128``."""
    return -(-a // step) * step


def round_down(a: int, step: int) -> int:
    """The greatest multiple of step that is not above a: ``round_down(100, 16) == 96``."""
    return a // step * step


def require_int(name: str, value: object, at_least: int) -> None:
    """Rejects anything but an int of at least ``at_least``; True and 2.0 are not ints here."""
    if type(value) is not int or value < at_least:
        raise InvalidArgument(name, f"an integer of at least {at_least}", repr(value))


def require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    """Rejects a value that does not cut the whole into equal parts."""
    require_int(whole_name, whole, 1)
    require_int(name, value, 1)
    if whole % value:
        got = f"{value} ({whole} = {whole // value} x {value} + {whole % value})"
        raise InvalidArgument(name, f"a divisor of {whole_name} {whole}", got)


class Part(Generic[T]):
    """A flat name for a number that lives in a part of the object.

    ``BN = Part[int]("tile")`` makes ``config.BN`` read ``config.tile.BN``, and ``Part("a.b")``
    reads ``a.b``: each number has one home, and callers find it under the name everybody uses.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._read: Callable[[Any], Any] = attrgetter(path)

    def __set_name__(self, owner: type, name: str) -> None:
        if "." not in self._path:
            self._read = attrgetter(f"{self._path}.{name}")

    @overload
    def __get__(self, obj: None, owner: type) -> Part[T]: ...
    @overload
    def __get__(self, obj: object, owner: type) -> T: ...
    def __get__(self, obj: object | None, owner: type) -> Part[T] | T:
        if obj is None:
            return self
        value: T = self._read(obj)
        return value


@dataclass(frozen=True)
class Limit(Generic[C]):
    """One limit a plan must keep: a cheap test, and the arithmetic spelled out when it fails."""

    holds: Callable[[C], bool]
    why: Callable[[C], str]


def broken(limits: tuple[Limit[P], ...], plan: P) -> Iterator[str]:
    """The reasons of the limits that the plan breaks."""
    return (limit.why(plan) for limit in limits if not limit.holds(plan))


class Limited:
    """A plan that keeps limits or breaks them; subclasses list those they break, in words."""

    def _broken_limits(self) -> Iterator[str]:
        raise NotImplementedError

    def supported(self) -> bool:
        """Whether the plan keeps every limit of the hardware and the kernel."""
        return not self.why_unsupported()

    def why_unsupported(self) -> str:
        """The first limit the plan breaks, with its arithmetic; empty when supported."""
        return next(self._broken_limits(), "")


def verdict_lines(reason: str) -> list[str]:
    """The last line of an explanation: nothing when there is no reason against the plan."""
    return [f"not supported: {reason}"] if reason else []
