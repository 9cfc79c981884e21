"""Launching again what was launched before, without Triton's argument binding.

Binding works out types, alignments and constexprs of every argument of every launch: hundreds of
microseconds for a kernel with six descriptors. All of that is fixed by the Problem, the strides and
the scale, so a launch is kept as a list of arguments in which only the tensors are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from openmla.kernels.call import Call


class Repeat:
    """One compiled launch, ready for other tensors."""

    def __init__(self, call: Call, compiled: Any) -> None:
        self._run = compiled[(call.programs, 1, 1)]
        names = call.kernel.arg_names
        self._arguments: list[Any] = [call.arguments.get(name) for name in names]
        self._tensors: list[tuple[int, str]] = []
        self._descriptors: list[tuple[int, str, Any, dict[str, Any]]] = []
        for place, name in enumerate(names):
            value = self._arguments[place]
            if isinstance(value, Tensor):
                self._tensors.append((place, name))
                self._arguments[place] = None
            elif hasattr(value, "block_shape"):
                fields = {**vars(value), "base": None}
                self._descriptors.append((place, name, type(value), fields))
                self._arguments[place] = None

    def run(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Launch with `tensors` by the names of the kernel's arguments."""
        arguments = self._arguments.copy()
        for place, name in self._tensors:
            arguments[place] = tensors[name]
        for place, name, kind, fields in self._descriptors:
            # A copy with another base; its shape and strides have been checked once.
            descriptor = kind.__new__(kind)
            descriptor.__dict__.update(fields)
            descriptor.base = tensors[name]
            arguments[place] = descriptor
        self._run(*arguments)
