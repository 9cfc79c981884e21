"""Races for LDS: what two waves do to one byte between the same two barriers.

Barriers divide the life of a wave into epochs. An access belongs to all epochs from its issue to
the wait that covers it.

Several waves may write the same bytes: a tensor that is smaller than a workgroup is written by all
of its waves, each of which has all of it. What a wave reads after its own write is then right
whether or not the others' are done, as long as all that are under way write the same values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gluon_sim.compiled.core.numbers import Array

_MOST_WAVES = 16
_NOTHING, _DIFFERENT = -1, -2  # in the place of a value


class Races:
    """One bit per wave, byte and epoch, for reads and for writes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._reads: dict[int, Array] = {}
        self._writes: dict[int, Array] = {}
        self._own_reads: dict[int, Array] = {}
        self._written: dict[int, Array] = {}  # the value that all writes of an epoch have
        self._epoch = np.full(size, -1, np.int32)  # of the last write to each byte
        self._wave = np.full(size, -1, np.int32)
        self._value = np.zeros(size, np.uint8)
        self.shared_writes = 0

    def read(self, at: Array, wave: int, epochs: Iterable[int]) -> None:
        """A wave reads bytes during these epochs, some of them perhaps after it wrote them."""
        bit = self._bit(wave)
        for epoch in epochs:
            after = at[:0]
            if epoch in self._writes:
                is_own = (self._writes[epoch][at] & bit) != 0
                after, at_first = at[is_own], at[~is_own]
            else:
                at_first = at
            if after.size:
                self._of(self._own_reads, epoch)[after] |= bit
            self._of(self._reads, epoch)[at_first] |= bit

    def write(self, at: Array, wave: int, epochs: Iterable[int], values: Array | None) -> None:
        """A wave writes values to bytes during these epochs; None: nobody says which."""
        bit = self._bit(wave)
        for epoch in epochs:
            self._of(self._writes, epoch)[at] |= bit
            if epoch not in self._written:
                self._written[epoch] = np.full(self._size, _NOTHING, np.int16)
            known = self._written[epoch]
            if values is None:
                known[at] = _DIFFERENT
            else:
                agrees = (known[at] == _NOTHING) | (known[at] == values)
                known[at] = np.where(agrees, values, np.int16(_DIFFERENT))

    def _bit(self, wave: int) -> np.uint16:
        if wave >= _MOST_WAVES:
            raise ValueError(f"more than {_MOST_WAVES} waves")
        return np.uint16(1 << wave)

    def _of(self, table: dict[int, Array], epoch: int) -> Array:
        if epoch not in table:
            table[epoch] = np.zeros(self._size, np.uint16)
        return table[epoch]

    def different(self, at: Array, values: Array, wave: int, epoch: int) -> int:
        """Note a write; a byte that got another value since the last barrier, or -1."""
        others = (self._epoch[at] == epoch) & (self._wave[at] != wave)
        clash = others & (self._value[at] != values)
        self._epoch[at], self._wave[at], self._value[at] = epoch, wave, values
        return int(at[np.argmax(clash)]) if clash.any() else -1

    def found(self) -> list[str]:
        """Bytes that one wave writes and another one reads between the same barriers."""
        races = []
        for epoch, writes in self._writes.items():
            several = (writes & (writes - np.uint16(1))) != 0
            self.shared_writes += int(several.sum())
            reads, own = self._reads.get(epoch), self._own_reads.get(epoch)
            others = np.zeros(self._size, bool)
            if reads is not None:
                others |= (writes != 0) & (((reads & ~writes) != 0) | ((reads != 0) & several))
            if own is not None:
                others |= (own != 0) & several & (self._written[epoch] == _DIFFERENT)
            if others.any():
                first = int(np.argmax(others))
                races.append(
                    f"{int(others.sum())} bytes of LDS, from {first} on, are written by one wave "
                    f"and read by another after barrier {epoch}"
                )
        return races
