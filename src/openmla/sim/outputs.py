"""Whether a kernel, or several in turn, wrote every element of its outputs exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from openmla.sim.dtypes import Array
from openmla.sim.findings import Finding, Kind

Storage = tuple[int, int]
"""Address and element size."""
Stores = Mapping[Storage, Array]
"""How often each element of a storage was stored."""


def storage_of(tensor: torch.Tensor) -> Storage:
    """The storage that a tensor lies in."""
    return tensor.untyped_storage().data_ptr(), tensor.element_size()


def output_faults(
    name: str, tensor: torch.Tensor, stores: Stores, mask: torch.Tensor | None = None
) -> list[Finding]:
    """What is wrong with an output; off `mask` it must not be written."""
    counts = _inside(tensor, stores[storage_of(tensor)])
    wanted = np.ones(counts.shape, bool)
    if mask is not None:
        wanted = np.broadcast_to(mask.numpy(), counts.shape)
    faults = {
        "never written": (counts == 0) & wanted,
        "written more than once": counts > 1,
        "written although it must not be": (counts > 0) & ~wanted,
    }
    return [_finding(name, what, where) for what, where in faults.items() if where.any()]


def faults_of_all(outputs: Mapping[str, torch.Tensor], stores: Sequence[Stores]) -> list[Finding]:
    """What is wrong with outputs that several launches wrote together, and with their gaps."""
    sums: dict[Storage, Array] = {}
    for tensor in outputs.values():
        key, size = storage_of(tensor), tensor.untyped_storage().nbytes() // tensor.element_size()
        sums[key] = sum((one[key] for one in stores if key in one), np.zeros(size, np.int32))
    found = [
        fault for name, tensor in outputs.items() for fault in output_faults(name, tensor, sums)
    ]
    for tensor in outputs.values():
        _inside(tensor, sums[storage_of(tensor)])[...] = 0
    names = {storage_of(tensor): name for name, tensor in outputs.items()}
    for key, left in sums.items():
        if left.any():
            found.append(_finding(f"the memory around {names[key]}", "written", left > 0))
    return found


def _inside(tensor: torch.Tensor, counts: Array) -> Array:
    """The part of a storage's counts that belongs to a tensor in it."""
    first, strides = 4 * tensor.storage_offset(), [4 * s for s in tensor.stride()]
    return np.ndarray(list(tensor.shape), np.int32, counts, first, strides)


def _finding(name: str, what: str, where: Array) -> Finding:
    first = [int(i) for i in np.argwhere(where)[0]]
    message = f"{name}{first} is {what} ({int(where.sum())} elements)"
    return Finding(Kind.OUTPUT, message, buffer=name, partition=what)
