"""Ordered sums of what entries of lists give to rows.

A warp has a row of the cache and adds the parts of its entries one after the other, query by query
and block of heads by block of heads. The sum so far, in fp32, goes on in the next launch: bits are
the same every time, and do not depend on how many queries a launch has. Eight parts are loaded at
once: one after the other, every addition would wait for memory. A row that no list names gets +0.

Columns of a part are in the order of kernel.py's registers, and so are those of the sum so far.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AT_ONCE = gl.constexpr(8)


@gluon.jit
def column_of(place):
    """The column that place 8 t + 2 j + e of every 32 holds: 8 j + 2 t + e."""
    return (place & -32) + ((place >> 1 & 3) * 8 + (place >> 3 & 3) * 2 + (place & 1))


@gluon.jit
def places(FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Places of columns FIRST … of a row, 16 bytes of a part in each thread where they suffice."""
    EACH: gl.constexpr = min(8, COLUMNS // 32)
    return gl.arange(0, COLUMNS, gl.BlockedLayout([EACH], [32], [1], [0])) + FIRST


@gluon.jit
def begun(total_ptr, at, FIRST: gl.constexpr):
    """The sum so far."""
    if FIRST:
        return gl.zeros_like(at).to(gl.float32)
    else:
        return gl.load(total_ptr + at)


@gluon.jit
def put(total, total_ptr, d_rows_ptr, row, place, WIDTH: gl.constexpr, LAST: gl.constexpr):
    """Write the sum, or the sum so far."""
    if LAST:
        rounded = total.to(d_rows_ptr.dtype.element_ty)
        gl.store(d_rows_ptr + row * WIDTH + column_of(place), rounded)
    else:
        gl.store(total_ptr + row * WIDTH + place, total)


@gluon.jit
def row_sum_kernel(
    part_ptr,
    order_ptr,
    starts_ptr,
    total_ptr,
    d_rows_ptr,
    DIMS: gl.constexpr,
    BLOCKS: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
):
    """One row; FIRST and LAST: whether sums begin and end with this launch. DIMS: Columns. BLOCKS:
    blocks of heads, so many parts has an entry."""
    WIDTH: gl.constexpr = DIMS.latent + DIMS.rope
    row = gl.program_id(0).to(gl.int64)
    place = places(0, DIMS.latent)
    total = begun(total_ptr, row * WIDTH + place, FIRST)
    rope_place = place
    rope_total = total
    if DIMS.rope > 0:
        rope_place = places(DIMS.latent, DIMS.rope)
        rope_total = begun(total_ptr, row * WIDTH + rope_place, FIRST)
    first = gl.load(starts_ptr + row)
    last = gl.load(starts_ptr + row + 1)
    for i in range(first, last, AT_ONCE // BLOCKS):
        latent = ()
        rope = ()
        for n in gl.static_range(AT_ONCE):
            more = i + n // BLOCKS < last
            entry = gl.load(order_ptr + i + n // BLOCKS, mask=more, other=0)
            line = part_ptr + (entry * BLOCKS + n % BLOCKS) * WIDTH
            latent = latent + (gl.load(line + place, mask=more, other=0.0),)  # noqa: RUF005
            if DIMS.rope > 0:
                rope = rope + (gl.load(line + rope_place, mask=more, other=0.0),)  # noqa: RUF005
        for n in gl.static_range(AT_ONCE):
            total += latent[n].to(gl.float32)
            if DIMS.rope > 0:
                rope_total += rope[n].to(gl.float32)
    put(total, total_ptr, d_rows_ptr, row, place, WIDTH, LAST)
    if DIMS.rope > 0:
        put(rope_total, total_ptr, d_rows_ptr, row, rope_place, WIDTH, LAST)
