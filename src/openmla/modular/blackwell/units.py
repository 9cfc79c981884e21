"""What a B200 offers, and the small checks that every Blackwell plan shares. Pure integers."""

from enum import IntEnum

from openmla.arithmetic import require_int
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


def require_page_size(page_size: int) -> None:
    """Rejects a page whose rows would cut a swizzle pattern; 0 means the keys are not paged."""
    require_int("page_size", page_size, 0)
    if page_size % SWIZZLE_ATOM_ROWS:
        whole, rest = divmod(page_size, SWIZZLE_ATOM_ROWS)
        expected = f"0 (not paged) or a multiple of {SWIZZLE_ATOM_ROWS} rows, one swizzle pattern"
        got = f"{page_size} (= {whole} x {SWIZZLE_ATOM_ROWS} + {rest})"
        raise InvalidArgument("page_size", expected, got)
