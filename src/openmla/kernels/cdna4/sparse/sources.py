# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Attention over several sources of latent rows on CDNA4: lists and spans, in one softmax.

A block has BM heads of one token, as in kernel.py, whose parts these are. It walks the rows of the
first source, then those of the second, with one running softmax; the sink enters at its end. Each
source has its own pages, strides and kind of rows: those that have scales are DeepSeek-V4's and
pass through registers, others are copied to LDS as they are.

    first: Span, positions 130 … 257     second: Listed, 512 rows
    blocks 0, 1 of 64 places             blocks 0 … 7

Between the sources the ring starts anew: the last copy of the first one, of rows past its end, has
arrived, and what is in the slots is overwritten.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.records import Places, TokenRows
from openmla.kernels.cdna4.softmax import finish, opaque_zero, row_place, signed_tiles
from openmla.kernels.cdna4.sparse.kernel import (
    COLUMNS,
    STRIP,
    Q_frags,
    add_block,
    load_first_blocks,
    mask_listed,
    scores,
    slot_at,
)
from openmla.kernels.cdna4.sparse.records import (
    CacheParts,
    OnlineSoftmax,
    PagedRows,
    Rings,
    RowFormat,
    RowSource,
    TokenLists,
    TokenSpans,
)
from openmla.kernels.cdna4.sparse.rows import (
    NUMBERS,
    all_count,
    clear_rows,
    copy_block,
    dequantize_block,
    fetch_block,
    numbers_of,
)
from openmla.kernels.gluon.scores import LN_2
from openmla.kernels.gluon.turning import COUNTS as ANGLE_COUNTS
from openmla.kernels.gluon.turning import VECTORS as ANGLE_VECTORS
from openmla.kernels.gluon.turning import Angles, turned_last


@gluon.jit
def listed_rows(token, lists, rows):
    """The RowSource of a token's list, of TokenLists."""
    count = lists.topk
    if lists.lengths_ptr is not None:
        count = gl.minimum(gl.load(lists.lengths_ptr + token), lists.topk)
    line = lists.ptr + token.to(gl.int64) * lists.stride
    return RowSource(ptr=line, places=gl.maximum(count, 0), rows=rows)


@gluon.jit
def spanned_rows(token, spans, rows):
    """The RowSource of a token's span, of TokenSpans."""
    request = gl.load(spans.request_ptr + token)
    begin = gl.maximum(gl.load(spans.begin_ptr + token), 0)
    stop = gl.minimum(gl.load(spans.end_ptr + token), spans.most_keys)
    there = (request >= 0) & (request < spans.requests) & (begin < stop)
    line = spans.ptr + gl.where(there, request, 0).to(gl.int64) * spans.stride
    return RowSource(
        ptr=line,
        places=gl.where(there, stop - begin, 0),
        rows=rows,
        origin=gl.where(there, begin, 0),
    )


@gluon.jit
def walk(
    state,
    source,
    parts,
    rings,
    number_ring,
    q_frags,
    factor,
    SIGN: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUTS: gl.constexpr,
    HOW: gl.constexpr,
):
    """The OnlineSoftmax `state`, and the rows of a RowSource after those that it has seen."""
    KV: gl.constexpr = BLOCK.keys
    SLOTS: gl.constexpr = BLOCK.slots
    TILES: gl.constexpr = KV // STRIP
    MMA: gl.constexpr = LAYOUTS.matrices
    WIDENED: gl.constexpr = HOW.scale_block > 0
    visits = (source.places + KV - 1) // KV
    load_first_blocks(rings, number_ring, parts, source, 0, WIDENED, LAYOUTS, HOW)
    for j in range(0, visits):
        coming = numbers_of(source, (j + 2) * KV, KV, HOW)
        later = slot_at(rings, (j + 1) % SLOTS)
        numbers = number_ring.index((j + 1) % 2)
        if WIDENED:
            fetched = fetch_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
        else:
            copy_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
            async_copy.wait_group(1)
        slot = slot_at(rings, j % SLOTS)
        numbers = number_ring.index(j % 2)
        if not all_count(numbers, j * KV, source, KV, HOW):
            clear_rows(slot.latent, numbers, j * KV, source, HOW)
        tiles = scores(q_frags, slot, BLOCK, LAYOUTS)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        tiles = mask_listed(tiles, numbers, j * KV, source, TILES, MMA, HOW)
        state = add_block(state, tiles, slot.latent, factor, TILES, MMA)
        if WIDENED:
            dequantize_block(later, fetched, HOW)
        numbers.store(coming)
    if not WIDENED:
        async_copy.wait_group(0)
    return state


@gluon.constexpr_function
def row_format(is_span, has_scales, page_size):
    """The RowFormat of a source."""
    return RowFormat(
        is_paged=False,
        page_size=page_size,
        rope=0,
        scale_block=64 if has_scales else 0,
        has_tail=has_scales,
        is_span=is_span,
    )


