"""Global memory: the tensors of a launch between guard zones, every access checked."""

from __future__ import annotations

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind

# Addresses that a truncation to 32 bits would change, and that cross a 4 GiB boundary soon.
BASE = 0x7F12_FFF0_0000
_GUARD = 8192
_BACKGROUND = 0xFF


class Memory:
    """Bytes at `BASE` and up; what no buffer covers may not be touched."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, _BACKGROUND, np.uint8)
        self.readable = np.zeros(size, bool)
        self.writable = np.zeros(size, bool)
        self.written = np.zeros(size, bool)
        self._top = _GUARD
        self._buffers: list[tuple[str, int, int]] = []

    @staticmethod
    def room(sizes: list[int], align: int = 1024) -> int:
        """Bytes of memory that buffers of these sizes need."""
        return sum(size + align + _GUARD for size in sizes) + 2 * _GUARD

    def put(self, raw: Array, name: str, writable: bool, align: int = 1024) -> int:
        """Place a buffer; returns its address."""
        start = -(-self._top // align) * align
        end = start + len(raw)
        self.bytes[start:end] = raw
        self.readable[start:end] = True
        self.writable[start:end] = writable
        self._top = end + _GUARD
        self._buffers.append((name, start, len(raw)))
        return BASE + start

    def get(self, address: int, size: int) -> Array:
        """A copy of the bytes of a buffer."""
        at = address - BASE
        return self.bytes[at : at + size].copy()

    def load(self, addresses: Array, size: int) -> Array:
        """Bytes [len(addresses), size]."""
        found: Array = self.bytes[self._index(addresses, size, self.readable)]
        return found

    def store(self, addresses: Array, data: Array) -> bool:
        """Write data [len(addresses), size]; True when a byte had been written before."""
        at = self._index(addresses, data.shape[1], self.readable)
        if not self.writable[at].all():
            raise Fault(Kind.READ_ONLY, f"store to {self._near(int(at.min()))}")
        again = bool(self.written[at].any())
        self.bytes[at] = data
        self.written[at] = True
        return again

    def _index(self, addresses: Array, size: int, allowed: Array) -> Array:
        at = addresses.astype(np.int64) - BASE
        if ((at < 0) | (at + size > len(self.bytes))).any():
            raise Fault(Kind.BOUNDS, f"global address {int(addresses[0]):#x}")
        index: Array = at[:, None] + np.arange(size)
        inside = allowed[index]
        if not inside.all():
            first = int(at[np.argmin(inside.all(1))])
            raise Fault(Kind.BOUNDS, f"{size} bytes at {self._near(first)}")
        return index

    def _near(self, at: int) -> str:
        """The buffer next to a byte: name, offset and size."""

        def distance(buffer: tuple[str, int, int]) -> int:
            _, start, size = buffer
            return max(start - at, at - (start + size) + 1, 0)

        name, start, size = min(self._buffers, key=distance)
        return f"{name}{at - start:+d} of {size}"
