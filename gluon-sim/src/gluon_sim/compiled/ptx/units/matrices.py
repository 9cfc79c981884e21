"""Operands of tensor cores in shared memory: what a matrix descriptor says about bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gluon_sim.compiled.core.numbers import Array, decoded
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.ptx.block import Block
from gluon_sim.compiled.ptx.races import WORD
from gluon_sim.compiled.ptx.units.tensor_map import SWIZZLE_BYTES, swizzled

BYTES_OF_K = 32
"""Bytes along K that one product takes from every row."""
_CHUNK = 16
_HOPPER_MODES = {0: 0, 1: 3, 2: 2, 3: 1}
_BLACKWELL_MODES = {0: 0, 2: 3, 4: 2, 6: 1}


@dataclass(frozen=True)
class Matrix:
    """A decoded descriptor; all in bytes, `mode` a swizzle."""

    start: int
    leading: int
    stride: int
    mode: int


def descriptor(word: int, sm: int) -> Matrix:
    """Decode the 64 bits that wgmma (sm_90) or tcgen05 (sm_100) takes."""
    start, leading, stride = (((word >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    if (word >> 49) & 7:
        raise Fault(Kind.DESCRIPTOR, f"base offset in {word:#x}")
    if sm < 100:
        return Matrix(start, leading, stride, _HOPPER_MODES[(word >> 62) & 3])
    kind = (word >> 61) & 7
    if (word >> 46) & 3 != 1 or (word >> 52) & 1 or kind not in _BLACKWELL_MODES:
        raise Fault(Kind.DESCRIPTOR, f"version, mode or layout of {word:#x}")
    return Matrix(start, leading, stride, _BLACKWELL_MODES[kind])


@lru_cache(maxsize=1024)
def _offsets(rows: int, element: int, across: bool, matrix: Matrix) -> Array:
    """Byte [row, byte along K] from the start, before the swizzle.

    K-major: 8 rows of the swizzle's width lie together. `across` (MN-major): 8 steps along K lie
    together, each with as many rows as fit the width.
    """
    width = SWIZZLE_BYTES[matrix.mode]
    row, byte = np.arange(rows)[:, None], np.arange(BYTES_OF_K)[None, :]
    found: Array
    if not across:
        found = (row // 8) * matrix.stride
        if width:
            return found + (row % 8) * width + byte
        return found + (row % 8) * _CHUNK + (byte // _CHUNK) * matrix.leading + byte % _CHUNK
    step, along = byte // element, row * element + byte % element
    chunk = along // _CHUNK
    if width:
        wide = width // _CHUNK
        found = (chunk % wide) * _CHUNK + (chunk // wide) * matrix.leading
        return found + (step % 8) * width + (step // 8) * matrix.stride + along % _CHUNK
    found = chunk * matrix.stride + (step % 8) * _CHUNK + (step // 8) * matrix.leading
    return found + along % _CHUNK


@dataclass(frozen=True)
class Shape:
    """How a product reads an operand: rows, number format, and whether K runs across rows."""

    rows: int
    kind: str
    across: bool = False


@lru_cache(maxsize=4096)
def cells(matrix: Matrix, shape: Shape, first: int = 0, end: int | None = None) -> Array:
    """Words of shared memory that rows `first` to `end` lie in."""
    element = 1 if shape.kind == "e4m3" else 2
    at = matrix.start + _offsets(shape.rows, element, shape.across, matrix)[first:end]
    found: Array = np.unique(swizzled(at, matrix.mode) // WORD)
    return found


def raw_bytes(block: Block, matrix: Matrix, shape: Shape, what: str) -> Array:
    """Bytes [rows, 32]."""
    element = 1 if shape.kind == "e4m3" else 2
    at = matrix.start + _offsets(shape.rows, element, shape.across, matrix)
    return block.read_by_unit(swizzled(at, matrix.mode), what)


def values(block: Block, matrix: Matrix, shape: Shape, what: str) -> Array:
    """Numbers [rows, K]."""
    return decoded(raw_bytes(block, matrix, shape, what), shape.kind)