COUNTS = [f"{source}{name}" for source in ("", "second_") for name in ("rows", "topk", "requests")]
COUNTS += ["heads", "blocks", "factor", *ANGLE_COUNTS]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "logits_ptr", "sink_ptr", *ANGLE_VECTORS]
ACROSS = gl.constexpr(128)  # columns that neighboring waves hold; further ones are registers
VECTORS += [
    f"{source}{name}_ptr"
    for source in ("", "second_")
    for name in ("scale", "indices", "lengths", "request", "begin")
]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def attend_kernel(  # noqa: PLR0913
    q_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    indices_ptr,
    lengths_ptr,
    request_ptr,
    begin_ptr,
    second_latent_ptr,
    second_rope_ptr,
    second_scale_ptr,
    second_indices_ptr,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    sink_ptr,
    factor,
    heads,
    blocks,
    rows,
    topk,
    requests,
    second_rows,
    second_topk,
    second_requests,
    q_stride_t,
    q_stride_h,
    indices_stride,
    latent_stride_page,
    latent_stride_t,
    rope_stride_page,
    rope_stride_t,
    scale_stride_page,
    scale_stride_t,
    second_indices_stride,
    second_latent_stride_page,
    second_latent_stride_t,
    second_rope_stride_page,
    second_rope_stride_t,
    second_scale_stride_page,
    second_scale_stride_t,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    angles_ptr,
    positions_ptr,
    angle_lines,
    angles_stride,
    BLOCK: gl.constexpr,
    DTYPE: gl.constexpr,
    PAGE: gl.constexpr,
    SECOND_PAGE: gl.constexpr,
    SIGN: gl.constexpr,
    LAYOUTS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """BM heads of one token over one source of rows or two. A source with a `request` is a span:
    `indices` are a block table of `requests` lines with `topk` positions each, `lengths` the
    ends; else they are lists of `topk` entries. `rope` are the tails of rows that have scales.
    TURNED: columns of the results that are turned back by `Angles`, 0 for none. The others are
    arguments of `sparse_kernel`."""
    BM: gl.constexpr = BLOCK.queries
    KV: gl.constexpr = BLOCK.keys
    D_V: gl.constexpr = BLOCK.latent
    MMA: gl.constexpr = LAYOUTS.matrices
    token = gl.program_id(0) // blocks
    head = gl.program_id(0) % blocks * BM
    ring = gl.allocate_shared_memory(DTYPE, [BLOCK.slots, KV, D_V], LAYOUTS.latent.write)
    rings = Rings(latent=ring, rope=None)
    number_ring = gl.allocate_shared_memory(gl.int32, [2, KV], NUMBERS)
    places = Places(first=token * heads + head, per_token=heads)
    q = TokenRows(q_ptr, q_stride_t, q_stride_h)
    q_frags = Q_frags(q, places, heads - head, DTYPE, BM, D_V // COLUMNS, MMA)
    SL: gl.constexpr = gl.SliceLayout(1, MMA.scores)
    state = OnlineSoftmax(
        output=gl.zeros([BM, D_V], gl.float32, MMA.output),
        shift=gl.full([BM], float("-inf"), gl.float32, SL),
        row_sum=gl.zeros([BM], gl.float32, SL),
    )
    parts = CacheParts(
        latent=PagedRows(latent_ptr, latent_stride_page, latent_stride_t),
        rope=PagedRows(rope_ptr, rope_stride_page, rope_stride_t),
        scales=PagedRows(scale_ptr, scale_stride_page, scale_stride_t),
    )
    if request_ptr is not None:
        spans = TokenSpans(
            indices_ptr, indices_stride, request_ptr, begin_ptr, lengths_ptr, requests, topk
        )
        source = spanned_rows(token, spans, rows)
    else:
        lists = TokenLists(indices_ptr, indices_stride, lengths_ptr, topk, blocks)
        source = listed_rows(token, lists, rows)
    HOW: gl.constexpr = row_format(request_ptr is not None, scale_ptr is not None, PAGE)
    state = walk(
        state, source, parts, rings, number_ring, q_frags, factor, SIGN, BLOCK, LAYOUTS, HOW
    )
    if second_latent_ptr is not None:
        parts = CacheParts(
            latent=PagedRows(second_latent_ptr, second_latent_stride_page, second_latent_stride_t),
            rope=PagedRows(second_rope_ptr, second_rope_stride_page, second_rope_stride_t),
            scales=PagedRows(second_scale_ptr, second_scale_stride_page, second_scale_stride_t),
        )
        if second_request_ptr is not None:
            spans = TokenSpans(
                second_indices_ptr,
                second_indices_stride,
                second_request_ptr,
                second_begin_ptr,
                second_lengths_ptr,
                second_requests,
                second_topk,
            )
            source = spanned_rows(token, spans, second_rows)
        else:
            lists = TokenLists(
                second_indices_ptr, second_indices_stride, second_lengths_ptr, second_topk, blocks
            )
            source = listed_rows(token, lists, second_rows)
        SECOND: gl.constexpr = row_format(
            second_request_ptr is not None, second_scale_ptr is not None, SECOND_PAGE
        )
        state = walk(
            state, source, parts, rings, number_ring, q_frags, factor, SIGN, BLOCK, LAYOUTS, SECOND
        )

    # Computed again, so that nothing of it is kept in registers during the loops.
    first = head + opaque_zero()
    places = Places(first=token * heads + first, per_token=heads)
    here = heads - first
    row = gl.arange(0, BM, state.shift.type.layout)
    out = TokenRows(out_ptr, out_stride_t, out_stride_h)
    lse = TokenRows(lse_ptr, lse_stride_t, lse_stride_h)
    O, shift, row_sum = state
    if TURNED > 0:
        angles = Angles(angles_ptr, positions_ptr, angle_lines, angles_stride)
        O = turned_last(O, angles, token, 0, ACROSS, D_V, TURNED)
    finish(
        (O,), shift, row_sum, out, lse, sink_ptr, (first + row) % heads, here, places, D_V, 1, MMA
    )
    if logits_ptr is not None:
        logits = TokenRows(logits_ptr, logits_stride_t, logits_stride_h)
        at = logits.ptr + row_place(row, places, logits)
        gl.store(at, shift * LN_2, mask=row < here)
