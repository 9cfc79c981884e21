"""Global memory: tensor arguments with bounds and write counts, and TMA descriptors on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gluon_sim.machine.async_units import AsyncOp
from gluon_sim.machine.context import current, here
from gluon_sim.memory.history import Cells, GlobalAccess, report_races
from gluon_sim.memory.unreserved import unreserved
from gluon_sim.report.findings import Kind
from gluon_sim.report.outputs import storage_of
from gluon_sim.values import dtypes
from gluon_sim.values.dtypes import Array
from gluon_sim.values.layouts import split_axis
from gluon_sim.values.tensors import Pointer

# A descriptor that claims so many rows and has fewer relies on addresses that wrap around 2^64.
CLAIMED_ROWS = 1 << 30
# Bytes from one row, page or head of a descriptor to the next: the driver refuses more.
STRIDE_LIMIT = 1 << 40
_MANY = 1 << 30


def _zeros(number: int) -> Array:
    """Write counts; those of a tensor that spans more than memory holds are not reserved."""
    if number < _MANY:
        return np.zeros(number, np.int32)
    return np.frombuffer(unreserved(4 * number), np.int32)


def _same_bits(x: Array, y: Array) -> bool:
    """Whether two arrays of one type are equal, NaN too."""
    bits = f"u{x.dtype.itemsize}"
    return bool((np.ascontiguousarray(x).view(bits) == np.ascontiguousarray(y).view(bits)).all())


class GlobalBuffer:
    """One tensor argument: the bits of its storage, its bounds, how often each was stored, and who
    touched it last (`cells`). `contended`: programs may overwrite one another's stores."""

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str,
        counts: dict[tuple[int, int], Array],
        cells: Cells,
        contended: bool = False,
    ) -> None:
        if tensor.device.type != "cpu":
            raise TypeError(f"{name}: the simulator takes CPU tensors, got one on {tensor.device}")
        self.name = name
        self.dtype = dtypes.from_torch(tensor.dtype)
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
        if tensor.dtype not in (torch.bool, torch.float16, torch.float32, torch.float64):
            signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            flat = flat.view(signed[tensor.element_size()])
        self.flat: Array = flat.numpy().view(self.dtype.storage)
        self.base = int(tensor.storage_offset())
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        self.span = sum((n - 1) * s for n, s in extents) + 1 if tensor.numel() else 0
        key = storage_of(tensor)
        if key not in counts:
            counts[key] = _zeros(len(self.flat))
        self.counts = counts[key]
        self.cells = cells
        self.contended = contended

    def shifted(self, offset: int) -> GlobalBuffer:
        """This buffer from a later element on."""
        other = copy.copy(self)
        other.base, other.span = self.base + offset, self.span - offset
        return other

    def resolve(self, pointer: Pointer, mask: Any, what: str) -> tuple[Array, Array | None]:
        """Absolute element positions (0 where masked off) and the mask; reports what is outside."""
        offset = np.asarray(pointer.offset)
        where: Array | None = None
        if mask is not None:
            offset, where = np.broadcast_arrays(offset, np.asarray(mask, bool))
        inside = (offset >= 0) & (offset < self.span)
        outside = ~inside if where is None else where & ~inside
        if outside.any():
            worst = int(np.asarray(offset)[outside].reshape(-1)[0])
            current().report(
                Kind.BOUNDS,
                f"{what} at element {worst} of {self.name}, which spans {self.span} "
                f"({int(outside.sum())} elements outside)",
                buffer=self.name,
            )
        if where is None:
            where = None if inside.all() else inside
        else:
            where = where & inside
        position = offset + self.base
        return (position if where is None else np.where(where, position, self.base)), where

    def touch(
        self,
        position: Array,
        where: Array | None,
        what: str,
        *,
        write: bool = False,
        atomic: bool = False,
        by: AsyncOp | None = None,
    ) -> None:
        """Record an access of the running partition, or of `by`, and report what it races with."""
        agent = current()
        at = np.asarray(position) if where is None else np.asarray(position)[where]
        component = agent.component if by is None else by.channel
        time = agent.clock.seen[component] if by is None else by.time
        line = here() if by is None else by.where
        contended = write and self.contended
        access = GlobalAccess(agent.launch, component, time, what, line, atomic, contended)
        cells = self.cells.of(at, self.dtype.itemsize)
        report_races(agent, self.cells, cells, access, write, self.name)

    def touch_atomically(self, position: Array, where: Array | None, hands_on: bool) -> None:
        """Record an atomic; one that `hands_on` clocks releases and acquires."""
        agent = current()
        if hands_on:
            at = np.asarray(position) if where is None else np.asarray(position)[where]
            history = agent.cta.cluster.machine.history
            history.hand_on(self.cells, self.cells.of(at, self.dtype.itemsize), agent.clock)
        self.touch(position, where, "atomic", write=True, atomic=True)
        if hands_on:
            agent.clock.tick(agent.component)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Array:
        """Values at `pointer`; `other` (default 0) where the mask is off."""
        position, where = self.resolve(pointer, mask, "load")
        self.touch(position, where, "load")
        if where is not None and not where.any():
            bits = np.zeros(np.shape(position), self.dtype.storage)
        else:
            bits = self.flat[position]
        values = self.dtype.decode(np.asarray(bits))
        if where is None:
            return values
        fill = np.asarray(0 if other is None else other).astype(self.dtype.register)
        return np.where(where, values, fill).astype(self.dtype.register)

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        """Write values where the mask is on, and count the writes. Lanes that write one element
        agree on its value, or which of them is last decides."""
        position, where = self.resolve(pointer, mask, "store")
        self.touch(position, where, "store", write=True)
        bits = np.broadcast_to(self.dtype.encode(np.asarray(values)), position.shape)
        if where is not None:
            position, bits = position[where], bits[where]
        self.flat[position] = bits
        np.add.at(self.counts, position, 1)
        if not self.contended and not _same_bits(self.flat[position], bits):
            what = f"lanes of one store write different values to an element of {self.name}"
            current().report(Kind.RACE, what, buffer=self.name)


