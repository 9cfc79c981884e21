"""Global memory: the tensors of a launch between guard zones, every access checked."""

from __future__ import annotations

import numpy as np

from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.stream import Launch

# Addresses that a truncation to 32 bits would change, and that cross a 4 GiB boundary soon.
BASE = 0x7F12_FFF0_0000
_GUARD = 8192
_BACKGROUND = 0xFF


class Touched:
    """Who read and wrote each byte last, as numbers from 1 on; 0 is nobody."""

    def __init__(self, size: int) -> None:
        self.read = np.zeros(size, np.int32)
        self.read_too = np.zeros(size, np.int32)
        """The last reader but the one in `read`, if there is another."""
        self.written = np.zeros(size, np.int32)
        self.atomic = np.zeros(size, bool)
        """Whether the last write was an atomic."""

    def note_read(self, at: Array, who: int) -> None:
        """`who` reads bytes now."""
        last = self.read[at]
        others = (last > 0) & (last != who + 1)
        if others.any():
            self.read_too[at] = np.where(others, last, self.read_too[at])
        self.read[at] = who + 1

    def note(self, at: slice, who: int, read: Array, written: Array) -> None:
        """`who` has read and written these of the bytes `at`."""
        self.read[at][read] = who + 1
        self.written[at][written] = who + 1


class Memory:
    """Bytes at `BASE` and up; what no buffer covers may not be touched.

    Programs of a launch run one after another here and at the same time on the chip: what one of
    them wrote another may neither read nor write, except by atomics. Launches that may still run
    (`running`) have touched bytes as well (`earlier`, numbered by their place in `running`);
    whoever touches those must have heard that the launch has ended.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, _BACKGROUND, np.uint8)
        self.readable = np.zeros(size, bool)
        self.writable = np.zeros(size, bool)
        self.own = Touched(size)
        self.program = 0
        """The program that runs now."""
        self.contended = np.zeros(size, bool)
        """Bytes that programs may overwrite one another's stores of."""
        self.running: list[Launch] = []
        self.earlier = Touched(size)
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

    def load(
        self, addresses: Array, size: int, ended: Array | None = None, atomic: bool = False
    ) -> Array:
        """Bytes [len(addresses), size]. `ended`: which of `running` whoever loads knows to have
        ended; None is all of them."""
        at = self._index(addresses, size, self.readable)
        self._check_launches("load", self.earlier.written[at], at, ended)
        self._check_programs("load", self.own.written[at], at, atomic)
        if not atomic:
            self.own.note_read(at, self.program)
        found: Array = self.bytes[at]
        return found

    def store(
        self, addresses: Array, data: Array, ended: Array | None = None, atomic: bool = False
    ) -> bool:
        """Write data [len(addresses), size]; True when this program has written a byte before."""
        at = self._index(addresses, data.shape[1], self.readable)
        if not self.writable[at].all():
            raise Fault(Kind.READ_ONLY, f"store to {self._near(int(at.min()))}")
        for earlier in (self.earlier.written, self.earlier.read):
            self._check_launches("store", earlier[at], at, ended)
        again = bool(self.own.written[at].any())
        written = np.where(self.contended[at], 0, self.own.written[at])
        self._check_programs("store", written, at, atomic)
        for last in (self.own.read[at], self.own.read_too[at]):
            self._check_programs("store", last, at)
        self.bytes[at] = data
        self.own.written[at] = self.program + 1
        self.own.atomic[at] = atomic
        return again

    def _check_programs(self, what: str, last: Array, at: Array, atomic: bool = False) -> None:
        """The last ones to touch these bytes, in this launch, are this program, or nobody, or an
        atomic does what an atomic did before. After a program's own atomic come no others but those
        that it knows of: it drew the last number of a counter, say."""
        others = (last > 0) & (last != self.program + 1)
        if atomic:
            others &= ~self.own.atomic[at]
        if others.any():
            who = int(last[others].reshape(-1)[0]) - 1
            place = self._near(int(at[others].reshape(-1)[0]))
            raise Fault(Kind.RACE, f"{what} of {place}, which program {who} touches in this launch")

    def _check_launches(self, what: str, last: Array, at: Array, ended: Array | None) -> None:
        """No launch that may still run touches these bytes."""
        if ended is None or not self.running or not last.any():
            return
        late = (last > 0) & ~np.append(True, ended)[last]
        if late.any():
            place = self._near(int(at[late].reshape(-1)[0]))
            launch = self.running[int(last[late].reshape(-1)[0]) - 1]
            message = f"{what} of {place}, which {launch.kernel} touches: it may still run"
            raise Fault(Kind.RACE, message)

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
