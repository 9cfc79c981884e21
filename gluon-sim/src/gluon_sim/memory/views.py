"""On-chip memories: shared and tensor memory as allocations with views.

An allocation is a run of bytes with a `written` mark per byte and a `Shadow` for races. A view is a
strided window with an element type; `index`, `slice`, `permute`, `reshape` and `_reinterpret` make
new views of the same bytes. Addresses are row-major unless the layout is given by bases, or a view
of another layout has its elements elsewhere than the buffer: those views carry the place of every
element (see `placement` and `tiles`). Tensor memory keeps one row per lane, so that a bf16 view may
overlay the columns of an fp32 one, as on the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gluon_sim.machine.clocks import Shadow
from gluon_sim.machine.context import current
from gluon_sim.memory.lanes import half_lane_width, half_lanes
from gluon_sim.memory.placement import placement
from gluon_sim.memory.tiles import Home, Tile, row_major, seen_as, tile_of
from gluon_sim.values.dtypes import Array, DType
from gluon_sim.values.layouts import split_axis
from gluon_sim.values.tensors import Tensor

_UNKNOWN = "unknown"
_MOST_MASKS = 512
_masks: dict[tuple[Any, ...], int] = {}
"""The masks of `Allocation.cells`: every program of a kernel has views like those of the others."""


class Allocation:
    """Bytes in shared or tensor memory of one CTA (or, split in two, of a cluster)."""

    def __init__(self, name: str, space: str, nbytes: int, cell: int) -> None:
        self.name = name
        self.space = space  # "shared" or "tensor"
        self.bytes = np.zeros(nbytes, np.uint8)
        self.written = np.zeros(nbytes, np.uint8)
        self.shadow = Shadow()
        self.cell = cell
        self.turning = False  # indexed, or waited for, by what a register holds
        self.first: MemoryView | None = None  # as it was allocated

    def cells(self, view: MemoryView) -> int:
        """The bytes of a view as a bit mask over cells of `cell` bytes."""
        place = None if view.place is None else view.place.tobytes()
        size = len(self.bytes), self.cell
        key = (size, view.offset, view.shape, view.strides, place, view.dtype.itemsize)
        mask = _masks.get(key)
        if mask is None:
            if len(_masks) == _MOST_MASKS:
                _masks.clear()
            mask = _masks[key] = self._mask(view)
        return mask

    def _mask(self, view: MemoryView) -> int:
        marks = np.zeros(len(self.bytes) + -len(self.bytes) % self.cell, np.uint8)
        if view.place is not None:
            marks[view.byte_positions()] = 1
        else:
            unsigned = np.dtype(f"u{view.dtype.itemsize}")
            np.ndarray(view.shape, unsigned, marks, view.offset, view.strides)[...] = 1
        packed = np.packbits(marks.view(f"u{self.cell}") != 0, bitorder="little")
        return int.from_bytes(packed.tobytes(), "little")


class MemoryView:
    """A window on an allocation: what a kernel holds as a shared or tensor memory descriptor."""

    def __init__(
        self,
        alloc: Allocation,
        dtype: DType,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
        layout: Any = None,
        stage: int | None = None,
        place: Array | None = None,
    ) -> None:
        self.alloc = alloc
        self.dtype = dtype
        self._shape = tuple(shape)
        self.strides = tuple(strides)
        self.offset = offset
        self.layout = layout
        self.stage = stage
        self.place = place  # bytes from `offset` to every element; None: strided
        # Each found once: a view that is loaded needs them several times.
        self._tile: Tile | str | None = _UNKNOWN
        self._positions: Array | None = None
        self._cells: int | None = None

    # -- what kernels read
    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self._shape

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole view, over all CTAs of a cluster."""
        return self.numel * self.dtype.itemsize

    @property
    def nbytes_per_cta(self) -> int:
        """Bytes of one CTA's part."""
        return self.nbytes // (2 if self.split is not None else 1)

    @property
    def end(self) -> int:
        """Where the last byte of the view ends."""
        axes = list(zip(self._shape, self.strides, strict=True))
        if self.place is not None:
            axes = axes[: self.rank - self.place.ndim]
        inside = 0 if self.place is None else int(self.place.max())
        return self.offset + sum((n - 1) * s for n, s in axes) + inside + self.dtype.itemsize

    @property
    def type(self) -> MemoryView:
        """Kernels write `view.type.layout`; the view itself carries it."""
        return self

    @property
    def split(self) -> int | None:
        """The axis (from the end) that a cluster divides, or None."""
        return _split(self.layout)

    @property
    def label(self) -> str:
        """Name as findings print it."""
        return self.alloc.name if self.stage is None else f"{self.alloc.name}[{self.stage}]"

    @property
    def tile(self) -> Tile | None:
        """What the layout says of a tile."""
        if isinstance(self._tile, str):
            self._tile = tile_of(self.layout)
        return self._tile

    # -- sub-views
    def _derive(self, **changes: Any) -> MemoryView:
        fields: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": self._shape,
            "strides": self.strides,
            "offset": self.offset,
            "layout": self.layout,
            "stage": self.stage,
            "place": self.place,
        }
        view = type(self)(self.alloc, **{**fields, **changes})
        if "layout" not in changes:
            view._tile = self._tile
        return view

    def index(self, i: Any) -> MemoryView:
        """The i-th part along the first axis (a pipeline stage)."""
        if isinstance(i, Tensor):
            self.alloc.turning = True
        i = int(i)
        if not 0 <= i < self._shape[0]:
            raise IndexError(f"index {i} of {self.label}, which has {self._shape[0]} stages")
        tile = self.tile
        if tile is not None and self.rank <= tile.rank:
            raise ValueError(f"index of {self.label} {self._shape} cuts a tile")
        if self.place is not None and self.rank == self.place.ndim:
            return self._derive(
                shape=self._shape[1:], strides=self.strides[1:], place=self.place[i], stage=i
            )
        return self._derive(
            shape=self._shape[1:],
            strides=self.strides[1:],
            offset=self.offset + i * self.strides[0],
            stage=i,
        )

    def slice(self, start: Any, length: int, dim: int | None = None) -> MemoryView:
        """`length` elements from `start` along `dim` (tensor memory: the last axis)."""
        if dim is None:
            dim = self.rank - 1 if self.alloc.space == "tensor" else 0
        start, length = int(start), int(length)
        if start < 0 or start + length > self._shape[dim]:
            raise IndexError(f"slice {start}+{length} of axis {dim} of {self.label} {self._shape}")
        shape = (*self._shape[:dim], length, *self._shape[dim + 1 :])
        if self.place is not None and dim >= self.rank - self.place.ndim:
            kept = self.place.take(range(start, start + length), dim - self.rank)
            return self._derive(shape=shape, place=kept)
        return self._derive(shape=shape, offset=self.offset + start * self.strides[dim])

    def permute(self, order: Sequence[int]) -> MemoryView:
        """These bytes with the axes in another order."""
        axes = [int(i) for i in order]
        tile = self.tile
        plain = tile is not None and tile.kind == "nvmma" and not tile.swizzle
        if plain and axes != sorted(axes):
            raise ValueError(
                f"permute of {self.label}: Triton before 3.8 places the elements of a permuted "
                "tile that has no swizzle as if it had been written in that order"
            )
        view = self._derive(
            shape=[self._shape[i] for i in axes],
            strides=[self.strides[i] for i in axes],
            layout=_permuted(self.layout, axes),
        )
        if self.place is not None:
            if self.rank > self.place.ndim:
                raise ValueError(f"permute of {self.label}: pick a stage first")
            view.place = self.place.transpose(axes)
        return view

    def reshape(self, shape: Sequence[int]) -> MemoryView:
        """A row-major reshape of a contiguous view; its layout is the compiler's to find."""
        shape = [int(x) for x in shape]
        strides = row_major(shape, self.dtype.itemsize)
        if self.place is not None or self.strides != row_major(self._shape, self.dtype.itemsize):
            raise ValueError(f"reshape of {self.label}: its elements do not follow one another")
        return self._derive(shape=shape, strides=strides, layout=SplitLayout(self.split))

    def _reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> MemoryView:
        """These bytes as another type and shape (tensor memory: same lanes, own columns)."""
        shape = [int(x) for x in shape]
        if self.alloc.space == "shared":
            return self._shared_as(dtype, tuple(shape), layout)
        strides, place = row_major(shape, dtype.itemsize), None
        if self.rank >= 2 and len(shape) >= 2:
            lane = self.strides[-2]
            width = half_lane_width(self._shape, shape, layout)
            if width:
                place = half_lanes(shape, width, lane, dtype.itemsize)
            elif shape[-1] * dtype.itemsize > lane:
                raise ValueError(f"{self.label}: {shape[-1]} columns of {dtype} do not fit")
            strides = (*(lane * x for x in row_major(shape[:-1], 1)), dtype.itemsize)
        view = self._derive(dtype=dtype, shape=shape, strides=strides, layout=layout, place=place)
        if view.end > len(self.alloc.bytes):
            raise ValueError(f"{self.label}: a view of {shape} {dtype} is larger than the buffer")
        return view

    def _shared_as(self, dtype: DType, shape: tuple[int, ...], layout: Any) -> MemoryView:
        """Shared memory as another type and shape: where the compiler has the elements."""
        first = self.alloc.first
        assert first is not None
        within = 0 if self.place is None else int(self.place.flat[0])
        if first.place is not None and within:
            raise ValueError(f"{self.label}: only a whole tile can be seen as another one")
        nbytes, itemsize = len(self.alloc.bytes), first.dtype.itemsize
        home = Home(first.tile, first.shape, itemsize, nbytes, first.split)
        start = self.offset + within
        try:
            seen = seen_as(home, start, tile_of(layout), shape, dtype.itemsize, _split(layout))
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None
        return self._derive(
            dtype=dtype,
            shape=shape,
            strides=seen.strides,
            offset=start,
            layout=layout,
            place=seen.place,
        )

    def reinterpret(
        self, dtype: DType | None = None, shape: Any = None, layout: Any = None
    ) -> MemoryView:
        """`_reinterpret` under its later name."""
        return self._reinterpret(dtype or self.dtype, shape or self._shape, layout or self.layout)

    def get_reg_layout(self, **_: Any) -> SplitLayout:
        """Register layouts are not modeled; the cluster split is kept."""
        return SplitLayout(self.split)

    def _keep_alive(self) -> None:
        """Lifetimes are not modeled: every allocation lives as long as its CTA."""

    # -- the bytes
    def part(self) -> MemoryView:
        """The part of a cluster's view that lies in the running CTA."""
        axis = self.split
        if axis is None:
            return self
        dim = self.rank + axis
        half = self._shape[dim] // 2
        return self.slice(half * current().cta.rank, half, dim)

    def half(self, rank: int) -> MemoryView:
        """The part of a cluster's view that lies in CTA `rank`."""
        axis = self.split
        if axis is None:
            return self
        dim = self.rank + axis
        return self.slice(self._shape[dim] // 2 * rank, self._shape[dim] // 2, dim)

    def byte_positions(self) -> Array:
        """The position of every byte of a placed view, element by element."""
        if self._positions is None:
            assert self.place is not None
            first = np.full((1,) * self.place.ndim, self.offset)
            for axis in reversed(range(self.rank - self.place.ndim)):
                steps = np.arange(self._shape[axis]) * self.strides[axis]
                first = first[None] + steps.reshape(-1, *(1,) * first.ndim)
            self._positions = (first + self.place)[..., None] + np.arange(self.dtype.itemsize)
        return self._positions

    def array(self) -> Array:
        """The bits, as a writable NumPy view (of a placed view: a copy that cannot be written)."""
        if self.place is not None:
            bits: Array = self.alloc.bytes[self.byte_positions()].view(self.dtype.storage)[..., 0]
            bits.flags.writeable = False
            return bits
        return np.ndarray(
            self._shape, self.dtype.storage, self.alloc.bytes, self.offset, self.strides
        )

    def _marks(self) -> Array:
        if self.place is not None:
            marks: Array = self.alloc.written[self.byte_positions()]
            return marks
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        return np.ndarray(self._shape, unsigned, self.alloc.written, self.offset, self.strides)

    def read_values(self) -> Array:
        """Decoded values."""
        return self.dtype.decode(self.array())

    def write_bits(self, bits: Array | int, where: Array | bool = True) -> None:
        """Store bits and mark them written; elements where `where` is false keep what they had."""
        on = np.broadcast_to(where, self._shape)
        if self.place is not None:
            whole = np.broadcast_to(np.asarray(bits, self.dtype.storage), self._shape)
            at = self.byte_positions()[on]
            self.alloc.bytes[at] = np.ascontiguousarray(whole[on])[..., None].view(np.uint8)
            self.alloc.written[at] = 1
            return
        np.copyto(self.array(), bits, where=on, casting="unsafe")
        marks = self._marks()
        # Every byte: another view may be narrower.
        np.copyto(marks, np.iinfo(marks.dtype).max, where=on)

    @property
    def fully_written(self) -> bool:
        """Whether every element was written at least once."""
        return bool(self._marks().all())

    def cells(self) -> int:
        """Bit mask of the bytes this view covers."""
        if self._cells is None:
            self._cells = self.alloc.cells(self)
        return self._cells

    # -- what kernels call
    def load(self, layout: Any = None) -> Tensor:
        """Read into registers (an ordinary, synchronous access)."""
        agent = current()
        agent.access(self.part(), write=False, what=f"load of {self.label}")
        agent.charge(self.numel, "memory", self.split)
        return Tensor(self.read_values(), self.dtype, split_axis(layout), layout)

    def store(self, value: Any, pred: Any = True) -> None:
        """Write from registers (an ordinary, synchronous access)."""
        if not bool(pred):
            return
        if value.dtype != self.dtype:  # as Triton: a store does not round
            raise ValueError(f"store of {value.dtype} to {self.label} of {self.dtype}")
        agent = current()
        bits = self.dtype.encode(value.value)
        if tuple(bits.shape) != self._shape:
            raise ValueError(f"store of shape {bits.shape} to {self.label} of shape {self._shape}")
        mine = self.part()
        agent.access(mine, write=True, what=f"store to {self.label}")
        agent.charge(self.numel, "memory", self.split)
        if mine is not self:
            dim = self.rank + (self.split or 0)
            half = self._shape[dim] // 2
            bits = np.take(bits, range(half * agent.cta.rank, half * (agent.cta.rank + 1)), dim)
        mine.write_bits(bits)


class SplitLayout:
    """A layout of which only the cluster split is known."""

    def __init__(self, axis: int | None) -> None:
        self.sim_split = axis


def _split(layout: Any) -> int | None:
    axis = split_axis(layout)
    return axis if axis is not None and current().cta.cluster.size > 1 else None


def _permuted(layout: Any, order: Sequence[int]) -> SplitLayout:
    axis, rank = split_axis(layout), len(order)
    return SplitLayout(None if axis is None else list(order).index(rank + axis) - rank)


def _strides(
    shape: Sequence[int], dtype: DType, layout: Any
) -> tuple[tuple[int, ...], Array | None]:
    """Bytes from one index to the next along each axis, and the places inside a tile."""
    tile = placement(layout, shape)
    if tile is None:
        return row_major(shape, dtype.itemsize), None
    rank = tile.offsets.ndim
    stages = row_major(shape[: len(shape) - rank], tile.extent * dtype.itemsize)
    inside = row_major(shape[len(shape) - rank :], dtype.itemsize)
    return stages + inside, tile.offsets * dtype.itemsize


def allocate(name: str, space: str, dtype: DType, shape: Sequence[int], layout: Any) -> MemoryView:
    """A new allocation and the view of all of it."""
    shape = [int(x) for x in shape]
    strides, place = _strides(shape, dtype, layout)
    nbytes = strides[0] * shape[0] if shape else dtype.itemsize
    if place is not None and place.ndim == len(shape):
        nbytes = int(place.max()) + dtype.itemsize
    alloc = Allocation(name, space, nbytes, min(4, dtype.itemsize))
    alloc.first = MemoryView(alloc, dtype, shape, strides, 0, layout, place=place)
    return alloc.first
