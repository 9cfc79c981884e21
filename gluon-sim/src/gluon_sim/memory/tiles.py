"""Where the compiler puts the elements of a tile: what views of one buffer must agree about.

The simulator keeps a buffer row-major unless its layout is given by bases. While all views of it
have every element in the same place, nobody can tell. A view of another layout or shape may have it
elsewhere: `seen_as` then says where, in the simulator's places of the buffer, so that such a view
reads what compiled code reads.

>>> swizzled = Tile("nvmma", swizzle=32, bits=16)
>>> offsets(swizzled, (8, 16))[:5:4, :9:8].tolist()  # rows 0 and 4: the halves of row 4 are swapped
[[0, 8], [72, 64]]
>>> offsets(swizzled, (8, 32))[0, 14:18].tolist()  # 32 bytes of all rows, then the next 32
[14, 15, 128, 129]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from gluon_sim.memory.placement import placement
from gluon_sim.values.dtypes import Array

LONGEST = 256
"""Elements of a box along each axis; what is longer lies box after box."""
CORE_ROWS = 8
"""Rows after which a swizzle begins anew."""
CHUNK, LINE = 16, 128
"""Bytes that a swizzle exchanges as one, and bytes after which the exchange is another one."""


@dataclass(frozen=True)
class Tile:
    """A layout of shared memory: what decides where the elements of a tile are."""

    kind: str
    """"nvmma", "swizzled" or "bases"; another one has no meaning here."""
    rank: int = 2
    """Axes of a tile; those in front of them number tiles."""
    swizzle: int = 0
    """Where kind is "nvmma": bytes of a row of a box, or 0."""
    bits: int = 0
    transposed: bool = False
    exchange: tuple[int, int, int] = (1, 1, 1)
    """Where it is "swizzled": elements of a vector, rows of a phase, phases."""
    order: tuple[int, ...] = ()
    """Where it is "swizzled": the axes, that of neighbors first."""
    offset_bases: tuple[tuple[int, ...], ...] = ()
    interval_padding_pairs: tuple[tuple[int, int], ...] = ()

    @property
    def boxes(self) -> tuple[str, int, int, bool]:
        """What a descriptor and a view it fills must have in common."""
        return self.kind, self.swizzle, self.bits, self.transposed


@dataclass(frozen=True)
class Home:
    """A buffer as it was allocated."""

    tile: Tile | None
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    split: int | None
    """The axis (from the end) that a cluster divides."""


class Seen(NamedTuple):
    """The elements of a view, in the simulator's places of its buffer."""

    strides: tuple[int, ...]
    """Bytes from one tile to the next; without `place`, along all axes."""
    place: Array | None
    """Bytes from a tile's first element to every element; None: they follow one another."""


def tile_of(layout: Any) -> Tile | None:
    """What a layout says of a tile; None: that it is row-major, or nothing."""
    name = type(layout).__name__
    if bases := getattr(layout, "offset_bases", None):
        pairs = getattr(layout, "interval_padding_pairs", None) or ()
        return Tile(
            "bases",
            len(bases[0]),
            offset_bases=tuple(tuple(int(step) for step in basis) for basis in bases),
            interval_padding_pairs=tuple((int(every), int(more)) for every, more in pairs),
        )
    if name == "NVMMASharedLayout":
        kind = "fp4" if getattr(layout, "fp4_padded", False) else "nvmma"
        swizzle, bits = int(layout.swizzle_byte_width), int(layout.element_bitwidth)
        return Tile(kind, int(layout.rank or 2), swizzle, bits, bool(layout.transposed))
    if name == "SwizzledSharedLayout" and layout.order:
        order = tuple(int(axis) for axis in layout.order)
        exchange = (int(layout.vec), int(layout.per_phase), int(layout.max_phase))
        return Tile("swizzled", len(order), exchange=exchange, order=order)
    return None


@cache
def offsets(tile: Tile | None, shape: tuple[int, ...]) -> Array:
    """Elements from the first one of a view to each, as the compiler places them.

    Args:
        tile: the layout; None: row-major.
        shape: of the view, with the axes that number tiles.
    """
    if tile is None:
        return np.arange(int(np.prod(shape))).reshape(shape)
    inside = shape[max(len(shape) - tile.rank, 0) :]
    outer = shape[: len(shape) - len(inside)]
    one, extent = _inside(tile, inside)
    first = np.arange(int(np.prod(outer))) * extent
    return (first.reshape(*outer, *(1,) * len(inside)) + one).reshape(shape)


def _inside(tile: Tile, shape: tuple[int, ...]) -> tuple[Array, int]:
    """Places within one tile, and the elements from a tile to the next."""
    if tile.kind == "nvmma":
        return _nvmma(tile, shape), int(np.prod(shape))
    if tile.kind == "swizzled":
        return _swizzled(tile, shape), int(np.prod(shape))
    placed = placement(tile, shape)
    if placed is None:
        raise ValueError(f"a tile of {list(shape)} with padding inside bytes is not modeled")
    return placed.offsets, placed.extent


