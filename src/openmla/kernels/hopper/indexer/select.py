"""Top-k of rows of scores on Hopper: one pass over memory, and a cut in registers.

One block per row at a time. A row of at most LIST scores is loaded whole and cut (cut.py). A longer
one:

1. sample: LIST scores spread over the row; their cut at a rank safely above topk gives a pivot. It
   decides how much work is done, never the result.
2. walk: the row passes once, in chunks, through a ring in shared memory. Positions and scores above
   the pivot go to a list, in order, by prefix sums (tile.py). When a chunk would not fit, the list
   is cut to its topk best, and the topk-th becomes the pivot: later scores must be greater, for
   equal ones the earlier position wins.
3. cut: the list is cut to topk, and written.

Loads of 16 bytes begin at a multiple of four columns, so the first may hold up to three scores too
many. If fewer than topk scores passed the pivot (a misleading sample), the row is walked again and
everything passes. No atomics decide where a position goes, so the result has one value, and it is
the same on every rank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openmla.kernels.gluon.compat import cp_async, thread_barrier
from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.indexer.cut import (
    HIGHEST,
    MINUS_INF_KEY,
    NAN_KEY,
    NOTHING,
    choose,
    key_of,
    kth,
    score_of,
)
from openmla.kernels.hopper.indexer.tile import (
    GROUP,
    VECTOR,
    least,
    places,
    tile_layout,
    vectors,
)


@gluon.jit
def load_tile(row_ptr, first, end, CFG: gl.constexpr, R: gl.constexpr):
    """Scores of a row from a multiple of four on; vectors past the end are -inf."""
    number, v = vectors(CFG[0], R)
    at = number * VECTOR + first
    return gl.load(row_ptr + at + v, mask=(at < end) & (v >= 0), other=MINUS_INF)


@gluon.jit
def load_list(list_ptr, length, CFG: gl.constexpr):
    """What is in a list: positions, or bits of scores."""
    number, v = vectors(CFG[0], CFG[2])
    index = number * VECTOR + v
    return gl.load(list_ptr + index, mask=index < length, other=-1)


@gluon.jit
def list_keys(lists, length, n, CFG: gl.constexpr):
    """The keys of what is in the list; what lies outside the window has none."""
    position = load_list(lists[0], length, CFG)
    key = key_of(load_list(lists[1], length, CFG).to(gl.float32, bitcast=True))
    return gl.where((position >= 0) & (position < n), key, NOTHING)


@gluon.jit
def shrink(lists, length, low, n, k, CFG: gl.constexpr):
    """Cut the list to its k best, in place. Returns the k-th key."""
    thread_barrier()
    keys = list_keys(lists, length, n, CFG)
    cut, above = kth(keys, low, length, k, 0)
    chosen, place = choose(keys, cut, above, k)
    thread_barrier()
    gl.store(lists[1] + place, score_of(keys).to(gl.int32, bitcast=True), mask=chosen)
    position = load_list(lists[0], length, CFG)
    thread_barrier()
    # Another zero: the addresses above need not be kept for this.
    gl.store(lists[0] + (place + opaque_zero()), position, mask=chosen)
    thread_barrier()
    return cut


@gluon.jit
def fetch(ring, row_ptr, c, end, CFG: gl.constexpr):
    """Begin to copy a chunk, 16 bytes a thread, which the same thread reads."""
    R: gl.constexpr = CFG[1]
    number, v = vectors(CFG[0], R)
    at = number * VECTOR + c * (CFG[0] * R * GROUP)
    cp_async(ring.index(c % CFG[3]), row_ptr + at + v, mask=(at < end) & (v >= 0))
    async_copy.commit_group()


@gluon.jit
def inside(x, first, n, CFG: gl.constexpr):
    """A chunk whose scores outside of the window are -inf; first: the position of its first."""
    number, v = vectors(CFG[0], CFG[1])
    position = number * VECTOR + first + v
    return gl.where((position >= 0) & (position < n), x, MINUS_INF)


@gluon.jit
def passes(x, low, everything):
    """Which scores are listed. Compared again where it is needed: there are only 7 predicates to
    keep them in, so the compiler must not see that it has been done before."""
    return (x > score_of(low + opaque_zero())) | everything


@gluon.jit
def walk(ring, row_ptr, skew, n, low, everything, k, lists, CFG: gl.constexpr):
    """One pass over a row: lists scores above the key `low`, or everything. Returns how many.

    With everything, the list may hold positions outside the window, which list_keys tells apart:
    fewer than a chunk of them, so that a full list still has k others.
    """
    R: gl.constexpr = CFG[1]
    LT: gl.constexpr = tile_layout(CFG[0], R)
    CHUNK: gl.constexpr = CFG[0] * R * GROUP
    LIST: gl.constexpr = CFG[0] * CFG[2] * GROUP
    AHEAD: gl.constexpr = CFG[3] - 1
    end = n + skew
    chunks = (end + CHUNK - 1) // CHUNK
    length = n * 0
    for c in gl.static_range(AHEAD):
        fetch(ring, row_ptr, c, end, CFG)
    for c in range(0, chunks):
        async_copy.wait_group(AHEAD - 1)
        x = ring.index(c % CFG[3]).load(LT)
        if (c == 0) | (c == chunks - 1):
            x = inside(x, c * CHUNK - skew, n, CFG)
        place, count = places(passes(x, low, everything))
        if length + count > LIST:
            low = shrink(lists, length, low, n, k, CFG)
            everything = low == NAN_KEY
            length = k + length * 0
            x = inside(ring.index(c % CFG[3]).load(LT), c * CHUNK - skew, n, CFG)
            place, count = places(passes(x, low, everything))
        number, v = vectors(CFG[0], R)
        position = number * VECTOR + (c * CHUNK - skew) + v
        bits = x.to(gl.int32, bitcast=True)
        gl.store(lists[0] + length + place, position, mask=passes(x, low, everything))
        gl.store(lists[1] + length + place, bits, mask=passes(x, low, everything))
        length += count
        # The sums met all warps: the chunk before this one has been read by all of them.
        fetch(ring, row_ptr, c + AHEAD, end, CFG)
    async_copy.wait_group(0)
    return length


@gluon.jit
def sample_pivot(row_ptr, end, k, CFG: gl.constexpr):
    """A key just below the one at a rank of a sample that is safely above k in the row.

    Of q expected sampled scores among the k best, q + 3.5 sqrt(q) + 3 are not exceeded by more than
    3.5 standard deviations.
    """
    R: gl.constexpr = CFG[2]
    COUNT: gl.constexpr = CFG[0] * R * 32  # vectors
    number, v = vectors(CFG[0], R)
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
    number, v = vectors(CFG[0], CFG[2])
    return number * VECTOR + v - skew


@gluon.jit
def line_of(CFG: gl.constexpr):
    """0, 1, …: places of a row that is written from the first to the last, four in a thread."""
    return gl.arange(0, CFG[0] * GROUP, gl.BlockedLayout([VECTOR], [32], [CFG[0]], [0]))


@gluon.jit
def shown(position, wanted, target, HOW: gl.constexpr):
    """Positions as physical rows (-1 where the table ends), as columns, or as they are."""
    _, _, _, start, entries, pages = target
    PAGE: gl.constexpr = HOW[0]
    if PAGE > 0:
        entry = position // PAGE
        page = gl.load(entries + entry, mask=wanted & (entry < pages), other=0)
        position = gl.where(entry < pages, page * PAGE + position % PAGE, -1)
    elif HOW[1]:
        position = position + start
    return position


@gluon.jit
def finish(k, target, CFG: gl.constexpr, HOW: gl.constexpr):
    """The row holds k positions: set their bits, and write what they shall be shown as."""
    out_row, mask_row, words, _, _, _ = target
    if HOW[2]:
        clear(mask_row, words, CFG)
    if HOW[0] > 0 or HOW[1] or HOW[2]:
        thread_barrier()
        for f in range(0, k, CFG[0] * GROUP):
            index = f + line_of(CFG)
            position = gl.load(out_row + index, mask=index < k, other=0)
            gl.store(out_row + index, shown(position, index < k, target, HOW), mask=index < k)
            if HOW[2]:
                bit = gl.full_like(position, 1) << (position & 31)
                gl.atomic_or(mask_row + (position >> 5), bit, mask=index < k, sem="relaxed")


@gluon.jit
def write_all(n, k, target, CFG: gl.constexpr, HOW: gl.constexpr):
    """A row of at most k scores: every position, then -1."""
    out_row, mask_row, words, _, _, _ = target
    for f in range(0, k, CFG[0] * GROUP):
        position = f + line_of(CFG)
        row = shown(position, position < n, target, HOW)
        gl.store(out_row + position, gl.where(position < n, row, -1), mask=position < k)
    if HOW[2]:
        for f in range(0, words, CFG[0] * GROUP):
            word = f + line_of(CFG)
            left = gl.minimum(gl.maximum(n - 32 * word, 0), 32)
            bits = gl.where(left == 32, -1, (gl.full_like(left, 1) << (left & 31)) - 1)
            gl.store(mask_row + word, bits, mask=word < words)


@gluon.jit
def clear(mask_row, words, CFG: gl.constexpr):
    """No bit set; what comes after the next barrier sees it."""
    for f in range(0, words, CFG[0] * GROUP):
        word = f + line_of(CFG)
        gl.store(mask_row + word, word * 0, mask=word < words)


COUNTS = ["rows", "width", "k", "words", "pages", "stride", "out_stride", "table_stride"]
VECTORS = [
    "starts_ptr", "ends_ptr", "sequences_ptr", "table_ptr", "out_ptr", "counts_ptr", "mask_ptr",
]  # fmt: skip


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
    CFG: gl.constexpr,
    PAGE: gl.constexpr,
    ADD: gl.constexpr,
    LONG: gl.constexpr,
):
    """CFG: warps, vectors of a thread in a chunk and in the list, chunks of the ring. stride: from
    row to row, in vectors. LONG: whether any row can be longer than the list."""
    R: gl.constexpr = CFG[2]
    LIST: gl.constexpr = CFG[0] * R * GROUP
    HOW: gl.constexpr = (PAGE, ADD, mask_ptr is not None)
    if LONG:
        lists_ptr += gl.program_id(0) * (2 * LIST)
        lists = (lists_ptr, lists_ptr + LIST)  # positions, and bits of their scores
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
        ring = gl.allocate_shared_memory(gl.float32, [CFG[3], CFG[0], CFG[1], 32, VECTOR], LINEAR)
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        start = gl.maximum(gl.load(starts_ptr + row), 0)
        n = gl.maximum(gl.minimum(gl.load(ends_ptr + row), width), start) - start
        wide_row = gl.to_tensor(row).to(gl.int64)
        # What is not asked for is never used.
        mask_row = out_ptr
        entries = out_ptr
        if mask_ptr is not None:
            mask_row = mask_ptr + wide_row * words
        if PAGE > 0:
            line = gl.load(sequences_ptr + row)
            entries = table_ptr + line.to(gl.int64) * table_stride
        target = (out_ptr + wide_row * out_stride, mask_row, words, start, entries, pages)
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
                # Computed again: there are no registers to keep them.
                gl.store(target[0] + place, tile_positions(skew, CFG), mask=chosen)
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
                gl.store(target[0] + place, load_list(lists[0], length, CFG), mask=chosen)
            finish(k, target, CFG, HOW)
