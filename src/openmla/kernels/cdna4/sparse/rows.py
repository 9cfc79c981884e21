"""Latent rows on their way to LDS: those that a list names, or those of a sequence's pages.

| | list | pages |
|---|---|---|
| place | of the token's list | of a key in its sequence |
| number of a place | index of a row | the page that the key is in |
| counts | number >= 0 and < rows, place < count | place < count |

A `source` is (list or table, count, rows). `HOW` is (PAGED, rows per page, rope columns, columns
per scale); rows per page are 0 where pages lie end to end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import COPY, swizzled_pieces, swizzled_source
from openmla.kernels.cdna4.softmax import opaque_zero
from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.offsets import cut

GROUP = gl.constexpr(8)  # columns that one lane copies: 16 bytes of LDS
# Of the 64 numbers of a block: one per lane, the same in all waves; in LDS, one after another.
LANES = gl.constexpr(gl.BlockedLayout([1], [64], [8], [0]))
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Of 8 latent rows: a wave has one.
ROW_PER_WAVE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 64], [8, 1], [1, 0]))


@gluon.jit
def numbers_of(source, first, KV: gl.constexpr, HOW: gl.constexpr):
    """Numbers of places first, first + 1, …, one per lane of a wave; 0 past the last, which are not
    read.

    Nothing is done with them before they are stored to LDS: the compiler would do it, and wait for
    them, at once.
    """
    at = gl.arange(0, KV, LANES) + first
    if HOW[0]:
        return cdna4.buffer_load(source[0], at // HOW[1], mask=at < source[1])
    else:
        return cdna4.buffer_load(source[0], at, mask=at < source[1])


@gluon.jit
def counting(number, at, source, HOW: gl.constexpr):
    """Whether the row at place `at` counts."""
    _list, count, rows = source
    if HOW[0]:
        return at < count
    else:
        return (at < count) & (number >= 0) & (number < rows)


@gluon.jit
def all_count(numbers, first, source, KV: gl.constexpr, HOW: gl.constexpr):
    """Whether all rows of a block do."""
    if HOW[0]:
        return first + KV <= source[1]
    else:
        at = gl.arange(0, KV, LANES) + first
        return gl.min(counting(numbers.load(LANES), at, source, HOW).to(gl.int32), 0) == 1


@gluon.jit
def row_offset(number, at, source, strides, HOW: gl.constexpr):
    """Strides from the first row to the one at place `at`, or to some row if that does not count;
    64 bits, a cache may be of any size."""
    stride_page, stride_t = strides
    if HOW[0]:
        page = cut(number, source[2] // HOW[1] - 1).to(gl.int64)
        return page * stride_page + (at % HOW[1]).to(gl.int64) * stride_t
    else:
        safe = cut(number, source[2] - 1)
        if HOW[1] > 0:
            page = (safe // HOW[1]).to(gl.int64) * stride_page
            return page + (safe % HOW[1]).to(gl.int64) * stride_t
        else:
            return safe.to(gl.int64) * stride_t


@gluon.jit
def row_pointers(slot, part, numbers, first, source, PART: gl.constexpr, HOW: gl.constexpr):
    """Where the values of a slot come from, as PART (its layouts, whether it is swizzled) copies
    them. Strides count pieces of 16 bytes."""
    ptr, strides = part
    PIECE: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = PART[0][COPY]
    place = gl.arange(0, slot.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, slot.shape[1], gl.SliceLayout(0, LAYOUT))
    if PART[1]:
        columns = swizzled_source(place, column, GROUP)
    else:
        columns = column[None, :]
    offset = row_offset(numbers.load(place.type.layout), place + first, source, strides, HOW)
    return (ptr + offset * PIECE)[:, None] + columns


@gluon.jit
def copy_block(slots, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start copying the rows of a block to a slot, as one group.

    No copy is masked: the compiler would branch around it, and where it cannot count the copies in
    flight it waits for all of them.
    """
    LATENT: gl.constexpr = (LAYOUTS[1], False)
    rows = row_pointers(slots[0], parts[0], numbers, first, source, LATENT, HOW)
    async_copy.global_load_to_shared(slots[0], rows)
    if HOW[2] > 0:
        ROPE: gl.constexpr = (LAYOUTS[2], True)
        rows = row_pointers(slots[1], parts[1], numbers, first, source, ROPE, HOW)
        async_copy.global_load_to_shared(slots[1], rows)
    async_copy.commit_group()


