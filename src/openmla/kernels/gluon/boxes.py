"""TMA boxes of the dense operands into shared memory: rows of a head, ragged rows, cache pages.

The descriptors are made by descriptors.py. The caller has announced the bytes to the barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.compat import reinterpret, tma_load

RAGGED = gl.constexpr(1 << 30)  # rows a ragged descriptor claims to have


@gluon.jit
def load_rows(desc, row, head, column: gl.constexpr, barrier, tile):
    """A [rows, 1 head, columns] box into a [rows, columns] tile."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    tma_load(desc, [row, head, column], barrier, box)


@gluon.jit
def load_ragged(desc, start, length, row, head, barrier, tile):
    """Likewise rows start + row …, with zeros from start + length on."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    coordinates = [RAGGED, start + length, RAGGED - length + row, head, 0]
    tma_load(desc, coordinates, barrier, box)


@gluon.jit
def load_pages(desc, table, key, keys, barrier, tile, PAGE: gl.constexpr, BN: gl.constexpr):
    """The rope columns of BN keys of a request from its pages, as many rows at a time as fit.

    Entries of the table after the request's last page are never read: those keys are masked, and
    any page will do for them.
    """
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    ROWS: gl.constexpr = BOX[1]
    for i in gl.static_range(BN // ROWS):
        here = gl.maximum(gl.minimum(key + i * ROWS, keys - 1), 0)
        page = gl.load(table + here // PAGE, mask=keys > 0, other=0)
        box = reinterpret(tile.slice(i * ROWS, ROWS), desc.dtype, BOX, LAYOUT)
        tma_load(desc, [page, (key + i * ROWS) % PAGE, 0], barrier, box)
