"""Global memory from one launch of compiled code to the next: what earlier ones may still touch."""

from __future__ import annotations

from gluon_sim.compiled.core.buffers import Buffers
from gluon_sim.compiled.core.memory import BASE
from gluon_sim.compiled.core.numbers import Array
from gluon_sim.stream import Launch, Stream

MOST_RUNNING = 8
"""Launches that may run at the same time."""


class Launches:
    """The launches of one stream, and which bytes each of the latest ones read and wrote."""

    def __init__(self) -> None:
        self._stream = Stream()
        self._touched: dict[int, dict[int, tuple[Array, Array]]] = {}
        """By launch and by storage: bytes that were read, bytes that were written."""

    def begin(self, kernel: str, dependent: bool, buffers: Buffers) -> Launch:
        """The next launch; its memory learns what those that may still run have touched."""
        launch = self._stream.begin(kernel, dependent)
        memory = buffers.memory
        running = sorted(launch.running)
        if len(running) > MOST_RUNNING:
            raise NotImplementedError(f"{len(running)} launches at a time")
        memory.running = [self._stream.launches[number] for number in running]
        for slot, number in enumerate(running):
            for pointer, (address, raw) in buffers.placed.items():
                if pointer not in self._touched[number]:
                    continue
                at = slice(address - BASE, address - BASE + len(raw))
                read, written = self._touched[number][pointer]
                memory.earlier.note(at, slot, read, written)
        return launch

    def end(self, launch: Launch, buffers: Buffers) -> None:
        """Keep what a launch has touched."""
        memory = buffers.memory
        self._touched[launch.number] = {
            pointer: (
                memory.own.read[address - BASE :][: len(raw)] > 0,
                memory.own.written[address - BASE :][: len(raw)] > 0,
            )
            for pointer, (address, raw) in buffers.placed.items()
        }
        for number in set(self._touched) - {launch.number} - launch.running:
            del self._touched[number]
