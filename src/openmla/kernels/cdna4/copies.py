"""Copies from global memory to LDS, 16 bytes per lane, without a detour through registers.

A copy is finished when a later `wait_group` covers its group. Rows at or past `limit` are not read;
they become zeros. Strides count pieces of 16 bytes, so that the compiler knows rows are aligned.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.gluon.requests import cut


@gluon.jit
def swizzled_pieces(rows, pieces):
    """The piece of 16 bytes that belongs at (row, piece) of the unswizzled memory.

    The K swizzle moves pieces by two bits of the row. It is its own inverse.
    """
    return pieces[None, :] ^ ((rows // 4) % 4)[:, None]


@gluon.jit
def swizzled_source(rows, columns, PIECE: gl.constexpr):
    """The column whose value belongs at (row, column) of the unswizzled memory."""
    return swizzled_pieces(rows, columns // PIECE) * PIECE + (columns % PIECE)[None, :]


@gluon.jit
def copy_rows(slot, ptr, stride, first, limit, COPY_LAYOUT: gl.constexpr, SWIZZLE: gl.constexpr):
    """Rows first, first + 1, … to a slot [rows, columns]; ptr points at row `first`."""
    PIECE: gl.constexpr = 128 // slot.dtype.primitive_bitwidth
    rows = gl.arange(0, slot.shape[0], gl.SliceLayout(1, COPY_LAYOUT))
    columns = gl.arange(0, slot.shape[1], gl.SliceLayout(0, COPY_LAYOUT))
    if SWIZZLE:
        source = swizzled_source(rows, columns, PIECE)
    else:
        source = columns[None, :]
    offsets = (rows * (stride * PIECE))[:, None] + source
    async_copy.buffer_load_to_shared(slot, ptr, offsets, mask=(rows + first < limit)[:, None])


@gluon.jit
def position(key, line):
    """The position in its sequence of a key, by its number; line: TableLine."""
    if line.origin is None:
        return key
    else:
        return key + line.origin


@gluon.jit
def pages_of(line, first, limit, COPY_LAYOUT: gl.constexpr, PAGE: gl.constexpr):
    """The pages of rows first, first + 1, …, as the rows are copied; 0 at or past `limit`. `line`:
    TableLine.

    Pages are loaded a tile before the copies that need them: waiting for them is then no wait for
    copies that were started later. Nothing is masked by a branch, behind which the compiler could
    not count what is in flight.
    """
    keys = gl.arange(0, COPY_LAYOUT.shape[0], gl.SliceLayout(1, COPY_LAYOUT)) + first
    inside = keys < limit
    entry = gl.minimum(position(keys, line) // PAGE, line.entries - 1)
    return cdna4.buffer_load(line.ptr, entry, mask=inside)


@gluon.jit
def copy_paged_rows(slot, rope, pages, first, COPY_LAYOUT: gl.constexpr, PAGE: gl.constexpr):
    """Rows first, first + 1, … of a paged cache to a swizzled slot; rope: RopeRows, `pages`: see
    pages_of. Rows past the last are some row of page 0, so their scores must be masked."""
    PIECE: gl.constexpr = 128 // slot.dtype.primitive_bitwidth
    rows = gl.arange(0, slot.shape[0], gl.SliceLayout(1, COPY_LAYOUT))
    columns = gl.arange(0, slot.shape[1], gl.SliceLayout(0, COPY_LAYOUT))
    # Pages may be anywhere in a cache of any size: 64-bit addresses.
    pages = cut(pages, rope.last_page).to(gl.int64)
    row = (
        pages * rope.page_stride
        + (position(rows + first, rope.line) % PAGE).to(gl.int64) * rope.row_stride
    )
    pointers = (rope.ptr + row * PIECE)[:, None] + swizzled_source(rows, columns, PIECE)
    async_copy.global_load_to_shared(slot, pointers)
