"""Whether a kernel, or several in turn, wrote every element of its outputs exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gluon_sim.report.findings import Finding, Kind
from gluon_sim.values.dtypes import Array

Storage = tuple[int, int]
"""Address and element size."""
Stores = Mapping[Storage, Array]
"""How often each element of a storage was stored."""


MOST_ELEMENTS = 1 << 28


def storage_of(tensor: torch.Tensor) -> Storage:
    """The storage that a tensor lies in."""
    return tensor.untyped_storage().data_ptr(), tensor.element_size()


def output_faults(
    name: str, tensor: torch.Tensor, stores: Stores, mask: torch.Tensor | None = None
) -> list[Finding]:
    """What is wrong with an output; off `mask` it must not be written."""
    return _count_faults(name, _inside(tensor, stores[storage_of(tensor)]), mask)


def _count_faults(name: str, counts: Array, mask: torch.Tensor | None = None) -> list[Finding]:
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
    """What is wrong with outputs that several launches wrote together, and with their gaps.

    Gaps of a storage that spans more than memory holds are not looked at: that would touch them.
    """
    found: list[Finding] = []
    near: dict[Storage, tuple[str, int]] = {}
    for name, tensor in outputs.items():
        key, size = storage_of(tensor), tensor.untyped_storage().nbytes() // tensor.element_size()
        counts = np.zeros(tuple(tensor.shape), np.int32)
        for one in stores:
            counts += _inside(tensor, one[key]) if key in one else 0
        found += _count_faults(name, counts)
        if size < MOST_ELEMENTS:
            near[key] = name, size
    for key, (name, size) in near.items():
        left = sum((one[key] for one in stores if key in one), np.zeros(size, np.int32))
        for tensor in outputs.values():
            if storage_of(tensor) == key:
                _inside(tensor, left)[...] = 0
        if left.any():
            found.append(_finding(f"the memory around {name}", "written", left > 0))
    return found


def _inside(tensor: torch.Tensor, counts: Array) -> Array:
    """The part of a storage's counts that belongs to a tensor in it."""
    first, strides = 4 * tensor.storage_offset(), [4 * s for s in tensor.stride()]
    return np.ndarray(list(tensor.shape), np.int32, counts, first, strides)


def _finding(name: str, what: str, where: Array) -> Finding:
    first = [int(i) for i in np.argwhere(where)[0]]
    message = f"{name}{first} is {what} ({int(where.sum())} elements)"
    return Finding(Kind.OUTPUT, message, buffer=name, partition=what)
