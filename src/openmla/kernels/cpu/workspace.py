"""Reused scratch memory of the CPU kernels.

A block near the end of a sequence is smaller than a full one. `take` hands out the front of one
allocation, contiguous and always at the same alignment, so a block's bits depend on its shape and
its values alone, not on where it lies in the batch.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Elements that a group is padded to. Products may take other paths for rows that begin elsewhere
# than a cache line; and exp2 of what fills no pair of vectors, the last elements, is another
# function than that of the rest. A group whose padding is empty has no such elements; one with
# padding is a loop of its own.
LINE = 64
CACHE_LINE = 16
"""fp32 elements of a cache line."""


def whole_lines(elements: int) -> int:
    """The next multiple of LINE."""
    return -(-elements // LINE) * LINE


def apart(lines: Tensor, *shape: int) -> Tensor:
    """lines [groups, whole lines] as [groups, *shape]."""
    groups: Tensor = lines[:, : math.prod(shape)].unflatten(1, shape)
    return groups


def in_whole_lines(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), where an element's bits do not depend on its place in x."""
    lines = x.new_zeros(whole_lines(x.numel()))
    lines[: x.numel()] = x.flatten()
    return function(lines)[: x.numel()].view(x.shape)


class Workspace:
    """Named fp32 buffers that grow to the largest shape asked for and are then reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialized contiguous tensor of that shape; overwrites what `name` held before."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return buffer[:size].view(shape)

    def take_apart(self, name: str, groups: int, *shape: int) -> Tensor:
        """[groups, *shape], each group contiguous and aligned as if it were alone."""
        return apart(self.take(name, groups, whole_lines(math.prod(shape))), *shape)

    def pack_apart(self, name: str, source: Tensor) -> Tensor:
        """`source` as fp32, its first dimension as the groups of `take_apart`."""
        packed = self.take_apart(name, *source.shape)
        packed.copy_(source)
        return packed

    def pack(self, name: str, source: Tensor) -> Tensor:
        """`source` as fp32, contiguous."""
        packed = self.take(name, *source.shape)
        packed.copy_(source)
        return packed
