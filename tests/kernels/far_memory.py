"""Far memory: small tensors whose rows lie past element 2^31, where 32-bit offsets wrap around.

Steps along one axis are so long that the tensor spans 2^32 elements: half of its rows, and half of
the distances between them, are past 2^31. Only the pages that are touched take memory:

    FarMemory(0).new((5, 2, 8), bf16)    strides (2^30, 8, 1): 8 GiB of addresses, a few pages

Rows of single bytes are addressed in pieces of 16, so tensors of bytes span 2^32 of those. With
`pieces` all tensors do, for kernels whose strides count such pieces.

CPU only, for kernels that run in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gluon_sim import unreserved
from openmla.lab.testing.build import BuiltCase
from openmla.lab.testing.memory import Memory, dense_strides

FAR = 2**32
_PIECE = 16  # bytes; rows of single bytes are addressed in pieces of so many
_ALIGNED = 64  # elements; rows stay aligned for wide copies


class FarMemory(Memory):
    """CPU memory full of zeros in which tensors are stretched along `axis`."""

    def __init__(self, axis: int = 0, pieces: bool = False) -> None:
        super().__init__("cpu", "zero")
        self.axis = axis
        self.pieces = pieces

    def new(
        self, shape: Sequence[int], dtype: torch.dtype, strided: bool = False, aligned: bool = False
    ) -> Tensor:
        """A stretched tensor, or a dense one where the axis is the last or shorter than 4."""
        in_pieces = self.pieces or dtype.itemsize == 1
        far = FAR * _PIECE // dtype.itemsize if in_pieces else FAR
        strides = far_strides(shape, self.axis, far)
        if 0 in shape or strides == dense_strides(shape):
            return super().new(shape, dtype)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        raw = torch.frombuffer(unreserved(reach * dtype.itemsize), dtype=dtype)
        return raw.as_strided(tuple(shape), strides)


def with_far_table(built: BuiltCase) -> BuiltCase:
    """A case whose block table has 2^30 entries for each request, for kernels that take tables
    without gaps: the line of its third request begins at 2^31."""
    table = built.operands.block_table
    far = torch.frombuffer(unreserved(len(table) * 2**30 * table.itemsize), dtype=table.dtype)
    wide = far.view(len(table), 2**30)
    wide[:, : table.shape[1]] = table
    return replace(built, operands=replace(built.operands, block_table=wide))


def with_far_keys(built: BuiltCase, stride: int) -> BuiltCase:
    """A dense case whose rows of K, V and rope begin `stride` elements apart."""
    apart = {}
    for name in ("k_nope", "v", "k_rope"):
        x = getattr(built.operands, name)
        reach = len(x) * stride + x[0].numel()
        far = torch.frombuffer(unreserved(reach * x.itemsize), dtype=x.dtype)
        apart[name] = far.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)
    return replace(built, operands=replace(built.operands, **apart))


def far_strides(shape: Sequence[int], axis: int, far: int = FAR) -> tuple[int, ...]:
    """Strides whose `axis` reaches `far`: 2^32, in steps that a signed 32-bit number holds.

    >>> far_strides((5, 2, 8), 0), far_strides((2, 5, 8), 1), far_strides((3, 8), 0)
    ((1073741824, 8, 1), (8, 1073741824, 1), (8, 1))
    """
    if axis >= len(shape) - 1 or shape[axis] < 4:
        return dense_strides(shape)
    others = [n for i, n in enumerate(shape) if i != axis]
    strides = list(dense_strides(others))
    step = -(-far // (shape[axis] - 1))
    strides.insert(axis, -(-max(step, others[0] * strides[0]) // _ALIGNED) * _ALIGNED)
    return tuple(strides)
