"""Weights of few queries: a program takes 64 heads of one query and one block of 64 keys.

The second of three launches. The latent kernel moves a row's reference from block to block
(latent/softmax.py); the largest scores of the blocks before tell where it is at any of them, so
that all blocks are weighted at once.

The kernel writes, for every [query, block, head]: the 64 weights of a row; the reference they are
relative to; what O must be multiplied by when it moves there; and four partial sums of the weights,
as the latent kernel keeps them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.barriers import let_next_begin, wait_for_kernel_before
from openmla.kernels.gluon.ranges.records import Output
from openmla.kernels.gluon.scores import LN_2, MINUS_INF
from openmla.kernels.hopper.few.rows import (
    KEYS,
    MORE_COUNTS,
    MORE_LENGTHS,
    places_of_query,
    steps_of,
    write_stat,
)
from openmla.kernels.hopper.latent.records import Source
from openmla.kernels.hopper.latent.softmax import THRESHOLD, follow, weigh

TOGETHER = gl.constexpr(32)  # blocks whose largest scores are loaded at a time


@gluon.jit
def moved(scaled, row_max):
    """The reference after a block: it moves only to a score that exceeds it by much."""
    return gl.where(scaled > row_max + THRESHOLD, scaled, row_max)


@gluon.jit
def largest(maxima_ptr, row, block, HEADS: gl.constexpr, PARTS: gl.constexpr):
    """The largest scores of all parts of a block; `row`: where block 0 has them."""
    at = maxima_ptr + row + block * (PARTS * HEADS)
    found = gl.load(at)
    for i in gl.static_range(1, PARTS):
        found = gl.maximum(found, gl.load(at + i * HEADS))
    return found


@gluon.jit
def walk(maxima_ptr, start, block, factor, HEADS: gl.constexpr, PARTS: gl.constexpr):
    """(the reference before a block, at it, the largest score up to it), a thread for a row;
    `start`: where block 0 has its largest scores."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, 64, L) + start
    own = largest(maxima_ptr, row, block, HEADS, PARTS)
    highest = own
    row_max = gl.full([64], MINUS_INF, gl.float32, L)
    for first in range(0, block, TOGETHER):
        maxima = ()
        for i in gl.static_range(TOGETHER):
            before = gl.minimum(first + i, block - 1)  # what is seen again moves nothing
            maxima += (largest(maxima_ptr, row, before, HEADS, PARTS),)
            highest = gl.maximum(highest, maxima[i])
        # Needs all of them: else ptxas loads one, takes the step, loads the next.
        some = highest * factor > row_max + THRESHOLD
        for i in gl.static_range(TOGETHER):
            row_max = gl.where(some, moved(maxima[i] * factor, row_max), row_max)
    return row_max, moved(own * factor, row_max), highest


@gluon.jit
def store_weights(P, weights_ptr, first):
    """Weights of 64 rows, 16 bytes a thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, L)) + first
    column = gl.arange(0, KEYS, gl.SliceLayout(0, L))
    P = gl.convert_layout(P.to(weights_ptr.dtype.element_ty), L)
    gl.store(weights_ptr + (row * KEYS)[:, None] + column[None, :], P)


@gluon.jit
def store_sums(quads, quads_ptr, first):
    """Partial sums of 64 rows."""
    row = gl.arange(0, 64, gl.SliceLayout(1, quads.type.layout)) + first
    quad = gl.arange(0, 4, gl.SliceLayout(0, quads.type.layout))
    gl.store(quads_ptr + (row * 4)[:, None] + quad[None, :], quads)


COUNTS = ["topk", "steps", "heads", "factor", "logits_stride_t", "logits_stride_h", *MORE_COUNTS]
VECTORS = ["lengths_ptr", "logits_ptr", *MORE_LENGTHS]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def weights_kernel(  # noqa: PLR0913
    scores_ptr,
    maxima_ptr,
    weights_ptr,
    references_ptr,
    factors_ptr,
    quads_ptr,
    lengths_ptr,
    logits_ptr,
    factor,
    topk,
    steps,
    heads,
    logits_stride_t,
    logits_stride_h,
    request_ptr,
    begin_ptr,
    requests,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_topk,
    second_requests,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Heads from 64 * (`program % (HEADS / 64)`) on, of block `program // (HEADS / 64)` of all
    queries. SPAN: keys of a program of scores_kernel."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    TILES: gl.constexpr = HEADS // 64
    PARTS: gl.constexpr = KEYS // SPAN
    if OVERLAP:
        let_next_begin()
    first_head = gl.program_id(0) % TILES * 64
    block = gl.program_id(0) // TILES % (2 * steps)
    query = gl.program_id(0) // (TILES * 2 * steps)
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
    last = 2 * steps_of(places_of_query(source, query)) - 1
    if block <= last:
        if OVERLAP:
            wait_for_kernel_before()
        head = gl.arange(0, 64, gl.SliceLayout(1, SL))
        start = query * (2 * steps) * HEADS + first_head
        row = start + block * HEADS + head
        column = gl.arange(0, KEYS, gl.SliceLayout(0, SL))
        S = gl.load(scores_ptr + (row * KEYS)[:, None] + column[None, :])
        first = query * (2 * PARTS * steps) * HEADS + first_head
        before, row_max, highest = walk(maxima_ptr, first, block, factor, HEADS, PARTS)
        before = gl.convert_layout(before, gl.SliceLayout(1, SL))
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, SL))
        P, quads = weigh(S, row_max, 0.0, factor)
        store_weights(P, weights_ptr, start + block * HEADS)
        gl.store(references_ptr + row, row_max)
        gl.store(factors_ptr + row, follow(before, row_max))
        store_sums(quads, quads_ptr, start + block * HEADS)
        if logits_ptr is not None and block == last:
            logits = Output(
                base=logits_ptr, token_stride=logits_stride_t, head_stride=logits_stride_h
            )
            write_stat(highest * factor * LN_2, logits, query, first_head, heads)
