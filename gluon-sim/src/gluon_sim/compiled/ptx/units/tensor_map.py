"""Tensor maps, as cuTensorMapEncodeTiled makes them: boxes of a tensor, zeros outside of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gluon_sim.compiled.core.memory import Memory
from gluon_sim.compiled.core.numbers import MASK64, Array
from gluon_sim.compiled.core.report import Fault, Kind

SWIZZLE_BYTES = (0, 32, 64, 128)
"""Width of the rows that each swizzle mode permutes."""
_SWIZZLE_BITS = (0, 1, 3, 7)
_MOST_BOX = 256
_MOST_STRIDE = 1 << 40


def swizzled(addresses: Array, mode: int) -> Array:
    """Where bytes lie: chunks of 16 bytes of a row are permuted by the number of the row.

    >>> swizzled(np.array([128, 128 + 16]), 3).tolist()
    [144, 128]
    """
    result: Array = addresses ^ (((addresses >> 7) & _SWIZZLE_BITS[mode]) << 4)
    return result


class TensorMap:
    """`shape`, `strides` (elements) and `box`, outermost dimension first."""

    def __init__(
        self,
        base: int,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element: int,
        swizzle: int,
    ) -> None:
        self.base, self.element, self.swizzle = base, element, swizzle
        self.shape, self.box = list(shape)[::-1], list(box)[::-1]  # innermost first from here on
        self.strides = [stride * element for stride in strides][::-1]
        self._check()

    def _check(self) -> None:
        """The limits of cuTensorMapEncodeTiled."""
        width = SWIZZLE_BYTES[self.swizzle]
        problems = {
            "base address": self.base % 16 != 0,
            "strides": any(s % 16 or not 0 < s < _MOST_STRIDE for s in self.strides[1:]),
            "box": any(not 0 < n <= _MOST_BOX for n in self.box),
            "shape": any(not 0 < n <= 1 << 32 for n in self.shape),
            "swizzle": bool(width) and self.box[0] * self.element > width,
            "inner stride": self.strides[0] != self.element,
        }
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        if wrong:
            raise Fault(Kind.DESCRIPTOR, f"tensor map: {', '.join(wrong)} of {vars(self)}")

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.element

    def rows_of_box(self, coordinates: Sequence[int]) -> list[Array]:
        """For every dimension but the innermost, its coordinate in each row of the box."""
        steps = np.meshgrid(*(np.arange(n) for n in self.box[:0:-1]), indexing="ij")
        return [
            step.reshape(-1) + start
            for step, start in zip(steps[::-1], coordinates[1:], strict=True)
        ]

    def load(
        self, memory: Memory, column: int, rows: Sequence[Array], ended: Array | None = None
    ) -> Array:
        """Bytes of rows that begin at `column`; `rows` as `rows_of_box` gives them, `ended` as
        `Memory.load` takes it."""
        inside, addresses, first, end = self._reach(column, rows)
        found = np.zeros((len(inside), self.box[0] * self.element), np.uint8)
        if inside.any() and end > first:
            at = addresses[inside] + np.uint64(first)
            found[inside, first:end] = memory.load(at, end - first, ended)
        return found.reshape(-1)

    def store(
        self,
        memory: Memory,
        column: int,
        rows: Sequence[Array],
        data: Array,
        ended: Array | None = None,
    ) -> bool:
        """Write what lies inside the tensor; True when a byte had been written before."""
        inside, addresses, first, end = self._reach(column, rows)
        lines = data.reshape(-1, self.box[0] * self.element)
        if not inside.any() or end <= first:
            return False
        at = addresses[inside] + np.uint64(first)
        return memory.store(at, lines[inside, first:end], ended)

    def _reach(self, column: int, rows: Sequence[Array]) -> tuple[Array, Array, int, int]:
        """Rows inside the tensor, their addresses (64 bits, which wrap), and their valid bytes."""
        count = len(rows[0]) if rows else 1
        inside = np.ones(count, bool)
        addresses = np.full(count, (self.base + column * self.element) & MASK64, np.uint64)
        for dimension, row in enumerate(rows, 1):
            inside &= (row >= 0) & (row < self.shape[dimension])
            step = np.uint64(self.strides[dimension] & MASK64)
            addresses = addresses + row.astype(np.int64).view(np.uint64) * step
        first = max(0, -column)
        end = max(first, min(self.box[0], self.shape[0] - column))
        return inside, addresses, first * self.element, end * self.element
