"""Top-k of rows of scores: one pass over memory, and a cut in registers.

One block per row at a time. A row of at most LIST scores is loaded whole and cut (cut.py). A longer
one:

1. sample: LIST scores spread over the row; their cut at a rank safely above topk gives a pivot. It
   decides how much work is done, never the result.
2. walk: the row passes once, in chunks, through a ring in shared memory. Positions and scores above
   the pivot go to a list, in order, by prefix sums (tile.py). When a chunk would not fit, the list
   is cut to its topk best, and the topk-th becomes the pivot: later scores must be greater, for
   equal ones the earlier position wins.
3. cut: the list is cut to topk, and written.

Chunks are copied by cp.async, or by CDNA4's loads to LDS: `CFG.loads_to_lds`.

Loads of 16 bytes begin at a multiple of four columns, so the first may hold up to three scores too
many. If fewer than topk scores passed the pivot (a misleading sample), the row is walked again and
everything passes. No atomics decide where a position goes, so the result has one value, and it is
the same on every rank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy as lds_copy
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openmla.kernels.gluon.compat import cp_async, thread_barrier
from openmla.kernels.gluon.pages import Pages, divided
from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.gluon.select.cut import (
    HIGHEST,
    MINUS_INF_KEY,
    NAN_KEY,
    NOTHING,
    choose,
    key_of,
    kth,
    score_of,
)
from openmla.kernels.gluon.select.records import Lists, RowOutput, Writing
from openmla.kernels.gluon.select.tile import (
    VECTOR,
    least,
    places,
    tile_layout,
    tile_scores,
    tile_vectors,
    vectors,
)


@gluon.jit
def load_tile(row_ptr, first, end, CFG: gl.constexpr, R: gl.constexpr):
    """Load scores of a row from a multiple of four on; vectors past the end are -inf."""
    number, v = vectors(CFG, R)
    at = number * VECTOR + first
    return gl.load(row_ptr + at + v, mask=(at < end) & (v >= 0), other=MINUS_INF)


@gluon.jit
def load_list(list_ptr, length, CFG: gl.constexpr):
    """Load one of the Lists, positions or bits of scores; -1 past its end."""
    number, v = vectors(CFG, CFG.list_vectors)
    index = number * VECTOR + v
    return gl.load(list_ptr + index, mask=index < length, other=-1)


@gluon.jit
def list_keys(lists, length, n, CFG: gl.constexpr):
    """The keys of the listed scores; NOTHING where a position lies outside the window."""
    position = load_list(lists.positions_ptr, length, CFG)
    key = key_of(load_list(lists.scores_ptr, length, CFG).to(gl.float32, bitcast=True))
    return gl.where((position >= 0) & (position < n), key, NOTHING)


@gluon.jit
def shrink(lists, length, low, n, k, CFG: gl.constexpr):
    """Cut the Lists to their k best, in place. Returns the k-th key."""
    thread_barrier()
    keys = list_keys(lists, length, n, CFG)
    cut, above = kth(keys, low, length, k, 0)
    chosen, place = choose(keys, cut, above, k)
    thread_barrier()
    gl.store(lists.scores_ptr + place, score_of(keys).to(gl.int32, bitcast=True), mask=chosen)
    position = load_list(lists.positions_ptr, length, CFG)
    thread_barrier()
    if CFG.recomputes:
        place = place + opaque_zero()  # these addresses: those above are not kept in registers
    gl.store(lists.positions_ptr + place, position, mask=chosen)
    thread_barrier()
    return cut


@gluon.jit
def fetch(ring, row_ptr, c, end, CFG: gl.constexpr):
    """Begin to copy a chunk, 16 bytes a thread, which the same thread reads."""
    R: gl.constexpr = CFG.chunk_vectors
    number, v = vectors(CFG, R)
    if CFG.loads_to_lds:
        # Past the end, the last vector again: a mask would be a branch, and behind one the compiler
        # could not count what is in flight.
        vector = gl.minimum(number + c * tile_vectors(CFG, R), (end - 1) // VECTOR)
        slot = ring.index(c % CFG.stages)
        lds_copy.global_load_to_shared(slot, row_ptr + vector * VECTOR + v)
        lds_copy.commit_group()
    else:
        at = number * VECTOR + c * tile_scores(CFG, R)
        cp_async(ring.index(c % CFG.stages), row_ptr + at + v, mask=(at < end) & (v >= 0))
        async_copy.commit_group()


@gluon.jit
def wait_for_chunks(IN_FLIGHT: gl.constexpr, CFG: gl.constexpr):
    """Wait until only so many chunks are being copied."""
    if CFG.loads_to_lds:
        lds_copy.wait_group(IN_FLIGHT)
    else:
        async_copy.wait_group(IN_FLIGHT)


@gluon.jit
def inside(x, first, n, CFG: gl.constexpr):
    """The chunk x with -inf for scores outside of the window; first: the position of its first."""
    number, v = vectors(CFG, CFG.chunk_vectors)
    position = number * VECTOR + first + v
    return gl.where((position >= 0) & (position < n), x, MINUS_INF)


@gluon.jit
def passes(x, low, everything, CFG: gl.constexpr):
    """Which scores are listed. Where there are only 7 predicate registers, they are compared again
    wherever that is needed: then the compiler must not see that the result is known."""
    if CFG.recomputes:
        low = low + opaque_zero()
    return (x > score_of(low)) | everything


@gluon.jit
def walk(ring, row_ptr, skew, n, low, everything, k, lists, CFG: gl.constexpr):
    """One pass over a row: appends scores above the key `low`, or everything, to the Lists. Returns
    how many there are.

    With everything, the list may hold positions outside the window, which list_keys tells apart:
    fewer than a chunk of them, so that a full list still has k others.
    """
    R: gl.constexpr = CFG.chunk_vectors
    LT: gl.constexpr = tile_layout(CFG, R)
    CHUNK: gl.constexpr = tile_scores(CFG, R)
    LIST: gl.constexpr = tile_scores(CFG, CFG.list_vectors)
    AHEAD: gl.constexpr = CFG.stages - 1
    end = n + skew
    chunks = (end + CHUNK - 1) // CHUNK
    length = n * 0
    for c in gl.static_range(AHEAD):
        fetch(ring, row_ptr, c, end, CFG)
    for c in range(0, chunks):
        wait_for_chunks(AHEAD - 1, CFG)
        x = ring.index(c % CFG.stages).load(LT)
        if (c == 0) | (c == chunks - 1):
            x = inside(x, c * CHUNK - skew, n, CFG)
        place, count = places(passes(x, low, everything, CFG))
        if length + count > LIST:
            low = shrink(lists, length, low, n, k, CFG)
            everything = low == NAN_KEY
            length = k + length * 0
            x = inside(ring.index(c % CFG.stages).load(LT), c * CHUNK - skew, n, CFG)
            place, count = places(passes(x, low, everything, CFG))
        number, v = vectors(CFG, R)
        position = number * VECTOR + (c * CHUNK - skew) + v
        bits = x.to(gl.int32, bitcast=True)
        gl.store(
            lists.positions_ptr + length + place, position, mask=passes(x, low, everything, CFG)
        )
        gl.store(lists.scores_ptr + length + place, bits, mask=passes(x, low, everything, CFG))
        length += count
        # The prefix sums synchronized all warps: all of them have read the chunk before this one.
        fetch(ring, row_ptr, c + AHEAD, end, CFG)
    wait_for_chunks(0, CFG)
    return length


@gluon.jit
def sample_pivot(row_ptr, end, k, CFG: gl.constexpr):
    """A key just below the one at a rank of a sample that is safely above k in the row.

    Where q sampled scores among the k best are expected, q + 3.5 sqrt(q) + 3 are exceeded only by a
    deviation of more than 3.5 standard deviations.
    """
    R: gl.constexpr = CFG.list_vectors
    COUNT: gl.constexpr = tile_vectors(CFG, R)
    number, v = vectors(CFG, R)
    step = end // VECTOR
    at = number * (step // COUNT) + number * (step % COUNT) // COUNT
    keys = key_of(gl.load(row_ptr + at * VECTOR + v))
    SIZE: gl.constexpr = COUNT * VECTOR
    q = k.to(gl.float32) * SIZE / end.to(gl.float32)
    rank = gl.minimum((q + 3.5 * gl.sqrt(q) + 3.0).to(gl.int32), SIZE)
    pivot, _ = kth(keys, least(keys), SIZE, rank, rank // 16)
    return gl.where(pivot == 0, -2, pivot - 1)  # there is no key -1: that is -0.0


@gluon.jit
def tile_positions(skew, CFG: gl.constexpr):
    """Positions of a row that is loaded whole."""
    number, v = vectors(CFG, CFG.list_vectors)
    return number * VECTOR + v - skew


@gluon.jit
def line_of(CFG: gl.constexpr):
    """0, 1, …: places of a row that is written from the first to the last, four in a thread."""
    LINE: gl.constexpr = gl.BlockedLayout([VECTOR], [CFG.lanes], [CFG.warps], [0])
    return gl.arange(0, tile_scores(CFG, 1), LINE)


@gluon.jit
def shown(position, wanted, target, HOW: gl.constexpr):
    """Positions as physical rows (-1 where the table ends), as columns, or as they are.

    target: RowOutput; HOW: Writing.
    """
    if HOW.names_rows:
        entry, row = divided(position, target.page)
        page = gl.load(target.entries + entry, mask=wanted & (entry < target.pages), other=0)
        position = gl.where(entry < target.pages, page * target.page.size + row, -1)
    elif HOW.adds_start:
        position = position + target.start
    return position


@gluon.jit
def finish(k, target, CFG: gl.constexpr, HOW: gl.constexpr):
    """The row holds k positions: set their bits, and write what they shall be shown as.

    target: RowOutput; HOW: Writing.
    """
    if HOW.has_mask:
        clear(target, CFG)
    if HOW.names_rows or HOW.adds_start or HOW.has_mask:
        thread_barrier()
        for f in range(0, k, tile_scores(CFG, 1)):
            index = f + line_of(CFG)
            position = gl.load(target.out_row + index, mask=index < k, other=0)
            row = shown(position, index < k, target, HOW)
            gl.store(target.out_row + index, row, mask=index < k)
            if HOW.has_mask:
                bit = gl.full_like(position, 1) << (position & 31)
                word = target.mask_row + (position >> 5)
                gl.atomic_or(word, bit, mask=index < k, sem="relaxed")


@gluon.jit
def write_all(n, k, target, CFG: gl.constexpr, HOW: gl.constexpr):
    """A row of at most k scores: every position, then -1.

    target: RowOutput; HOW: Writing.
    """
    for f in range(0, k, tile_scores(CFG, 1)):
        position = f + line_of(CFG)
        row = shown(position, position < n, target, HOW)
        gl.store(target.out_row + position, gl.where(position < n, row, -1), mask=position < k)
    if HOW.has_mask:
        for f in range(0, target.words, tile_scores(CFG, 1)):
            word = f + line_of(CFG)
            left = gl.minimum(gl.maximum(n - 32 * word, 0), 32)
            bits = gl.where(left == 32, -1, (gl.full_like(left, 1) << (left & 31)) - 1)
            gl.store(target.mask_row + word, bits, mask=word < target.words)


@gluon.jit
def clear(target, CFG: gl.constexpr):
    """Write a mask without a bit set; accesses after the next barrier see it."""
    for f in range(0, target.words, tile_scores(CFG, 1)):
        word = f + line_of(CFG)
        gl.store(target.mask_row + word, word * 0, mask=word < target.words)


COUNTS = ["rows", "width", "k", "words", "pages", "stride", "out_stride", "table_stride"]
COUNTS += ["page_size", "page_inverse"]
VECTORS = [
    "starts_ptr",
    "ends_ptr",
    "sequences_ptr",
    "table_ptr",
    "out_ptr",
    "counts_ptr",
    "mask_ptr",
]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def select_kernel(  # noqa: PLR0913
    scores_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    table_ptr,
    out_ptr,
    counts_ptr,
    mask_ptr,
    lists_ptr,
    rows,
    width,
    k,
    words,
    pages,
    stride,
    out_stride,
    table_stride,
    page_size,
    page_inverse,
    CFG: gl.constexpr,
    ADD: gl.constexpr,
    LONG: gl.constexpr,
):
    """The top-k of all rows. CFG: SelectConfig. stride: from row to row, in vectors. ADD: positions
    become columns. page_size, page_inverse: `Pages`, of a block table. LONG: whether any row can be
    longer than the list."""
    R: gl.constexpr = CFG.list_vectors
    LIST: gl.constexpr = tile_scores(CFG, R)
    HOW: gl.constexpr = Writing(
        names_rows=table_ptr is not None, adds_start=ADD, has_mask=mask_ptr is not None
    )
    if LONG:
        lists_ptr += gl.program_id(0) * (2 * LIST)
        lists = Lists(positions_ptr=lists_ptr, scores_ptr=lists_ptr + LIST)
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
        CHUNKS: gl.constexpr = [CFG.stages, CFG.warps, CFG.chunk_vectors, CFG.lanes, VECTOR]
        ring = gl.allocate_shared_memory(gl.float32, CHUNKS, LINEAR)
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        start = gl.maximum(gl.load(starts_ptr + row), 0)
        n = gl.maximum(gl.minimum(gl.load(ends_ptr + row), width), start) - start
        wide_row = gl.to_tensor(row).to(gl.int64)
        mask_row = None
        entries = None
        if mask_ptr is not None:
            mask_row = mask_ptr + wide_row * words
        if table_ptr is not None:
            line = gl.load(sequences_ptr + row)
            entries = table_ptr + line.to(gl.int64) * table_stride
        target = RowOutput(
            out_row=out_ptr + wide_row * out_stride,
            mask_row=mask_row,
            words=words,
            start=start,
            entries=entries,
            pages=pages,
            page=Pages(size=page_size, inverse=page_inverse),
        )
        if counts_ptr is not None:
            gl.store(counts_ptr + row, gl.minimum(n, k))
        if n <= k:
            write_all(n, k, target, CFG, HOW)
        else:
            skew = start % VECTOR
            row_ptr = scores_ptr + (wide_row * stride + start // VECTOR) * VECTOR
            if n + skew <= LIST:
                keys = key_of(load_tile(row_ptr, 0, n + skew, CFG, R))
                position = tile_positions(skew, CFG)
                keys = gl.where((position >= 0) & (position < n), keys, NOTHING)
                low = least(gl.where(keys > NOTHING, keys, HIGHEST))
                cut, above = kth(keys, low, n, k, 0)
                chosen, place = choose(keys, cut, above, k)
                # The positions are computed again: keeping them would spill.
                gl.store(target.out_row + place, tile_positions(skew, CFG), mask=chosen)
            elif LONG:
                low = sample_pivot(row_ptr, n + skew, k, CFG)
                everything = low <= MINUS_INF_KEY
                length = n * 0
                while length < k:
                    low = gl.where(everything, NAN_KEY, low)
                    thread_barrier()  # all warps have read the list of the row before
                    length = walk(ring, row_ptr, skew, n, low, everything, k, lists, CFG)
                    everything = length < k
                thread_barrier()
                keys = list_keys(lists, length, n, CFG)
                cut, above = kth(keys, low, length, k, 0)
                chosen, place = choose(keys, cut, above, k)
                gl.store(
                    target.out_row + place,
                    load_list(lists.positions_ptr, length, CFG),
                    mask=chosen,
                )
            finish(k, target, CFG, HOW)
