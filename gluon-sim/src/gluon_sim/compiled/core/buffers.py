"""The tensors of a launch in simulated memory: copied in, and out again where they were written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gluon_sim.compiled.core.memory import BASE, Memory
from gluon_sim.compiled.core.numbers import Array


def _storage(tensor: torch.Tensor) -> Array:
    """All bytes of the storage behind a tensor, shared with it."""
    storage = tensor.untyped_storage()
    raw: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return raw


class Buffers:
    """Every storage that the arguments reach, once each."""

    def __init__(
        self, arguments: Mapping[str, Any], outputs: Collection[str] | None, extra: int = 0
    ) -> None:
        tensors = {name: _tensor(value) for name, value in arguments.items()}
        reached = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        written = {
            tensor.untyped_storage().data_ptr()
            for name, tensor in reached.items()
            if outputs is None or name in outputs
        }
        storages = {t.untyped_storage().data_ptr(): (n, _storage(t)) for n, t in reached.items()}
        sizes = [len(raw) for _, raw in storages.values()]
        self.memory = Memory(Memory.room([*sizes, extra]))
        self.placed = {
            # By the address of a storage: where it lies here, and its bytes.
            pointer: (self.memory.put(raw, name, pointer in written), raw)
            for pointer, (name, raw) in storages.items()
        }

    def let_overwrite(self, values: Iterable[Any]) -> None:
        """Programs may overwrite one another's stores to the storages of these arguments."""
        for tensor in (_tensor(value) for value in values):
            if tensor is None:
                continue
            address, raw = self.placed[tensor.untyped_storage().data_ptr()]
            self.memory.contended[address - BASE :][: len(raw)] = True

    def address(self, tensor: torch.Tensor) -> int:
        """Where a tensor's first element lies."""
        start = tensor.untyped_storage().data_ptr()
        return self.placed[start][0] + tensor.data_ptr() - start

    def copy_back(self) -> None:
        """Bytes that the kernel wrote, into the tensors."""
        for address, raw in self.placed.values():
            at = slice(address - BASE, address - BASE + len(raw))
            np.copyto(raw, self.memory.bytes[at], where=self.memory.own.written[at] > 0)


def _tensor(value: Any) -> torch.Tensor | None:
    """The tensor of an argument; a descriptor has one as well."""
    base = getattr(value, "base", None) if hasattr(value, "block_shape") else value
    return base if isinstance(base, torch.Tensor) else None
