# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Values of few queries: a program takes 64 heads of one query and WIDTH columns of V.

This is the last of three launches. A program walks all keys of the list, in steps of two blocks of
64, and does for its columns what the latent kernel does for all of them, in the same order: O is
rescaled before each product, sums of weights are kept by block of a step. So the bits are the same,
whatever the number of programs.

| partition | warps | does, step by step |
|---|---|---|
| multiply (default) | 4 | O times a factor, + P0 · V0, times a factor, + P1 · V1 |
| copy | 1 | starts copies of P, V and factors |
| add_up | 4 | sums of weights; in the end lse and what O is divided by |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| step_ready | RING | the bytes of P and V (1), threads that copy factors (32) | multiply |
| step_empty | RING | multiply: a step is read (1) | copy |
| done | 1 | add_up (1) | multiply |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers, wait_for_kernel_before
from openmla.kernels.gluon.compat import cp_async, tma_load
from openmla.kernels.gluon.ranges.records import Output
from openmla.kernels.gluon.scores import normalize
from openmla.kernels.gluon.turning import COUNTS as ANGLE_COUNTS
from openmla.kernels.gluon.turning import VECTORS as ANGLE_VECTORS
from openmla.kernels.gluon.turning import Angles, turned_columns
from openmla.kernels.hopper.few.records import (
    Barriers,
    Ring,
    StepDescriptors,
    StepSums,
    Tile,
    WeightSums,
)
from openmla.kernels.hopper.few.rows import (
    KEYS,
    MORE_COUNTS,
    MORE_LENGTHS,
    STEP,
    VECTOR,
    places_of_query,
    steps_of,
    write_stat,
)
from openmla.kernels.hopper.latent.records import Source

SUM_WARPS = gl.constexpr(4)
SUMMED = gl.constexpr(4)  # steps whose sums are loaded at a time


@gluon.jit
def slot_of(j, RING: gl.constexpr):
    """(slot of step j, parity of its barriers)."""
    return j % RING, (j // RING) & 1


@gluon.jit
def copy(tile, descs, factors_ptr, ring, bars, HEADS: gl.constexpr, OVERLAP: gl.constexpr):
    """Copy P, V and factors of every step of a `Tile` into the `Ring`, by one warp."""
    ready, empty = bars.step_ready, bars.step_empty
    BYTES: gl.constexpr = descs.weights.block_type.nbytes + descs.v.block_type.nbytes
    both = gl.arange(0, STEP, gl.BlockedLayout([4], [32], [1], [0]))
    row = both // 64 * HEADS + both % 64 + tile.first_head
    if OVERLAP:
        wait_for_kernel_before()
    for j in range(0, tile.steps):
        slot, phase = slot_of(j, ring.factors.shape[0])
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(ready.index(slot), 2 * BYTES)
        for i in gl.static_range(2):
            here = tile.first_block + 2 * j + i
            at = [here * HEADS + tile.first_head, 0]
            tma_load(descs.weights, at, ready.index(slot), ring.p.index(2 * slot + i))
            at = [here * KEYS, tile.chunk * descs.v.block_shape[1]]
            tma_load(descs.v, at, ready.index(slot), ring.v.index(2 * slot + i))
        block0 = tile.first_block + 2 * j
        cp_async(ring.factors.index(slot), factors_ptr + (block0 * HEADS + row))
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def write_columns(
    O, factors, out, angles, query, first, heads, chunk, D_V: gl.constexpr, TURNED: gl.constexpr
):
    """Normalize, turn back by `Angles`, round and store to an `Output`; zeros where a factor is
    0."""
    OL: gl.constexpr = O.type.layout
    if TURNED > 0:
        result = O * factors
        at = chunk * O.shape[1]
        if at + O.shape[1] > D_V - TURNED:
            result = turned_columns(result, angles, query, at, D_V, TURNED)
        result = gl.where(factors == 0.0, 0.0, result).to(out.base.dtype.element_ty)
    else:
        result = gl.where(factors == 0.0, 0.0, O * factors).to(out.base.dtype.element_ty)
    head = gl.arange(0, 64, gl.SliceLayout(1, OL)) + first
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, OL)) + chunk * O.shape[1]
    start = out.base + query.to(gl.int64) * (out.token_stride.to(gl.int64) * VECTOR)
    start = start + head * (out.head_stride.to(gl.int64) * VECTOR)
    gl.store(start[:, None] + column[None, :], result, mask=(head < heads)[:, None])