class Descriptor:
    """A TMA tensor descriptor: a strided global tensor, read and written in blocks."""

    def __init__(self, source: Any, buffer: GlobalBuffer) -> None:
        self.buffer = buffer
        self.dtype = buffer.dtype
        self.shape = [int(n) for n in source.shape]
        self.strides = [int(s) for s in source.strides]
        self.block_shape = [int(n) for n in source.block_shape]
        self.layout = source.layout
        self.padding = getattr(source, "padding", "zero")
        self._check_strides()
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        self.wraps = max(self.shape) >= CLAIMED_ROWS and reach > buffer.span
        if self.wraps:
            return
        if reach > buffer.span:
            raise ValueError(
                f"{buffer.name}: the descriptor reaches element {reach - 1}, "
                f"the tensor spans {buffer.span}"
            )
        step = buffer.flat.itemsize
        bounds = [s * step for s in self.strides]
        self.array = np.ndarray(
            self.shape, buffer.flat.dtype, buffer.flat, buffer.base * step, bounds
        )
        steps = [4 * s for s in self.strides]
        self.counts = np.ndarray(self.shape, np.int32, buffer.counts, buffer.base * 4, steps)

    def _check_strides(self) -> None:
        """Check all dimensions but the last as the hardware does, also those of one element."""
        for stride in self.strides[:-1]:
            size = stride * self.dtype.itemsize
            if size % 16 or not 0 <= size < STRIDE_LIMIT:
                raise ValueError(
                    f"{self.buffer.name}: a descriptor's strides are multiples of 16 bytes below "
                    f"2^40, got {size}"
                )

    def read(self, start: Sequence[int], extent: Sequence[int]) -> Array:
        """The bits of a block; outside the tensor they are the padding."""
        fill = float("nan") if self.padding == "nan" else 0.0
        block = np.full(extent, self.dtype.encode(np.asarray(fill)), self.buffer.flat.dtype)
        if not self.wraps:
            outer, inner = self.window(start, extent)
            block[inner] = self.array[outer]
            return block
        # The corner in exact arithmetic, wrapped; the rest of the block is near it.
        corner = sum(first * stride for first, stride in zip(start, self.strides, strict=True))
        around = 2**64 // self.dtype.itemsize
        offset = np.full(extent, (corner + around // 2) % around - around // 2, np.int64)
        where = np.ones(extent, bool)
        for axis, index in enumerate(np.indices(extent, sparse=True)):
            offset += index * self.strides[axis] if extent[axis] > 1 else 0
            where &= (index + start[axis] >= 0) & (index + start[axis] < self.shape[axis])
        pointer = Pointer(self.buffer, offset[where])
        position, _ = self.buffer.resolve(pointer, None, "TMA load")
        block[where] = self.buffer.flat[position]
        return block

    def touch(
        self, start: Sequence[int], extent: Sequence[int], what: str, by: AsyncOp, write: bool
    ) -> None:
        """Record that `by` copies a block."""
        outer, _ = self.window(start, extent)
        self.touch_rows([np.arange(part.start, part.stop) for part in outer], what, by, write)

    def touch_rows(
        self, indices: Sequence[Array], what: str, by: AsyncOp, write: bool = False
    ) -> None:
        """Record that `by` copies the elements at all combinations of `indices`."""
        if self.wraps:
            return
        parts = np.ix_(*indices)
        position = sum(
            (part * stride for part, stride in zip(parts, self.strides, strict=True)),
            np.asarray(self.buffer.base),
        )
        self.buffer.touch(position, None, what, by=by, write=write)

    @property
    def type(self) -> Descriptor:
        """Kernels write `desc.type.layout`."""
        return self

    @property
    def block_type(self) -> Descriptor:
        """Kernels write `desc.block_type.nbytes`."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of one block, over all CTAs of a cluster."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def nbytes_per_cta(self) -> int:
        """Bytes of one CTA's part of a block."""
        clustered = current().cta.cluster.size > 1 and split_axis(self.layout) is not None
        return self.nbytes // (2 if clustered else 1)

    def window(self, start: Sequence[int], extent: Sequence[int]) -> tuple[Any, Any]:
        """Slices of the part of a block inside the tensor: in the tensor, and in the block."""
        outer, inner = [], []
        for first, count, limit in zip(start, extent, self.shape, strict=True):
            low, high = max(first, 0), min(first + count, limit)
            high = max(high, low)
            outer.append(slice(low, high))
            inner.append(slice(low - first, high - first))
        return tuple(outer), tuple(inner)
