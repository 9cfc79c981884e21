"""Latent MLA prefill on Blackwell: all heads share rows of 512 + 64 columns, 512, or 256 + 64.

The rows of a token are listed, or (rows.py) those that it sees of its sequence in a paged cache, or
a span of positions there. With a second source, its rows follow in steps of their own.

A CTA serves one token and up to 64 of its heads, padded to the 64 rows of a product, and walks the
token's list of rows B_TOPK = 64 at a time, by the numbers of a `SparseConfig`. Pairs of CTAs have
pair/kernel.py.

| partition | warps | does |
|---|---|---|
| softmax (default) | 4 | scores to weights, multiplies O, stores the result (softmax.py) |
| load_k | 4 | gathers K, for an fp8 cache also dequantizes it (load.py, rows_fp8.py) |
| load_v | 4 | loads Q, gathers V, for an fp8 cache also dequantizes it |
| mma | 1 | copies Q to tensor memory, issues all products (mma.py) |
| kv_valid_producer | 1 | one bit per key: does its index count? (rows.py) |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q (1) | mma |
| q_copied | 1 | commit of the copies of Q (1) | load_v; load_k before the later columns |
| k_p0_ready, k_p1_ready | NB | TMA bytes of K's first 192, other 384 columns (1) | mma |
| qk_ss_done, qk_ts_done | NB | commit of the products over them (1) | load_k; the last, softmax |
| p_free | NB | softmax has read the scores (1) | mma |
| k_valid_ready, k_valid_free | NB | kv_valid_producer, softmax (1) | the other one |
| so_ready | NB | softmax: weights stored, O multiplied (1) | mma |
| v_p0_ready, v_p1_ready | NB | TMA bytes of V's first, second half of keys (1) | mma |
| sv_p0_done, sv_p1_done | NB | commit of the products over them (1) | load_v; p1 also softmax |
| k_fp8_tma_done, v_fp8_tma_done | NB | TMA bytes of fp8 rows (1) | load_k, load_v |
| k_plain_done | NB | TMA bytes of 16-bit columns of rows of 656, 584 bytes (1) | load_k |

There is one buffer of K and one of V; NB = 2 barriers of each kind tell the signals of a step from
those of the step before. Over an fp8 cache the producers complete the four ready barriers.

| shared memory of a CTA | bytes | before the steps | after them |
|---|---|---|---|
| q_smem | 64 x 192 x 2 = 24576 | first 192 columns of Q | |
| k_smem | 64 x 576 x 2 = 73728 | Q's last 128 columns, from tile 4 on | |
| v_smem | 64 x 512 x 2 = 65536 | Q's 256 columns from 192 on | output |
| p_smem | 64 x 64 x 2 = 8192 | | |
| is_k_valid, barriers | 16 + 208 | | |
| fp8: raw rows of K | 64 x 576, or of rows of 656 bytes 512, of 584 bytes 448 | | |
| fp8: scales of K and V | 64 x 4 x (blocks of 576 + blocks of 512) | | |

| tensor memory | columns |
|---|---|
| O: two atoms of 256 columns | 0 … 255, each atom in half the lanes |
| S | 256 … 319 |
| Q's columns 192 … 575, two to a cell | 320 … 511 |

The original's fp32 P, 32 KiB, is not needed.
`openmla.kernels.blackwell.sparse.plan.SparseKernel` has the bytes in full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory

from openmla.kernels.blackwell.records import HeadRows
from openmla.kernels.blackwell.sparse.load import GATHERED, HEADS, load_k, load_q, load_v
from openmla.kernels.blackwell.sparse.mma import mma
from openmla.kernels.blackwell.sparse.records import (
    Barriers,
    KeyList,
    Pool,
    Results,
    ScaleSource,
    SecondKeys,
    SecondLists,
    SecondRows,
    Sources,
    Spans,
    Tiles,
    TokenLists,
    WorkItem,
)
from openmla.kernels.blackwell.sparse.rows import (
    count_of,
    keys_seen,
    kv_valid_producer,
    seen_of,
    steps_of,
    unseen,
    vector_layout,
    whole_steps,
)
from openmla.kernels.blackwell.sparse.rows_fp8 import load_k_fp8, load_v_fp8, scale_blocks
from openmla.kernels.blackwell.sparse.softmax import finish, scaled, softmax
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.turning import COUNTS as ANGLE_COUNTS
from openmla.kernels.gluon.turning import VECTORS as ANGLE_VECTORS
from openmla.kernels.gluon.turning import Angles


@gluon.jit
def serve_rows(  # noqa: PLR0913
    tmem,
    smem,
    bars,
    results,
    sink_ptr,
    work,
    factor,
    HOW: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
    REGS: gl.constexpr,
    TILE: gl.constexpr,
    TURNED: gl.constexpr,
):
    """The softmax partition: all steps, then the result."""
    state = softmax(tmem, smem, bars, work.steps, factor, HOW, MAP, TMEM, REGS)
    finish(tmem, smem.v, state, results, sink_ptr, work, MAP, TMEM, REGS, TILE, TURNED)


@gluon.jit
def load_rows_of_k(
    sources,
    keys,
    smem,
    bars,
    steps,
    EARLY: gl.constexpr,
    HOW: gl.constexpr,
    CACHE: gl.constexpr,
):
    """The load_k partition."""
    if CACHE is None:
        load_k(sources.k, keys, smem.k, bars, steps, EARLY, HOW)
    else:
        load_k_fp8(sources, keys, smem, bars, steps, EARLY, HOW, CACHE)


@gluon.jit
def load_q_and_v(
    sources,
    keys,
    smem,
    bars,
    work,
    SPLIT: gl.constexpr,
    HOW: gl.constexpr,
    CACHE: gl.constexpr,
    TILE: gl.constexpr,
    BYTES: gl.constexpr,
):
    """The load_v partition."""
    ready = bars.q_ready.index(0)
    load_q(sources.q, sources.q_warp, smem, ready, work.token, work.first_head, SPLIT, TILE)
    if CACHE is None:
        load_v(sources.v, keys, smem.v, bars, work.steps, HOW)
    else:
        load_v_fp8(sources, keys, smem, bars, work.steps, HOW, CACHE, TILE, BYTES)


COUNTS = [
    "factor",
    "rows",
    "topk",
    "tokens",
    "batch",
    "window",
    "heads",
    "head_blocks",
    "page_step",
    "row_step",
    *("requests", "second_requests", "second_topk", "second_rows"),
    *("second_page_step", "second_row_step"),
    *ANGLE_COUNTS,
]
STRIDES = [
    "indices_stride",
    "lse_stride_t",
    "lse_stride_h",
    "logits_stride_t",
    "logits_stride_h",
    "scale_stride_page",
    "scale_stride_row",
    *("second_indices_stride", "second_scale_page", "second_scale_row"),
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr",
    "lengths_ptr",
    "cu_ptr",
    "lse_ptr",
    "max_logits_ptr",
    "sink_ptr",
    "q_scale_ptr",
    "scale_ptr",
    *("request_ptr", "begin_ptr", "second_scale_ptr", "second_indices_ptr"),
    *("second_lengths_ptr", "second_request_ptr", "second_begin_ptr"),
    *ANGLE_VECTORS,
]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_desc,
    q_warp_desc,
    k_desc,
    plain_desc,
    v_desc,
    out_desc,
    second_raw_desc,
    second_plain_desc,
    scale_ptr,
    indices_ptr,
    lengths_ptr,
    cu_ptr,
    lse_ptr,
    max_logits_ptr,
    sink_ptr,
    q_scale_ptr,
    factor,
    rows,
    topk,
    tokens,
    batch,
    window,
    heads,
    head_blocks,
    page_step,
    row_step,
    scale_stride_page,
    scale_stride_row,
    indices_stride,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    request_ptr,
    begin_ptr,
    requests,
    second_scale_ptr,
    second_indices_ptr,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_requests,
    second_topk,
    second_rows,
    second_page_step,
    second_row_step,
    second_scale_page,
    second_scale_row,
    second_indices_stride,
    angles_ptr,
    positions_ptr,
    angle_lines,
    angles_stride,
    HOW: gl.constexpr,
    SPLIT: gl.constexpr,
    CACHE: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
    REGS: gl.constexpr,
    TILE: gl.constexpr,
    V_TILE: gl.constexpr,
    WORDS: gl.constexpr,
    BYTES: gl.constexpr,
    REGISTERS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """One token and up to 64 of its heads. These constants are records:

    | constant | record |
    |---|---|
    | HOW, SPLIT | How, QSplit |
    | CACHE | Fp8Cache; None for 16-bit rows |
    | MAP, TMEM | TmemMap, TmemLayouts |
    | REGS, REGISTERS | RegisterLayouts, Registers |

    TILE, V_TILE, WORDS, BYTES: shared memory layouts of tiles of 16, 16, 32 and 8 bits. TURNED:
    columns of the output that are turned back by the angles that `angles_ptr` has for
    `positions_ptr` (gluon.turning.Angles), 0 for none.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    B_TOPK: gl.constexpr = HOW.b_topk
    NB: gl.constexpr = HOW.num_mbars
    INDEXING: gl.constexpr = HOW.indexing
    EARLY: gl.constexpr = SPLIT.smem // GATHERED
    TILES: gl.constexpr = EARLY + SPLIT.tmem // GATHERED
    spans = None
    if request_ptr is not None:
        spans = Spans(request=request_ptr, begin=begin_ptr, requests=requests)
    second = None
    if second_indices_ptr is not None:
        second_spans = None
        if second_request_ptr is not None:
            second_spans = Spans(
                request=second_request_ptr, begin=second_begin_ptr, requests=second_requests
            )
        second = SecondLists(
            indices=second_indices_ptr,
            lengths=second_lengths_ptr,
            stride=second_indices_stride,
            topk=second_topk,
            spans=second_spans,
            pool=Pool(
                rows=second_rows,
                page_step=second_page_step,
                row_step=second_row_step,
                base=None,
            ),
        )
    lists = TokenLists(
        indices=indices_ptr,
        lengths=lengths_ptr,
        cu_seqlens=cu_ptr,
        stride=indices_stride,
        topk=topk,
        tokens=tokens,
        batch=batch,
        ranges=None,
        spans=spans,
        second=second,
        window=window,
    )
    program = gl.program_id(0)
    token = program // head_blocks
    first_head = program % head_blocks * HEADS
    line = token
    first_key = None
    if (request_ptr is not None) | (second_indices_ptr is not None):
        line, first_key, count = seen_of(token, lists)
    elif cu_ptr is None:
        count = count_of(lists, token)
    else:  # the last tokens see most keys
        token = tokens - 1 - token
        line, count = keys_seen(token, lists, INDEXING)
    factor = scaled(factor, q_scale_ptr, token)
    if window is not None:
        first_key = unseen(count, window)
    seen = count
    if first_key is not None:
        seen = count - first_key
    steps = steps_of(seen, B_TOPK)
    second_keys = None
    if second_indices_ptr is not None:
        after = whole_steps(seen, B_TOPK)
        more = seen_of(token, second)
        steps = gl.maximum(after + whole_steps(more.length - more.first, B_TOPK), 1)
        second_keys = SecondKeys(
            after=after,
            indices=second_indices_ptr + more.line.to(gl.int64) * second_indices_stride,
            length=more.length,
            first=more.first,
            rows=second_rows,
            page_step=second_page_step,
            row_step=second_row_step,
        )
    keys = KeyList(
        indices=indices_ptr + line.to(gl.int64) * indices_stride,
        length=count,
        pool=Pool(rows=rows, page_step=page_step, row_step=row_step, base=None),
        first=first_key,
        second=second_keys,
    )

    q_smem = gl.allocate_shared_memory(DTYPE, [EARLY, HEADS, GATHERED], TILE)
    k_smem = gl.allocate_shared_memory(DTYPE, [TILES, B_TOPK, GATHERED], TILE)
    v_smem = gl.allocate_shared_memory(DTYPE, [2 * HOW.v_atoms, B_TOPK // 2, 256], V_TILE)
    p_smem = gl.allocate_shared_memory(DTYPE, [HEADS, B_TOPK], TILE)
    FLAT: gl.constexpr = vector_layout(1)
    is_k_valid = gl.allocate_shared_memory(gl.uint8, [NB, B_TOPK // 8], FLAT)
    ALL: gl.constexpr = TMEM.whole
    tmem = allocate_tensor_memory(gl.float32, [128, 512], ALL)

    q_ready = barriers(1, 1)
    q_copied = barriers(1, 1)
    k_p0_ready = barriers(NB, 1)
    k_p1_ready = barriers(NB, 1)
    qk_ss_done = barriers(NB, 1)
    qk_ts_done = barriers(NB, 1)
    v_p0_ready = barriers(NB, 1)
    v_p1_ready = barriers(NB, 1)
    sv_p0_done = barriers(NB, 1)
    sv_p1_done = barriers(NB, 1)
    p_free = barriers(NB, 1)
    so_ready = barriers(NB, 1)
    k_valid_ready = barriers(NB, 1)
    k_valid_free = barriers(NB, 1)

    # Only an fp8 cache needs these; k_plain_done only where rope is stored in 16 bits.
    k_raw = None
    k_scales = None
    v_scales = None
    k_fp8_tma_done = None
    k_plain_done = None
    v_fp8_tma_done = None
    if CACHE is not None:
        RAW: gl.constexpr = CACHE.raw_tiles
        k_raw = gl.allocate_shared_memory(gl.float8e4nv, [RAW, B_TOPK, GATHERED], BYTES)
        BLOCKS: gl.constexpr = scale_blocks(CACHE)
        k_scales = gl.allocate_shared_memory(gl.float32, [BLOCKS.k, B_TOPK], FLAT)
        v_scales = gl.allocate_shared_memory(gl.float32, [BLOCKS.v, B_TOPK], FLAT)
        k_fp8_tma_done = barriers(NB, 1)
        k_plain_done = barriers(NB, 1) if RAW < TILES else None
        v_fp8_tma_done = barriers(NB, 1)
    smem = Tiles(
        q=q_smem,
        k=k_smem,
        k_raw=k_raw,
        k_scales=k_scales,
        v=v_smem,
        v_scales=v_scales,
        p=p_smem,
        is_k_valid=is_k_valid,
    )
    bars = Barriers(
        q_ready=q_ready,
        q_copied=q_copied,
        qk_ss_done=qk_ss_done,
        qk_ts_done=qk_ts_done,
        k_p0_ready=k_p0_ready,
        k_p1_ready=k_p1_ready,
        k_fp8_tma_done=k_fp8_tma_done,
        k_plain_done=k_plain_done,
        sv_p0_done=sv_p0_done,
        sv_p1_done=sv_p1_done,
        v_p0_ready=v_p0_ready,
        v_p1_ready=v_p1_ready,
        v_fp8_tma_done=v_fp8_tma_done,
        p_free=p_free,
        so_ready=so_ready,
        k_valid_ready=k_valid_ready,
        k_valid_free=k_valid_free,
    )
    work = WorkItem(token=token, first_head=first_head, heads=heads, steps=steps)
    more_rows = None
    if second_indices_ptr is not None:
        more_rows = SecondRows(
            raw=second_raw_desc,
            plain=second_plain_desc,
            scales=ScaleSource(
                base=second_scale_ptr,
                page_stride=second_scale_page,
                row_stride=second_scale_row,
            ),
        )
    sources = Sources(
        q=q_desc,
        q_warp=q_warp_desc,
        k=k_desc,
        plain=plain_desc,
        v=v_desc,
        scales=ScaleSource(
            base=scale_ptr, page_stride=scale_stride_page, row_stride=scale_stride_row
        ),
        second=more_rows,
    )
    results = Results(
        out=out_desc,
        lse=HeadRows(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h),
        max_logits=HeadRows(
            base=max_logits_ptr, token_stride=logits_stride_t, head_stride=logits_stride_h
        ),
        parts=None,
        angles=Angles(
            table=angles_ptr, positions=positions_ptr, lines=angle_lines, stride=angles_stride
        ),
    )
    gl.warp_specialize(
        [
            (
                serve_rows,
                (
                    tmem,
                    smem,
                    bars,
                    results,
                    sink_ptr,
                    work,
                    factor,
                    HOW,
                    MAP,
                    TMEM,
                    REGS,
                    TILE,
                    TURNED,
                ),
            ),
            (load_rows_of_k, (sources, keys, smem, bars, steps, EARLY, HOW, CACHE)),
            (load_q_and_v, (sources, keys, smem, bars, work, SPLIT, HOW, CACHE, TILE, BYTES)),
            (mma, (smem, tmem, bars, steps, B_TOPK, NB, MAP, TMEM, WORDS)),
            (kv_valid_producer, (keys, is_k_valid, bars, steps, HOW)),
        ],
        [4, 4, 1, 1],
        [REGISTERS.load_k, REGISTERS.load_v, REGISTERS.mma, REGISTERS.kv_valid_producer],
    )