@gluon.jit
def load_sums(written, first, stop, L: gl.constexpr, HEADS: gl.constexpr):
    """`StepSums` of the step whose rows in `WeightSums` begin at `first`; 1 and 0 from row `stop`
    on."""
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L))) + first
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, L))) * HEADS
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    rows = row[:, None, None] + half[None, :, None]
    quads = gl.load(written.quads + (rows * 4 + quad[None, None, :]), mask=rows < stop, other=0.0)
    factor0 = gl.load(written.factors + row, mask=row < stop, other=1.0)
    factor1 = gl.load(written.factors + HEADS + row, mask=row < stop, other=1.0)
    return StepSums(factor0=factor0, factor1=factor1, quads=quads)


@gluon.jit
def add_step(loaded, row_sum):
    """Partial sums with the `StepSums` of one step more."""
    rescale0, rescale1, quads = loaded
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, quads.type.layout))
    half = gl.arange(0, 2, L)[None, :, None]
    # The sums of block 0 are multiplied before each block, those of block 1 once, before it.
    before = gl.where(half == 0, rescale0[:, None, None], (rescale0 * rescale1)[:, None, None])
    row_sum = row_sum * before + quads
    return row_sum * gl.where(half == 0, rescale1[:, None, None], 1.0)


@gluon.jit
def add_up(
    tile,
    written,
    inverses,
    done,
    lse,
    sink_ptr,
    query,
    heads,
    HEADS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Add up the weights of all steps (`WeightSums`): 1 / sums for `multiply`, and lse for an
    `Output`."""
    at = tile.first_block * HEADS + tile.first_head
    L: gl.constexpr = gl.BlockedLayout([1, 2, 1], [8, 1, 4], [SUM_WARPS, 1, 1], [2, 1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    if OVERLAP:
        wait_for_kernel_before()
    stop = at - tile.first_head + tile.steps * (2 * HEADS)
    last = written.references + stop - HEADS + tile.first_head
    row_max = gl.load(last + gl.arange(0, 64, RL))
    row_sum = gl.zeros([64, 2, 4], gl.float32, L)
    for j in range(0, tile.steps, SUMMED):
        loaded = ()
        for i in gl.static_range(SUMMED):
            loaded += (load_sums(written, at + (j + i) * (2 * HEADS), stop, L, HEADS),)
        for i in gl.static_range(SUMMED):
            row_sum = add_step(loaded[i], row_sum)
    every = gl.convert_layout(gl.sum(gl.sum(row_sum, 2), 1), RL)
    head = gl.arange(0, 64, RL) + tile.first_head
    inverse, sums, empty = normalize(row_max, every, sink_ptr, gl.minimum(head, heads - 1))
    inverses.store(gl.where(empty, 0.0, inverse))
    mbarrier.arrive(done, count=1)
    if lse.base is not None and tile.chunk == 0:
        write_stat(sums, lse, query, tile.first_head, heads)


@gluon.jit
def factors_of(j, ready, factors, LAYOUT: gl.constexpr):
    """Wait for step j; returns the factors of both of its blocks."""
    slot, phase = slot_of(j, factors.shape[0])
    mbarrier.wait(ready.index(slot), phase)
    both = factors.index(slot)
    return both.slice(0, 64).load(LAYOUT), both.slice(64, 64).load(LAYOUT)


@gluon.jit
def multiply(
    tile,
    ring,
    inverses,
    bars,
    out,
    angles,
    query,
    heads,
    D_V: gl.constexpr,
    TURNED: gl.constexpr,
):
    """O over every step of a `Tile`, normalized and stored to an `Output` in the end."""
    steps = tile.steps
    p_smem, v_smem, factors = ring
    ready, empty = bars.step_ready, bars.step_empty
    WIDTH: gl.constexpr = v_smem.shape[2]
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    RL: gl.constexpr = gl.SliceLayout(1, OL)
    O = gl.zeros([64, WIDTH], gl.float32, OL)
    rescale0, rescale1 = factors_of(steps * 0, ready, factors, RL)
    for j in range(0, steps):
        slot = j % factors.shape[0] * 2
        O = O * rescale0[:, None]
        O = warpgroup_mma(p_smem.index(slot), v_smem.index(slot), O, is_async=True)
        O = warpgroup_mma_wait(0, deps=(O,))
        O = O * rescale1[:, None]
        O = warpgroup_mma(p_smem.index(slot + 1), v_smem.index(slot + 1), O, is_async=True)
        rescale0, rescale1 = factors_of(gl.minimum(j + 1, steps - 1), ready, factors, RL)
        O = warpgroup_mma_wait(0, deps=(O,))
        mbarrier.arrive(empty.index(slot // 2), count=1)
    mbarrier.wait(bars.done, 0)
    inverse = inverses.load(RL)[:, None]
    write_columns(O, inverse, out, angles, query, tile.first_head, heads, tile.chunk, D_V, TURNED)


COUNTS = ["topk", "steps", "heads", *MORE_COUNTS]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", *ANGLE_COUNTS]
VECTORS = ["lengths_ptr", "lse_ptr", "sink_ptr", *ANGLE_VECTORS, *MORE_LENGTHS]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def values_kernel(  # noqa: PLR0913
    weights_desc,
    v_desc,
    references_ptr,
    factors_ptr,
    quads_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    topk,
    steps,
    heads,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    request_ptr,
    begin_ptr,
    requests,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_topk,
    second_requests,
    angles_ptr,
    positions_ptr,
    angle_lines,
    angles_stride,
    HEADS: gl.constexpr,
    D_V: gl.constexpr,
    RING: gl.constexpr,
    OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """Columns `program % (D_V / WIDTH)` of tile `program // (D_V / WIDTH)`, HEADS / 64 of them for
    each query; v_desc has boxes of WIDTH columns. RING: steps in shared memory. REGISTERS:
    `Registers`. TURNED: columns that are turned back by `Angles`, 0 for none."""
    DTYPE: gl.constexpr = v_desc.dtype
    WIDTH: gl.constexpr = v_desc.block_shape[1]
    CHUNKS: gl.constexpr = D_V // WIDTH
    TILES: gl.constexpr = HEADS // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    p_smem = gl.allocate_shared_memory(DTYPE, [2 * RING, 64, KEYS], weights_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2 * RING, KEYS, WIDTH], v_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [RING, STEP], FLAT)
    inverses = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ring = Ring(p=p_smem, v=v_smem, factors=factors)
    bars = Barriers(
        step_ready=barriers(RING, 1 + 32),
        step_empty=barriers(RING, 1),
        done=barriers(1, 1).index(0),
    )
    chunk = gl.program_id(0) % CHUNKS
    first_head = gl.program_id(0) // CHUNKS % TILES * 64
    query = gl.program_id(0) // (CHUNKS * TILES)
    second = None
    if second_topk is not None:
        second = Source(
            lengths=second_lengths_ptr,
            most_keys=second_topk,
            begin=second_begin_ptr,
            request=second_request_ptr,
            requests=second_requests,
        )
    source = Source(
        lengths=lengths_ptr,
        most_keys=topk,
        begin=begin_ptr,
        request=request_ptr,
        requests=requests,
        second_keys=second_topk,
        second=second,
    )
    own = steps_of(places_of_query(source, query))
    tile = Tile(steps=own, first_block=query * (2 * steps), first_head=first_head, chunk=chunk)
    descs = StepDescriptors(weights=weights_desc, v=v_desc)
    written = WeightSums(references=references_ptr, factors=factors_ptr, quads=quads_ptr)
    out = Output(base=out_ptr, token_stride=out_stride_t, head_stride=out_stride_h)
    lse = Output(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h)
    angles = Angles(
        table=angles_ptr, positions=positions_ptr, lines=angle_lines, stride=angles_stride
    )
    gl.warp_specialize(
        [
            (multiply, (tile, ring, inverses, bars, out, angles, query, heads, D_V, TURNED)),
            (copy, (tile, descs, factors_ptr, ring, bars, HEADS, OVERLAP)),
            (
                add_up,
                (tile, written, inverses, bars.done, lse, sink_ptr, query, heads, HEADS, OVERLAP),
            ),
        ],
        [1, SUM_WARPS],
        [REGISTERS.copy, REGISTERS.add_up],
    )
