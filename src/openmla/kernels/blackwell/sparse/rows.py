"""Which cache rows a token attends to: a list of indices, checked, as descriptors count rows.

The list of a token is a records.KeyList. Pages lie any multiple of 16 bytes apart, so a row of a
TMA descriptor may be shorter than a cache row; with pages back to back all steps are 1.

In the latent form the list is implicit: all keys of the token's sequence, under a causal mask up to
its own, with a window the last of those. Then the KeyList points to the sequence's line of the
block table, from which the indices follow. A span is a part of such a line that the token names,
and may meet pages that are none. INDEXING, a records.Indexing, says which of these it is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.sparse.records import KeyList, Pool, Seen
from openmla.kernels.gluon.requests import cut, span_of

CHUNK = gl.constexpr(32)  # sequences that a warp looks at together
NOWHERE = gl.constexpr(-1)  # a row outside the tensor: TMA fills it with zeros


@gluon.constexpr_function
def bits_layout(ctas):
    """[bytes, 8 bits] in a warp, the same in every CTA."""
    return gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0], [[0, 0]] if ctas > 1 else [])


@gluon.constexpr_function
def list_layout(ctas):
    """Listed keys in a warp, the same in every CTA."""
    return gl.BlockedLayout([8], [32], [1], [0], [[0]] if ctas > 1 else [])


@gluon.constexpr_function
def lanes_layout(warps, ctas):
    """A number per lane, the same in every warp and CTA."""
    return gl.BlockedLayout([1], [32], [warps], [0], [[0]] if ctas > 1 else [])


@gluon.constexpr_function
def vector_layout(ctas):
    """A vector in the shared memory of every CTA."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]] if ctas > 1 else [])


@gluon.jit
def count_of(lists, token):
    """The valid length of a token's list, which is one of TokenLists `lists`."""
    count = lists.topk
    if lists.lengths is not None:
        count = gl.minimum(gl.load(lists.lengths + token), lists.topk)
    return gl.maximum(count, 0)


@gluon.jit
def sequence_of(token, cu_ptr, batch, CTAS: gl.constexpr):
    """The sequence of a token, `batch` after the last: how many sequences end at or before it."""
    LANES: gl.constexpr = lanes_layout(gl.num_warps(), CTAS)
    sequence = token * 0
    for first in range(0, batch, CHUNK):
        at = first + gl.arange(0, CHUNK, LANES)
        end = gl.load(cu_ptr + at + 1, mask=at < batch, other=0x7FFFFFFF)
        sequence += gl.sum(gl.where(end <= token, 1, 0), 0)
    return sequence


@gluon.jit
def keys_seen(token, lists, INDEXING: gl.constexpr):
    """(sequence of a token, how many of its keys the token sees); none after the last sequence.

    TokenLists `lists` has a block table.
    """
    sequence = sequence_of(token, lists.cu_seqlens, lists.batch, INDEXING.ctas)
    exists = sequence < lists.batch
    here = gl.maximum(gl.minimum(sequence, lists.batch - 1), 0)
    count = cut(gl.load(lists.lengths + here, mask=exists, other=0), lists.topk)
    if INDEXING.is_causal:
        stop = gl.load(lists.cu_seqlens + here + 1, mask=exists, other=0)
        _start, later = span_of(token + 1, stop, lists.tokens)
        count -= later
    return here, gl.maximum(count, 0)


@gluon.jit
def unseen(count, window):
    """How many of the first `count` keys lie before the last `window` of them."""
    return gl.maximum(count - window, 0)


