"""Copies of dense operands into shared memory: rows of a head, ragged rows, cache pages, scales.

All but the scales are TMA boxes. Their descriptors are made by descriptors.py, and the caller has
announced the bytes to the barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openmla.kernels.gluon.compat import cp_async, reinterpret, tma_load

RAGGED = gl.constexpr(1 << 30)  # rows a ragged descriptor claims to have


@gluon.jit
def load_rows(desc, row, head, column: gl.constexpr, barrier, tile):
    """Load a [rows, 1 head, columns] box into a [rows, columns] tile."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    tma_load(desc, [row, head, column], barrier, box)


@gluon.jit
def load_ragged(desc, start, length, row, head, barrier, tile):
    """Load rows start + row … of a head into a tile, with zeros from start + length on."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    coordinates = [RAGGED, start + length, RAGGED - length + row, head, 0]
    tma_load(desc, coordinates, barrier, box)


@gluon.jit
def load_pages(desc, line, key, keys, barrier, tile, PAGE: gl.constexpr, BN: gl.constexpr):
    """Load the rope columns of BN keys of a request from its pages, a box of rows at a time.

    line: a pointer to the request's line of the block table, and the number of its entries. Entries
    after the request's last page are never read: the keys there are masked, so any page will do. A
    page number outside the pool loads zeros, as TMA does.
    """
    table, entries = line
    LAYOUT: gl.constexpr = desc.layout
    ROWS: gl.constexpr = desc.block_shape[1]
    BOXES: gl.constexpr = (BN // ROWS, 1, ROWS, desc.block_shape[2])
    boxes = reinterpret(tile, desc.dtype, BOXES, LAYOUT)
    for i in gl.static_range(BN // ROWS):
        here = gl.maximum(gl.minimum(key + i * ROWS, keys - 1), 0)
        page = gl.load(table + gl.minimum(here // PAGE, entries - 1), mask=keys > 0, other=0)
        tma_load(desc, [page, (key + i * ROWS) % PAGE, 0], barrier, boxes.index(i))


LANES = gl.constexpr(32)  # arrivals of `load_scales` at its barrier


@gluon.jit
def load_scales(scale_ptr, row, left, barrier, tile):
    """Copy the scales of keys row … with one warp (cp.async); zeros after `left` of them.

    TMA cannot: a sequence may begin at any key, and on an H200 a box that does not begin at a
    multiple of 16 bytes is an illegal instruction.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    key = gl.arange(0, tile.shape[0], L)
    cp_async(tile, scale_ptr + row + key, mask=key < left)
    async_copy.mbarrier_arrive(barrier, increment_count=False)
