"""Races for LDS: what two waves do to one byte between the same two barriers.

Barriers divide the life of a wave into epochs. An access belongs to all epochs from its issue to
the wait that covers it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gluon_sim.compiled.core.numbers import Array

_MOST_WAVES = 16


class Races:
    """One bit per wave, byte and epoch, for reads and for writes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._reads: dict[int, Array] = {}
        self._writes: dict[int, Array] = {}
        self._epoch = np.full(size, -1, np.int32)  # of the last write to each byte
        self._wave = np.full(size, -1, np.int32)
        self._value = np.zeros(size, np.uint8)
        self.shared_writes = 0

    def mark(self, at: Array, wave: int, epochs: Iterable[int], write: bool) -> None:
        """A wave accesses bytes during these epochs."""
        if wave >= _MOST_WAVES:
            raise ValueError(f"more than {_MOST_WAVES} waves")
        table = self._writes if write else self._reads
        for epoch in epochs:
            if epoch not in table:
                table[epoch] = np.zeros(self._size, np.uint16)
            table[epoch][at] |= np.uint16(1 << wave)

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
            reads = self._reads.get(epoch)
            if reads is None:
                continue
            others = (writes != 0) & (((reads & ~writes) != 0) | ((reads != 0) & several))
            if others.any():
                first = int(np.argmax(others))
                races.append(
                    f"{int(others.sum())} bytes of LDS, from {first} on, are written by one wave "
                    f"and read by another after barrier {epoch}"
                )
        return races