@gluon.jit
def steps_of(count, B_TOPK: gl.constexpr):
    """Steps over the list; one even for a token that sees nothing."""
    return gl.maximum((count + (B_TOPK - 1)) // B_TOPK, 1)


@gluon.jit
def whole_steps(keys, STEP: gl.constexpr):
    """Steps over so many keys; none over none."""
    return gl.maximum(keys + (STEP - 1), 0) // STEP


@gluon.jit
def seen_of(token, lists):
    """What a token has `Seen` of a source: TokenLists or SecondLists."""
    stop = lists.topk
    if lists.lengths is not None:
        stop = gl.minimum(gl.load(lists.lengths + token), lists.topk)
    stop = gl.maximum(stop, 0)
    line = token
    first = token * 0
    if lists.spans is not None:
        line = gl.load(lists.spans.request + token)
        first = gl.maximum(gl.load(lists.spans.begin + token), 0)
        there = (line >= 0) & (line < lists.spans.requests) & (first < stop)
        line = gl.where(there, line, 0)
        first = gl.where(there, first, 0)
        stop = gl.where(there, stop, 0)
    return Seen(line=line, first=first, length=stop)


@gluon.jit
def listed(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr, INDEXING: gl.constexpr):
    """Indices first … first + N - 1 of KeyList `keys`, and whether each counts. With a window or a
    span, they are numbered from its first key on."""
    TABLE: gl.constexpr = INDEXING.table_page_size
    at = first + gl.arange(0, N, LAYOUT)
    if keys.first is not None:
        at += keys.first
    if TABLE > 0:
        page = gl.load(keys.indices + at // TABLE, mask=at < keys.length, other=-1)
        there = page >= 0
        if INDEXING.is_span:
            there = there & (page < keys.pool.rows // TABLE)
        index = gl.where(there, page * TABLE + at % TABLE, -1)
    else:
        index = gl.load(keys.indices + at, mask=at < keys.length, other=-1)
    return index, (index >= 0) & (index < keys.pool.rows)


@gluon.jit
def descriptor_rows(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr, INDEXING: gl.constexpr):
    """Descriptor rows of entries first … first + N - 1 of KeyList `keys`; NOWHERE for an entry that
    does not count."""
    index, ok = listed(keys, first, N, LAYOUT, INDEXING)
    return placed(index, ok, keys.pool, INDEXING)


@gluon.jit
def placed(index, ok, pool, INDEXING: gl.constexpr):
    """Descriptor rows of rows of a Pool; NOWHERE for one that does not count."""
    PAGE: gl.constexpr = INDEXING.page_size
    row = index * pool.row_step
    if PAGE > 0:
        row = index // PAGE * pool.page_step + index % PAGE * pool.row_step
    if pool.base is not None:
        row += pool.base
    return gl.where(ok, row, NOWHERE)


@gluon.jit
def second_listed(second, k, offset, N: gl.constexpr, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """What `listed` says of N keys of step k, which is one of the SecondKeys `second`, from its key
    number `offset` on."""
    BOTH: gl.constexpr = HOW.indexing
    INDEXING: gl.constexpr = BOTH.second
    keys = KeyList(
        indices=second.indices,
        length=second.length,
        pool=Pool(second.rows, second.page_step, second.row_step, None),
        first=second.first,
        second=None,
    )
    return listed(keys, (k - second.after) * HOW.b_topk + offset, N, LAYOUT, INDEXING)


@gluon.jit
def step_rows(keys, k, offset, N: gl.constexpr, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """Descriptor rows of N keys of step k, from its key number `offset` on. HOW: records.How."""
    INDEXING: gl.constexpr = HOW.indexing
    SECOND: gl.constexpr = INDEXING.second
    if keys.second is None:
        return descriptor_rows(keys, k * HOW.b_topk + offset, N, LAYOUT, INDEXING)
    else:
        if k < keys.second.after:
            rows = descriptor_rows(keys, k * HOW.b_topk + offset, N, LAYOUT, INDEXING)
        else:
            second = keys.second
            index, ok = second_listed(second, k, offset, N, LAYOUT, HOW)
            pool = Pool(second.rows, second.page_step, second.row_step, None)
            rows = placed(index, ok, pool, SECOND)
        return rows


@gluon.jit
def step_counts(keys, k, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """Whether each key of step k counts, as numbers. HOW: records.How."""
    INDEXING: gl.constexpr = HOW.indexing
    if keys.second is None:
        _, ok = listed(keys, k * HOW.b_topk, HOW.b_topk, LAYOUT, INDEXING)
        return ok.to(gl.int32)
    else:
        if k < keys.second.after:
            _, ok = listed(keys, k * HOW.b_topk, HOW.b_topk, LAYOUT, INDEXING)
            counts = ok.to(gl.int32)
        else:
            _, ok = second_listed(keys.second, k, 0, HOW.b_topk, LAYOUT, HOW)
            counts = ok.to(gl.int32)
        return counts


@gluon.jit
def wait_for_step(barrier, step, NB: gl.constexpr):
    """Wait until `step` has completed its barrier; steps before the first are complete."""
    if step >= 0:
        mbarrier.wait(barrier.index(step % NB), (step // NB) & 1)


@gluon.jit
def kv_valid_producer(keys, is_k_valid, bars, steps, HOW: gl.constexpr):
    """The kv_valid_producer partition: one bit per key of a step, eight to a byte: does its index
    count? KeyList `keys`, Barriers `bars`, records.How `HOW`."""
    B_TOPK: gl.constexpr = HOW.b_topk
    NB: gl.constexpr = HOW.num_mbars
    BYTES: gl.constexpr = B_TOPK // 8
    INDEXING: gl.constexpr = HOW.indexing
    L: gl.constexpr = bits_layout(INDEXING.ctas)
    FLAT: gl.constexpr = list_layout(INDEXING.ctas)
    bit = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    for k in range(0, steps):
        counts = step_counts(keys, k, FLAT, HOW)
        grouped = gl.convert_layout(gl.reshape(counts, [BYTES, 8]), L)
        wait_for_step(bars.k_valid_free, k - NB, NB)
        is_k_valid.index(k % NB).store(gl.sum(grouped << bit, 1).to(gl.uint8))
        mbarrier.arrive(bars.k_valid_ready.index(k % NB), count=1)
