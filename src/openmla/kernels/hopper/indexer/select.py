"""Top-k of rows of scores on Hopper: one pass over memory, and a cut in registers.

One block per row at a time. A row of at most LIST scores is loaded whole and cut (cut.py). A longer
one:

1. sample: CHUNK scores spread over the row; their cut at a rank safely above topk gives a pivot. It
   decides how much work is done, never the result.
2. walk: the row passes once through a ring of chunks in shared memory (TMA). Positions of scores
   above the pivot go to a list in order, by prefix sums. When the list is nearly full it is cut to
   its topk best, and the topk-th becomes the pivot: later scores must be greater, for equal ones
   the earlier position wins.
3. cut: the list is cut to topk, and written.

A bulk copy begins at a multiple of four columns, so the first may hold up to three scores too many.
If fewer than topk scores passed the pivot (a misleading sample), the row is walked again without.
No atomics decide where a position goes, so the result has one value, and it is the same on every
rank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_load
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.indexer.cut import (
    HIGHEST,
    MINUS_INF_KEY,
    NAN_KEY,
    NOTHING,
    choose,
    key_of,
    kth,
    plus,
    score_of,
)

# Columns of a row at which a bulk copy may begin: multiples of 16 bytes. At others an H200 says
# "illegal instruction".
ALIGNED = gl.constexpr(4)


@gluon.constexpr_function
def spread(WARPS: gl.constexpr, VALUES: gl.constexpr):
    """How scores lie in registers: VALUES neighbors in a thread."""
    return gl.BlockedLayout([VALUES], [32], [WARPS], [0])


@gluon.jit
def load_chunk(desc, row, column, barrier, tile):
    """Scores of a row from a column on, as many as the tile holds; zeros past the last column."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    SIZE: gl.constexpr = tile.shape[0]
    mbarrier.expect(barrier, SIZE * 4)
    for i in gl.static_range(SIZE // BOX[1]):
        box = reinterpret(tile.slice(i * BOX[1], BOX[1]), desc.dtype, BOX, LAYOUT)
        tma_load(desc, [row, column + i * BOX[1]], barrier, box)


@gluon.jit
def list_keys(list_ptr, row_ptr, length, RL: gl.constexpr, SIZE: gl.constexpr):
    """The keys of the scores that are in the list."""
    position = list_positions(list_ptr, length, RL, SIZE)
    listed = gl.arange(0, SIZE, RL) < length
    score = gl.load(row_ptr + position, mask=listed, other=0.0)
    return gl.where(listed, key_of(score), NOTHING)


@gluon.jit
def list_positions(list_ptr, length, RL: gl.constexpr, SIZE: gl.constexpr):
    """What is in the list. It is read again where it is used: there are no registers to keep it."""
    index = gl.arange(0, SIZE, RL) + opaque_zero()
    return gl.load(list_ptr + index, mask=index < length, other=0)


@gluon.jit
def shrink(list_ptr, row_ptr, length, low, k, RL: gl.constexpr, SIZE: gl.constexpr):
    """Cut the list to its k best, in place. Returns the k-th key."""
    thread_barrier()
    keys = list_keys(list_ptr, row_ptr, length, RL, SIZE)
    cut = kth(keys, low, length, k, 0)
    chosen, place = choose(keys, cut, k)
    position = list_positions(list_ptr, length, RL, SIZE)
    thread_barrier()
    gl.store(list_ptr + place, position, mask=chosen)
    thread_barrier()
    return cut


@gluon.jit
def walk(source, it, place, pivot, k, list_ptr, CFG: gl.constexpr, FAST: gl.constexpr):
    """One pass over a row. FAST: pivot is a score (greater passes), else a key (at least).

    Returns the length of the list and the chunks that went through the ring so far.
    """
    desc, ring, ready = source
    row, start, n, row_ptr = place
    skew = start % ALIGNED
    CHUNK: gl.constexpr = CFG[2]
    LIST: gl.constexpr = CFG[3]
    ST: gl.constexpr = CFG[4]
    RL: gl.constexpr = spread(CFG[0], CFG[1])
    index = gl.arange(0, CHUNK, RL)
    length = n * 0
    chunks = (n + skew + CHUNK - 1) // CHUNK
    for c in range(0, gl.minimum(chunks, ST - 1)):
        at = (it + c) % ST
        load_chunk(desc, row, start - skew + c * CHUNK, ready.index(at), ring.index(at))
    for c in range(0, chunks):
        stage = it % ST
        mbarrier.wait(ready.index(stage), (it // ST) & 1)
        x = ring.index(stage).load(RL)
        position = c * CHUNK + index - skew
        if FAST:
            hit = x > pivot
        else:
            hit = key_of(x) >= pivot
        one = (hit & (position >= 0) & (position < n)).to(gl.int32)
        upto = gl.associative_scan(one, 0, plus)
        gl.store(list_ptr + (length - 1) + upto, position, mask=one > 0)
        length += gl.sum(one, 0)
        # The sums met all warps: the chunk before this one has been read by all of them.
        if c + ST - 1 < chunks:
            at = (it + ST - 1) % ST
            column = start - skew + (c + ST - 1) * CHUNK
            load_chunk(desc, row, column, ready.index(at), ring.index(at))
        if length > LIST - CHUNK:
            if FAST:
                cut = shrink(list_ptr, row_ptr, length, key_of(pivot), k, RL, LIST)
                pivot = score_of(cut)
            else:
                pivot = shrink(list_ptr, row_ptr, length, NAN_KEY, k, RL, LIST) + 1
            length = k + length * 0
        it += 1
    return length, it


@gluon.jit
def sample_pivot(row_ptr, n, k, CFG: gl.constexpr):
    """The key at a rank of a sample that is safely above k in the row.

    Four neighbors each, which are one sector of memory. Of q expected sampled scores among the k
    best, q + 4 sqrt(q) + 4 are not exceeded by more than 4 standard deviations.
    """
    SIZE: gl.constexpr = CFG[2]
    NEAR: gl.constexpr = gl.BlockedLayout([1], [32], [CFG[0]], [0])
    index = gl.arange(0, SIZE, NEAR)
    step = n // (SIZE // 4)
    keys = key_of(gl.load(row_ptr + index // 4 * step + index % 4))
    q = k.to(gl.float32) * SIZE / n.to(gl.float32)
    rank = gl.minimum((q + 4.0 * gl.sqrt(q) + 4.0).to(gl.int32), SIZE)
    return kth(keys, gl.min(keys, 0), SIZE, rank, rank // 8)


@gluon.jit
def shown(position, chosen, target, HOW: gl.constexpr):
    """Positions as physical rows (-1 where the table ends), as columns, or as they are."""
    _, _, _, start, entries, pages = target
    PAGE: gl.constexpr = HOW[0]
    if PAGE > 0:
        entry = position // PAGE
        page = gl.load(entries + entry, mask=chosen & (entry < pages), other=0)
        position = gl.where(entry < pages, page * PAGE + position % PAGE, -1)
    elif HOW[1]:
        position = position + start
    return position


@gluon.jit
def write(position, chosen, place, target, HOW: gl.constexpr):
    """The chosen positions, each to its place."""
    out_row, mask_row, _, _, _, _ = target
    gl.store(out_row + place, shown(position, chosen, target, HOW), mask=chosen)
    if HOW[2]:
        bit = gl.full_like(position, 1) << (position & 31)
        gl.atomic_or(mask_row + (position >> 5), bit, mask=chosen, sem="relaxed")


@gluon.jit
def write_list(
    list_ptr, row_ptr, length, low, k, target, RL: gl.constexpr, SIZE: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The k best of a list that SIZE places hold."""
    keys = list_keys(list_ptr, row_ptr, length, RL, SIZE)
    cut = kth(keys, low, length, k, 0)
    chosen, place = choose(keys, cut, k)
    write(list_positions(list_ptr, length, RL, SIZE), chosen, place, target, HOW)


@gluon.jit
def write_all(n, k, target, CFG: gl.constexpr, HOW: gl.constexpr):
    """A row of at most k scores: every position, then -1."""
    out_row, mask_row, words, _, _, _ = target
    SIZE: gl.constexpr = CFG[0] * 128
    index = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [CFG[0]], [0]))
    for f in range(0, k, SIZE):
        position = f + index
        row = shown(position, position < n, target, HOW)
        gl.store(out_row + position, gl.where(position < n, row, -1), mask=position < k)
    if HOW[2]:
        for f in range(0, words, SIZE):
            left = gl.minimum(gl.maximum(n - 32 * (f + index), 0), 32)
            bits = gl.where(left == 32, -1, (gl.full_like(left, 1) << (left & 31)) - 1)
            gl.store(mask_row + f + index, bits, mask=f + index < words)


@gluon.jit
def clear(mask_row, words, CFG: gl.constexpr):
    """No bit set; all warps see it."""
    SIZE: gl.constexpr = CFG[0] * 128
    index = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [CFG[0]], [0]))
    thread_barrier()
    for f in range(0, words, SIZE):
        gl.store(mask_row + f + index, index * 0, mask=f + index < words)
    thread_barrier()


COUNTS = ["rows", "width", "k", "words", "pages", "out_stride", "table_stride"]
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
    desc,
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
    scores_stride,
    out_stride,
    table_stride,
    CFG: gl.constexpr,
    PAGE: gl.constexpr,
    ADD: gl.constexpr,
    LONG: gl.constexpr,
):
    """CFG: warps, neighbors in a thread, scores of a chunk, of the list, stages of the ring. LONG:
    whether any row can be longer than the list."""
    CHUNK: gl.constexpr = CFG[2]
    LIST: gl.constexpr = CFG[3]
    ST: gl.constexpr = CFG[4]
    RL: gl.constexpr = spread(CFG[0], CFG[1])
    HOW: gl.constexpr = (PAGE, ADD, mask_ptr is not None)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ring = gl.allocate_shared_memory(gl.float32, [ST, CHUNK], LINEAR)
    whole = reinterpret(ring, gl.float32, [ST * CHUNK], LINEAR).slice(0, LIST)
    ready = barriers(ST, 1)
    full = barriers(1, 1)
    list_ptr = lists_ptr + gl.program_id(0) * LIST
    it = gl.program_id(0) * 0  # chunks that went through the ring
    turn = it  # rows that were loaded whole
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        start = gl.maximum(gl.load(starts_ptr + row), 0)
        n = gl.maximum(gl.minimum(gl.load(ends_ptr + row), width) - start, 0)
        wide_row = gl.to_tensor(row).to(gl.int64)
        row_ptr = scores_ptr + wide_row * scores_stride + start
        # What is not asked for is never used.
        mask_row = list_ptr
        entries = list_ptr
        if mask_ptr is not None:
            mask_row = mask_ptr + wide_row * words
        if PAGE > 0:
            line = gl.load(sequences_ptr + row)
            entries = table_ptr + line.to(gl.int64) * table_stride
        target = (out_ptr + wide_row * out_stride, mask_row, words, start, entries, pages)
        if counts_ptr is not None:
            gl.store(counts_ptr + row, gl.minimum(n, k))
        thread_barrier()  # ring and list of the row before have been read by all warps
        if n <= k:
            write_all(n, k, target, CFG, HOW)
        else:
            if mask_ptr is not None:
                clear(mask_row, words, CFG)
            skew = start % ALIGNED
            if n + skew <= LIST:
                load_chunk(desc, row, start - skew, full.index(0), whole)
                mbarrier.wait(full.index(0), turn & 1)
                turn += 1
                position = gl.arange(0, LIST, RL) - skew
                inside = (position >= 0) & (position < n)
                keys = gl.where(inside, key_of(whole.load(RL)), NOTHING)
                least = gl.min(gl.where(inside, keys, HIGHEST), 0)
                cut = kth(keys, least, n, k, 0)
                chosen, at = choose(keys, cut, k)
                write(position, chosen, at, target, HOW)
            elif LONG:
                source = (desc, ring, ready)
                place = (row, start, n, row_ptr)
                pivot = sample_pivot(row_ptr, n, k, CFG)
                length = n * 0
                low = length + NAN_KEY
                if pivot > MINUS_INF_KEY + 1:
                    low = gl.where(pivot == 0, -2, pivot - 1)  # there is no key -1: that is -0.0
                    length, it = walk(source, it, place, score_of(low), k, list_ptr, CFG, True)
                if length < k:
                    thread_barrier()
                    low = length * 0 + NAN_KEY
                    length, it = walk(source, it, place, low, k, list_ptr, CFG, False)
                thread_barrier()
                if length <= LIST // 2:
                    write_list(list_ptr, row_ptr, length, low, k, target, RL, LIST // 2, HOW)
                else:
                    write_list(list_ptr, row_ptr, length, low, k, target, RL, LIST, HOW)
