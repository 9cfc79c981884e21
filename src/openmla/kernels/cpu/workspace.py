"""Reused scratch memory of the CPU kernels.

A block near the end of a sequence is smaller than a full one. `take` hands out the front of one
allocation, contiguous and always at the same alignment, so a block's bits depend on its shape and
its values alone, not on where it lies in the batch.
"""

import math

import torch
from torch import Tensor


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

    def pack(self, name: str, source: Tensor) -> Tensor:
        """`source` as fp32, contiguous."""
        packed = self.take(name, *source.shape)
        packed.copy_(source)
        return packed