@gluon.jit
def fetch_scales(values, part, numbers, first, source, FIRST: gl.constexpr, SWIZZLE: gl.constexpr,
                 HOW: gl.constexpr):  # fmt: skip
    """Scales of fetched rows, columns FIRST … of them. A lane's 8 columns share one, so there is
    one per group of 8."""
    scale_ptr, strides = part
    ROWS: gl.constexpr = values.shape[0]
    GROUPS: gl.constexpr = values.shape[1] // GROUP
    grouped = gl.reshape(values, [ROWS, GROUPS, GROUP])
    SCALES: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
    place = gl.arange(0, ROWS, gl.SliceLayout(1, SCALES))
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, SCALES)) + opaque_zero()
    if SWIZZLE:
        groups = swizzled_pieces(place, group)
    else:
        groups = group[None, :]
    offset = row_offset(numbers.load(place.type.layout), place + first, source, strides, HOW)
    return gl.load((scale_ptr + offset)[:, None] + (groups * GROUP + FIRST) // HOW[3])


@gluon.jit
def fetch_block(slots, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start loading the rows of a block, as stored, and their scales: to registers."""
    LATENT: gl.constexpr = (LAYOUTS[1], False)
    latent = gl.load(row_pointers(slots[0], parts[0], numbers, first, source, LATENT, HOW))
    rope = latent
    if HOW[2] > 0:
        ROPE: gl.constexpr = (LAYOUTS[2], True)
        rope = gl.load(row_pointers(slots[1], parts[1], numbers, first, source, ROPE, HOW))
    latent_scales = latent
    rope_scales = rope
    if HOW[3] > 0:
        latent_scales = fetch_scales(latent, parts[2], numbers, first, source, 0, False, HOW)
        if HOW[2] > 0 and rope.dtype.primitive_bitwidth == 8:
            rope_scales = fetch_scales(rope, parts[2], numbers, first, source, 512, True, HOW)
    return latent, rope, latent_scales, rope_scales


@gluon.jit
def dequantize_rows(slot, values, scales, SCALED: gl.constexpr):
    """Store fetched rows as bf16(fp32(value) * scale)."""
    if SCALED and values.dtype.primitive_bitwidth == 8:
        GROUPS: gl.constexpr = slot.shape[1] // GROUP
        grouped = gl.reshape(values, [slot.shape[0], GROUPS, GROUP])
        wide = gl.reshape(grouped.to(gl.float32) * scales[:, :, None], slot.shape)
    else:
        wide = values  # FP8 values without scales are 16-bit values, exactly
    slot.store(wide.to(slot.dtype))


@gluon.jit
def dequantize_block(slots, fetched, HOW: gl.constexpr):
    """Both parts of fetched rows to a slot."""
    dequantize_rows(slots[0], fetched[0], fetched[2], HOW[3] > 0)
    if HOW[2] > 0:
        dequantize_rows(slots[1], fetched[1], fetched[3], HOW[3] > 0)


@gluon.jit
def clear_rows(slot, numbers, first, source, HOW: gl.constexpr):
    """Zeros instead of rows that do not count: their weights are 0, but 0 times NaN is not."""
    at = gl.arange(0, 8, gl.SliceLayout(1, ROW_PER_WAVE)) + first
    for i in gl.static_range(slot.shape[0] // 8):
        part = slot.slice(8 * i, 8, 0)
        number = numbers.slice(8 * i, 8, 0).load(at.type.layout)
        ok = counting(number, at + 8 * i, source, HOW)
        part.store(gl.where(ok[:, None], part.load(ROW_PER_WAVE), 0.0))
    thread_barrier()