def _nvmma(tile: Tile, shape: tuple[int, ...]) -> Array:
    """Boxes as TMA fills them: rows of as many bytes as are swizzled, their chunks exchanged."""
    rank = len(shape)
    near = 0 if tile.transposed else rank - 1  # the axis of neighbors
    box = [min(extent, LONGEST) for extent in shape]
    if tile.swizzle:
        box[near] = 8 * tile.swizzle // tile.bits
        if shape[near] % box[near]:
            raise ValueError(f"{list(shape)} of {tile.bits} bits: no rows of {tile.swizzle} bytes")
    index = np.indices(shape)
    row, column = np.zeros(shape, int), index[near] % box[near]
    for axis in range(1, rank) if tile.transposed else range(rank - 1):
        row = row * box[axis] + index[axis] % box[axis]
    if tile.swizzle:
        phase = row % CORE_ROWS // (LINE // tile.swizzle) % (tile.swizzle // CHUNK)
        column = column ^ phase * (8 * CHUNK // tile.bits)
    at: Array = row * box[near] + column
    step = int(np.prod(box))
    # The next box is the one along the first axis; without a swizzle, along the last one.
    for axis in range(rank) if tile.swizzle else reversed(range(rank)):
        at += index[axis] // box[axis] * step
        step *= shape[axis] // box[axis]
    return at


def _swizzled(tile: Tile, shape: tuple[int, ...]) -> Array:
    """Vectors of a row exchanged among themselves; `order` says what a row is."""
    near, *others = tile.order
    index, step = np.indices(shape), shape[near]
    at: Array = index[near]
    if others:
        vector, rows, phases = tile.exchange
        at = at ^ index[others[0]] // rows % phases * vector % step
    for axis in others:
        at = at + index[axis] * step
        step *= shape[axis]
    return at


def _bytes(
    tile: Tile | None, shape: tuple[int, ...], itemsize: int, split: int | None, apart: int
) -> Array:
    """Bytes from the first element of a view to each. `split`: the axis (from the end) of which the
    second CTA of a cluster has the second half, `apart` bytes after the first."""
    if split is None:
        return offsets(tile, shape) * itemsize
    half = list(shape)
    half[split] //= 2
    own = offsets(tile, tuple(half)) * itemsize
    return np.concatenate([own, own + apart], axis=split)


@cache
def _maps(home: Home) -> tuple[Array, Array]:
    """From the simulator's byte of a buffer to the compiler's, and back."""
    if home.tile is not None and home.tile.kind == "bases":
        same = np.arange(home.nbytes)
        return same, same
    first = _bytes(home.tile, home.shape, home.itemsize, home.split, home.nbytes // 2)
    compiled = (first.reshape(-1, 1) + np.arange(home.itemsize)).reshape(-1)
    simulated = np.empty_like(compiled)
    simulated[compiled] = np.arange(len(compiled))
    return compiled, simulated


@cache
def seen_as(
    home: Home,
    start: int,
    tile: Tile | None,
    shape: tuple[int, ...],
    itemsize: int,
    split: int | None,
) -> Seen:
    """Where the elements of a view are.

    Args:
        home: its buffer.
        start: the simulator's place of its first element.
        tile: its layout.
        shape: its extents.
        itemsize: bytes of an element.
        split: the axis that a cluster divides.

    Raises:
        ValueError: it is larger than the buffer, or has no whole elements of it.
    """
    compiled, simulated = _maps(home)
    there = compiled[start] + _bytes(tile, shape, itemsize, split, home.nbytes // 2)
    if there.max(initial=0) + itemsize > home.nbytes:
        raise ValueError(f"a view of {list(shape)} is larger than the buffer")
    here = simulated[there] - start
    if (simulated[there + itemsize - 1] - start - here != itemsize - 1).any():
        raise ValueError(f"a view of {list(shape)}: the buffer has no such elements in one piece")
    plain = row_major(shape, itemsize)
    if np.array_equal(here, _places(shape, plain)):
        return Seen(plain, None)
    outer = len(shape) - (len(shape) if tile is None else min(tile.rank, len(shape)))
    steps = tuple(
        int(here[_unit(len(shape), axis)]) if shape[axis] > 1 else 0 for axis in range(outer)
    )
    inside = here[(0,) * outer]
    tiles = _places(shape[:outer], steps).reshape(*shape[:outer], *(1,) * inside.ndim)
    if np.array_equal(here, tiles + inside):
        return Seen(steps + (0,) * inside.ndim, inside)
    return Seen((0,) * len(shape), here)


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one index to the next along each axis, of elements that follow one another."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(strides[::-1])


def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    places: Array = np.zeros(shape, int)
    for indices, stride in zip(np.indices(shape), strides, strict=True):
        places = places + indices * stride
    return places


def _unit(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(int(i == axis) for i in range(rank))
