"""What a pass walks, as it comes into shared memory: blocks of keys, blocks of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.boxes import load_ragged
from openmla.kernels.gluon.compat import reinterpret, tma_load
from openmla.kernels.gluon.gradients.records import Parts


@gluon.jit
def parts_of_rows(
    NUMBER: gl.constexpr,
    HIGH: gl.constexpr,
    DIMS: gl.constexpr,
    LAYOUTS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """NUMBER Parts of HIGH rows of Q or K in shared memory."""
    nope = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS.nope], LAYOUTS.nope)
    rope = nope
    if DIMS.rope > 0:
        rope = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS.rope], LAYOUTS.rope)
    return Parts(nope, rope)


@gluon.constexpr_function
def _two(box):
    """The shape of two boxes."""
    return [2, *box]


@gluon.jit
def panel_of(tile, desc, NUMBER: gl.constexpr):
    """The columns of a swizzled tile of two panels that are filled by boxes as wide as one."""
    BOXES: gl.constexpr = _two(desc.block_shape)
    LAYOUT: gl.constexpr = desc.layout
    return reinterpret(tile, desc.dtype, BOXES, LAYOUT).index(NUMBER)


@gluon.jit
def load_key_block(
    sources,
    smem,
    barrier,
    stage,
    item,
    row,
    DIMS: gl.constexpr,
    HOW: gl.constexpr,
    MORE: gl.constexpr = 0,
):
    """Load one block of K, zeros past the sequence. item: WorkItem, DIMS: Columns, HOW: How. MORE:
    bytes that the caller loads besides."""
    BN: gl.constexpr = smem.v.shape[1]
    mbarrier.expect(barrier, BN * (DIMS.nope + DIMS.rope) * 2 + MORE)
    nope = smem.k.nope.index(stage)
    load_ragged(sources.k.nope, item.start, item.length, row, item.head, barrier, nope)
    if DIMS.rope > 0:
        rope = smem.k.rope.index(stage)
        head = item.head
        if HOW.rope == "shared":
            head = head * 0
        if DIMS.tail > 0:
            tail = panel_of(rope, sources.k_tail, 0)
            load_ragged(sources.k_tail, item.start, item.length, row, item.head, barrier, tail)
            rope = panel_of(rope, sources.k.rope, 1)
        load_ragged(sources.k.rope, item.start, item.length, row, head, barrier, rope)


@gluon.jit
def load_vector(desc, line, first, barrier, tile):
    """Load a piece of one line of a matrix of fp32 numbers."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    tma_load(desc, [line, first], barrier, reinterpret(tile, desc.dtype, BOX, LAYOUT))


@gluon.jit
def tiles_of_words(NUMBER: gl.constexpr, STEP: gl.constexpr):
    """NUMBER tiles of 64 rows in shared memory, with a bit for each of the STEP rows of a block."""
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    return gl.allocate_shared_memory(gl.int32, [NUMBER, 64, STEP // 32], L)


@gluon.jit
def load_bits(desc, line, column, barrier, tiles, first, NUMBER: gl.constexpr):
    """Load the words of NUMBER tiles of rows that follow one another, from tile `first` on."""
    BOX: gl.constexpr = desc.block_shape[1]
    for w in gl.static_range(NUMBER):
        load_vector(desc, line, column + w * BOX, barrier, tiles.index(first + w))


@gluon.jit
def load_query_block(
    sources, smem, barrier, stage, item, row, DIMS: gl.constexpr, MORE: gl.constexpr = 0
):
    """Load one block of Q, zeros past the sequence, and its statistics. MORE: bytes that the caller
    loads besides."""
    BQ: gl.constexpr = smem.d_out.shape[1]
    mbarrier.expect(barrier, BQ * ((DIMS.nope + DIMS.rope) * 2 + 8) + MORE)
    nope = smem.q.nope.index(stage)
    load_ragged(sources.q.nope, item.start, item.length, row, item.head, barrier, nope)
    if DIMS.rope > 0:
        rope = smem.q.rope.index(stage)
        load_ragged(sources.q.rope, item.start, item.length, row, item.head, barrier, rope)
    place = item.place + row
    load_vector(sources.statistics, item.head, place, barrier, smem.total.index(stage))
    line = sources.heads + item.head
    load_vector(sources.statistics, line, place, barrier, smem.delta.index(stage))
