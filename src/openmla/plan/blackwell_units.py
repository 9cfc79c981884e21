"""What a B200 offers, and the small checks that every Blackwell plan shares.

Pure integers. Imports nothing but the errors, so every other planning module may import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from openmla.errors import InvalidArgument

SMEM_PER_SM = 233472
SMEM_RESERVED = 1024  # the driver keeps this much of every block's shared memory for itself
SMEM_CARVEOUT = SMEM_PER_SM - SMEM_RESERVED
TMEM_COLS = 512  # tensor memory: 512 columns of 128 lanes, 4 bytes a cell
MBAR_BYTES = 8
TMEM_ADDR_BYTES = 4  # where the allocator leaves the base column
WARPGROUP = 128  # threads
NUM_THREADS = 512  # four warp groups
MAX_MMA_N = 256  # the widest tile one tcgen05 instruction writes
SWIZZLE_ATOM_ROWS = 8  # a swizzle pattern repeats every 8 rows, so no box may cut it

HALF_FLOATS = ("bfloat16", "float16")
FP8_FLOATS = ("float8_e4m3fn", "float8_e5m2")
OPERAND_DTYPES = HALF_FLOATS + FP8_FLOATS
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")

_DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}
_NO_DTYPE = (None, "none", "invalid")


class Swizzle(IntEnum):
    """How TMA permutes a row of shared memory; the value is the span in bytes.

    No swizzle still moves 16-byte units, hence its value: ``Swizzle.NONE == 16``.
    """

    NONE = 16
    B32 = 32
    B64 = 64
    B128 = 128


_SWIZZLE_BYTES = frozenset(Swizzle)


def ceildiv(a: int, b: int) -> int:
    """The number of b-sized pieces that cover a: ``ceildiv(129, 128) == 2``."""
    return -(-a // b)


def round_up(a: int, step: int) -> int:
    """The least multiple of step that is not below a: ``round_up(80, 64) == 128``."""
    return -(-a // step) * step


def round_down(a: int, step: int) -> int:
    """The greatest multiple of step that is not above a: ``round_down(100, 16) == 96``."""
    return a // step * step


def dtype_size(dtype: str | None) -> int:
    """Bytes of one element; 0 for a dtype that is not there."""
    return 0 if dtype is None else _DTYPE_BYTES[dtype]


def operand_swizzle(dtype: str) -> Swizzle:
    """The swizzle that keeps 64 elements in a row: 128 bytes, or 64 for one-byte types."""
    return Swizzle.B64 if dtype_size(dtype) == 1 else Swizzle.B128


def require_dtype(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """``value`` as a known dtype name."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(name, f"one of {', '.join(allowed)}", repr(value))
    return value


def optional_dtype(name: str, value: object, allowed: tuple[str, ...]) -> str | None:
    """``value`` as a known dtype name, or None for None, "none" and "invalid"."""
    if value in _NO_DTYPE:
        return None
    return require_dtype(name, value, allowed)


def require_swizzle(name: str, value: object) -> Swizzle:
    """``value`` (a byte count or a Swizzle) as a Swizzle."""
    if isinstance(value, int) and value in _SWIZZLE_BYTES:
        return Swizzle(value)
    raise InvalidArgument(name, "16 (none), 32, 64 or 128 bytes", repr(value))


def require_int(name: str, value: object, at_least: int) -> None:
    """Rejects anything but an int of at least ``at_least``; True and 2.0 are not ints here."""
    if type(value) is not int or value < at_least:
        raise InvalidArgument(name, f"an integer of at least {at_least}", repr(value))


def require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    """Rejects a value that does not cut the whole into equal parts."""
    require_int(whole_name, whole, 1)
    require_int(name, value, 1)
    if whole % value:
        raise InvalidArgument(
            name,
            f"a divisor of {whole_name} {whole}",
            f"{value} ({whole} = {whole // value} x {value} + {whole % value})",
        )


def require_page_size(page_size: int) -> None:
    """Rejects a page whose rows would cut a swizzle pattern; 0 means the keys are not paged."""
    require_int("page_size", page_size, 0)
    if page_size % SWIZZLE_ATOM_ROWS:
        raise InvalidArgument(
            "page_size",
            f"0 (not paged) or a multiple of {SWIZZLE_ATOM_ROWS} rows, one swizzle pattern",
            f"{page_size} (= {page_size // SWIZZLE_ATOM_ROWS} x {SWIZZLE_ATOM_ROWS}"
            f" + {page_size % SWIZZLE_ATOM_ROWS})",
        )


T = TypeVar("T")
C = TypeVar("C", contravariant=True)
P = TypeVar("P")


class Part(Generic[T]):
    """A flat name for a number that lives in a part of the object.

    ``BN = Part[int]("tile")`` makes ``config.BN`` read ``config.tile.BN``: each number has one
    home, and callers still find it under the name everybody uses.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._read: Callable[[Any], Any] = attrgetter(part)

    def __set_name__(self, owner: type, name: str) -> None:
        self._read = attrgetter(f"{self._part}.{name}")

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


def all_hold(limits: tuple[Limit[P], ...], plan: P) -> bool:
    """Whether the plan keeps every limit."""
    return all(limit.holds(plan) for limit in limits)


def first_broken(limits: tuple[Limit[P], ...], plan: P) -> str:
    """The reason of the first limit that the plan breaks; empty when it keeps them all."""
    return next((limit.why(plan) for limit in limits if not limit.holds(plan)), "")


def verdict_lines(reason: str) -> list[str]:
    """The last line of an explanation: nothing when there is no reason against the plan."""
    return [f"not supported: {reason}"] if reason else []
