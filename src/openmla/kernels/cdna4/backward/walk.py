"""What both passes do with a step of the side that they walk: copies, scores, sums of products.

A wave has 32 rows of its own and meets the other side 32 rows at a time. A tile in LDS lies in
sub-blocks of 32 rows x 32 columns, swizzled as K of the forward pass is, and is read in two ways:

| product | right operand | read |
|---|---|---|
| scores, dP: [own, columns] x [columns, walked] | `across`: columns along it | ds_read_b128 |
| gradients: [own, walked] x [walked, columns] | `along`: rows along it | ds_read_b64_tr_b16 |

Scores are [own, walked] with a lane for each own row, and their 16-bit weights are the left operand
of the second kind of product without an exchange between lanes (mma_op.py).

A wave is alone on its SIMD, so nobody else multiplies while it waits for LDS: operands of a product
are read before the product before it. `needed` keeps the compiler from reading them later; where it
does so anyway, or would move sums to and fro between the two halves of the registers, they go
without. So a read is 5 to 8 MFMAs ahead of its wait on average, where it was a third of one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.backward.records import Columns
from openmla.kernels.cdna4.copies import copy_rows
from openmla.kernels.cdna4.mma_op import EDGE, load_K_frag, product
from openmla.kernels.gluon.compat import reinterpret

PIECE = gl.constexpr(8)  # elements in 16 bytes


@gluon.jit
def fragments(ptr, row_stride, rows, COUNT: gl.constexpr, BM: gl.constexpr, MMA: gl.constexpr):
    """COUNT x 32 columns of BM own rows, from memory to registers as left operands; rows past the
    end are zeros. ptr: at the first row."""
    row = gl.arange(0, BM, gl.SliceLayout(1, MMA.q))
    column = gl.arange(0, EDGE, gl.SliceLayout(0, MMA.q))
    pointers = (ptr + row.to(gl.int64) * (row_stride * PIECE))[:, None] + column[None, :]
    found = ()
    for c in gl.static_range(COUNT):
        frag = gl.load(pointers + c * EDGE, mask=(row < rows)[:, None], other=0.0)
        found = found + (frag,)  # noqa: RUF005
    return found


@gluon.jit
def copy_columns(ring, slot, rows, first, limit, LAYOUT: gl.constexpr):
    """Start copying rows first, first + 1, … (HeadRows) to a slot."""
    at = rows.ptr + first.to(gl.int64) * (rows.row_stride * PIECE)
    copy_rows(ring.index(slot), at, rows.row_stride, first, limit, LAYOUT.copy, True)


@gluon.jit
def copy_step(rings, slot, walked, first, BLOCK: gl.constexpr, TILES: gl.constexpr):
    """Start copying a step from row `first` on, as one group. rings, TILES: Columns, walked:
    Walked."""
    columns = walked.columns
    copy_columns(rings.nope, slot, columns.nope, first, walked.limit, TILES.nope)
    if BLOCK.d_rope > 0:
        copy_columns(rings.rope, slot, columns.rope, first, walked.limit, TILES.rope)
    copy_columns(rings.v, slot, columns.v, first, walked.limit, TILES.v)
    async_copy.commit_group()


@gluon.jit
def rings_of(DTYPE: gl.constexpr, BLOCK: gl.constexpr, TILES: gl.constexpr):
    """Columns of rings of tiles."""
    STEP: gl.constexpr = BLOCK.step_rows
    nope = gl.allocate_shared_memory(DTYPE, [BLOCK.slots, STEP, BLOCK.d_nope], TILES.nope.write)
    rope = nope
    if BLOCK.d_rope > 0:
        rope = gl.allocate_shared_memory(DTYPE, [BLOCK.slots, STEP, BLOCK.d_rope], TILES.rope.write)
    values = gl.allocate_shared_memory(DTYPE, [BLOCK.slots, STEP, BLOCK.d_v], TILES.v.write)
    return Columns(nope=nope, rope=rope, v=values)


@gluon.jit
def slots_of(rings, slot):
    """A slot of each ring."""
    return Columns(nope=rings.nope.index(slot), rope=rings.rope.index(slot), v=rings.v.index(slot))


@gluon.jit
def across(slot, PART: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr):
    """Rows 32 x PART … of a slot as right operands of scores: one for each 32 columns."""
    COUNT: gl.constexpr = slot.shape[1] // EDGE
    SUBS: gl.constexpr = slot.shape[0] // EDGE * COUNT
    subs = reinterpret(slot, slot.dtype, [SUBS, EDGE, EDGE], LAYOUT.read)
    found = ()
    for c in gl.static_range(COUNT):
        found = found + (load_K_frag(subs, PART * COUNT + c, MMA),)  # noqa: RUF005
    return found


@gluon.jit
def along(slot, PART: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr):
    """Rows 32 x PART … of a slot as right operands of gradients: one for each 32 columns."""
    COUNT: gl.constexpr = slot.shape[1] // EDGE
    SUBS: gl.constexpr = slot.shape[0] // EDGE * COUNT
    subs = reinterpret(slot, slot.dtype, [SUBS, EDGE, EDGE], LAYOUT.read)
    found = ()
    for c in gl.static_range(COUNT):
        found = found + (subs.index(PART * COUNT + c).load(MMA.v),)  # noqa: RUF005
    return found


@gluon.jit
def columns_across(slots, PART: gl.constexpr, BLOCK: gl.constexpr, LAYOUTS: gl.constexpr):
    """Rows 32 x PART … of Q or K, rope behind the others, as right operands of scores."""
    frags = across(slots.nope, PART, LAYOUTS.tiles.nope, LAYOUTS.matrices)
    if BLOCK.d_rope > 0:
        frags = frags + across(slots.rope, PART, LAYOUTS.tiles.rope, LAYOUTS.matrices)
    return frags


@gluon.jit
def columns_along(slots, PART: gl.constexpr, BLOCK: gl.constexpr, LAYOUTS: gl.constexpr):
    """Rows 32 x PART … of Q or K, rope behind the others, as right operands of gradients."""
    frags = along(slots.nope, PART, LAYOUTS.tiles.nope, LAYOUTS.matrices)
    if BLOCK.d_rope > 0:
        frags = frags + along(slots.rope, PART, LAYOUTS.tiles.rope, LAYOUTS.matrices)
    return frags


@gluon.jit
def needed(frags):
    """The fragments themselves, used here for the compiler: it moves no read of LDS across."""
    found = ()
    for c in gl.static_range(len(frags)):
        frag = gl.inline_asm_elementwise(
            "; $0 is needed here",
            "=v,0",
            [frags[c]],
            dtype=frags[c].dtype,
            is_pure=False,
            pack=2,
        )
        found = found + (frag,)  # noqa: RUF005
    return found


@gluon.jit
def scores_of(own, frags, BM: gl.constexpr, MMA: gl.constexpr):
    """Own rows times rows of the other side, [BM, 32]; both sides by 32 columns."""
    S = gl.zeros([BM, EDGE], gl.float32, MMA.scores)
    for c in gl.static_range(len(frags)):
        S = product(own[c], frags[c], S)
    return S


@gluon.jit
def left_operand(weights, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """Weights or gradients of scores [own rows, 32], rounded."""
    return gl.convert_layout(weights.to(DTYPE), MMA.p)


@gluon.jit
def no_sums(COLUMNS: gl.constexpr, BM: gl.constexpr, MMA: gl.constexpr):
    """Accumulators of BM rows: a tile for each 32 columns."""
    sums = ()
    for _c in gl.static_range(COLUMNS // EDGE):
        sums = sums + (gl.zeros([BM, EDGE], gl.float32, MMA.output),)  # noqa: RUF005
    return sums


@gluon.jit
def add_products(sums, left, frags):
    """Accumulators plus `left` [own rows, 32] times rows of the other side."""
    added = ()
    for c in gl.static_range(len(frags)):
        added = added + (product(left, frags[c], sums[c]),)  # noqa: RUF005
    return added


@gluon.jit
def store_columns(
    sums, FIRST: gl.constexpr, COLUMNS: gl.constexpr, scale, kept, ptr, row_stride, rows
):
    """Scale, round to the gradient's type and store COLUMNS columns of own rows that exist, from
    tile FIRST of the sums on; rows that are not `kept` ([rows, 1], or None: all are) become +0,
    whatever was summed. ptr: at the first row; the stride counts elements."""
    OL: gl.constexpr = sums[0].type.layout
    row = gl.arange(0, sums[0].shape[0], gl.SliceLayout(1, OL))
    column = gl.arange(0, EDGE, gl.SliceLayout(0, OL))
    pointers = (ptr + row.to(gl.int64) * row_stride)[:, None] + column[None, :]
    for c in gl.static_range(COLUMNS // EDGE):
        # A sum of zeros times a negative scale is -0; + 0 makes it +0.
        scaled = sums[FIRST + c] * scale + 0.0
        if kept is not None:
            scaled = gl.where(kept, scaled, 0.0)
        rounded = scaled.to(ptr.dtype.element_ty)
        gl.store(pointers + c * EDGE, rounded, mask=(row < rows)[:, None])
