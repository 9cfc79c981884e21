"""Dense prefill on Blackwell: per-head K and V, one rope row for all heads or none.

Q and K have 16 or 8 bits, V and the weights 16: V of 8 bits is upcast by a kernel before
(gluon/upcast).

A block works on one work item (tiles.py): BM = 256 or 128 queries of a head, in query tiles of 128,
and walks their keys BN at a time, from the last block to the first. All tiles, columns and ring
depths are the plan's (DenseConfig).

With a pair of CTAs (TMEM.ctas = 2, Triton 3.8 and later) a query tile has 256 rows, of which each
CTA holds and weighs 128, and multiplies them by all keys: it loads half of the keys of K and half
of the columns of V, and two-CTA products read both. So K and V pass through shared memory once for
512 rows, and their rings are deeper. Each CTA has all partitions; the first issues the products.

| partition | warps | registers | does |
|---|---|---|---|
| softmax 0 (default), softmax 1 | 4 each | 184 | scores to weights (softmax.py) |
| correction | 4 | 96 | rescales the accumulators, stores out and lse (correction.py) |
| multiply | 1 | 48 | issues all products (multiply.py) |
| load | 1 | 48 | all TMA loads (load.py) |
| dequantize, only for rope stored in FP8 | 2 | 48 | rope to 16 bits (dequantize.py) |

(With one query tile 224, 128 and 112 registers; without softmax 1 216, 144 and 144.)

With two query tiles, softmax group i and accumulator i belong to query tile i. With one, blocks
take turns in the two score tiles and all go through softmax group 0 and accumulator 0, in order: a
row's bits are the same as with two, so they do not depend on what else is in the batch. A plan with
one accumulator (V 256) has no softmax 1. QUERIES is the number of query tiles: 1, 2, or 0 for two
where the work item has more than 128 rows left and one where it has not.

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| ring.full * | slots | TMA bytes of K, the first with Q, or of V (1) | multiply |
| ring.empty | slots | commit of the last product that reads the slot (1) | load |
| second * | 1 | TMA bytes of the second query tile (1) | multiply |
| s_full | 2 | commit of a score tile (1) | its softmax group |
| c_full | 2 | softmax: the factor for O is in tensor memory (1) | correction |
| p_full * | 2 | softmax: weights are stored; correction: O is in step (2) | multiply |
| o_full | 2 | commit of a product with V (1) | correction |
| t_full | 2 | softmax: row_max and row_sum are there as well (1) | correction |
| scales.full | rope buffers | load: its copies of scales of keys have landed (32) | softmax |
| scales.empty | rope buffers | both softmax groups have read them, or one for both (2) | load |
| q_raw, k_raw | query tiles, rope buffers | TMA bytes of FP8 rope (1) | dequantize |
| q_wide, k_wide | query tiles, rope buffers | dequantize: the rope is 16 bits wide (1) | multiply |

With a pair, the first CTA has the barriers marked * for both; each CTA has its own of the others,
and a commit signals both.

| shared memory | bytes (128 + 64 -> 128 in bf16, two query tiles, BN 128, fused ring of 3) |
|---|---|
| q main, tail, rope | 2 x 128 x (128 + 0 + 64) x 2 = 98304; at the end out passes through main |
| ring of K main and V | 3 x 128 x 128 x 2 = 98304 |
| k rope | 2 x 128 x 64 x 2 = 32768 |
| scales of keys, if any | rope buffers x 128 x 4 |
| barriers | 17 x 8 = 136 |
| what Triton passes to the partitions, and their warps' states | about 340 |

`openmla.kernels.blackwell.dense.resources.DenseKernel` has the bytes in full. The original has 1024
more for the correction factors; here these go through tensor memory (columns.py has its map), and
Triton's own bytes fit in their place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.dense.columns import allocate
from openmla.kernels.blackwell.dense.correction import correction
from openmla.kernels.blackwell.dense.load import load
from openmla.kernels.blackwell.dense.multiply import multiply
from openmla.kernels.blackwell.dense.records import (
    Barriers,
    BlockTable,
    CacheScales,
    KeyMask,
    LoadHow,
    MultiplyHow,
    Parts,
    Results,
    RingBarriers,
    Sequences,
    SoftmaxHow,
    Sources,
    Tiles,
    TokenScales,
    Visibility,
    Windows,
)
from openmla.kernels.blackwell.dense.ring import signals
from openmla.kernels.blackwell.dense.softmax import softmax
from openmla.kernels.blackwell.dense.tiles import blocks_of_windows, work_item_of
from openmla.kernels.blackwell.dequantize import dequantize
from openmla.kernels.blackwell.records import HeadRows
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import LANES

COUNTS = ["batch", "total_q", "total_k", "heads", "table_stride", "last_page", "factor"]
COUNTS += ["mask_words", "window"]
STRIDES = [
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
    "scales_stride_p",
    "scales_stride_r",
    "mask_stride",
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "lse_ptr",
    "sink_ptr",
    "cu_q_ptr",
    "cu_k_ptr",
    "starts_ptr",
    "mask_ptr",
    "table_ptr",
    "q_scale_ptr",
    "k_scale_ptr",
    "rope_scales_ptr",
]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_main_desc,
    q_tail_desc,
    q_rope_desc,
    k_main_desc,
    k_tail_desc,
    k_rope_desc,
    v_desc,
    k_scale_ptr,
    q_scale_ptr,
    rope_scales_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    starts_ptr,
    mask_ptr,
    table_ptr,
    factor,
    batch,
    total_q,
    total_k,
    heads,
    table_stride,
    last_page,
    scales_stride_p,
    scales_stride_r,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    mask_stride,
    mask_words,
    window,
    QUERIES: gl.constexpr,
    GROUPS: gl.constexpr,
    KEY_GROUP: gl.constexpr,
    BN: gl.constexpr,
    RING: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    ROPE_DTYPE: gl.constexpr,
    RAW: gl.constexpr,
    ROPE_SCALES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    THRESHOLD: gl.constexpr,
    TMEM: gl.constexpr,
    TMEM_COLUMNS: gl.constexpr,
    BYTES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """QUERIES: as in multiply.py. GROUPS: softmax groups. KEY_GROUP: query heads that share a head
    of K and V. THRESHOLD: see softmax.py. TMEM_COLUMNS: columns to allocate. These constants are
    records:

    | constant | record |
    |---|---|
    | RING | Ring, see ring.py |
    | DIMS, LAYOUTS | Columns, TileLayouts |
    | ROPE, RAW, ROPE_SCALES | Rope, RawRope, RopeScales, see dequantize.py |
    | TMEM | TmemMap, see columns.py |
    | BYTES, REGISTERS | TileBytes, Registers |
    """
    DTYPE: gl.constexpr = q_main_desc.dtype
    V_DTYPE: gl.constexpr = v_desc.dtype
    NQ: gl.constexpr = 1 if QUERIES == 1 else 2
    CTAS: gl.constexpr = TMEM.ctas
    ROPES: gl.constexpr = RING.rope_buffers
    SCALED: gl.constexpr = k_scale_ptr is not None
    DEQUANTIZES: gl.constexpr = RAW.q or RAW.k
    SOFTMAX: gl.constexpr = SoftmaxHow(
        is_causal=CAUSAL,
        sign=SIGN,
        threshold=THRESHOLD,
        dtype=V_DTYPE,
        scale_buffers=ROPES,
    )
    MULTIPLY: gl.constexpr = MultiplyHow(columns=DIMS, ring=RING, raw=RAW)
    LOAD: gl.constexpr = LoadHow(
        columns=DIMS, ring=RING, rope=ROPE, raw=RAW, tile_bytes=BYTES, group=KEY_GROUP
    )
    sequences = Sequences(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        k_start=starts_ptr,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        heads=heads,
        window=window,
    )
    # Scales of keys are released by both softmax groups, block by block, so none may skip one.
    work = work_item_of(gl.program_id(0), sequences, 128 * NQ * CTAS, BN, CAUSAL, not SCALED, CTAS)

    windows = Windows(keys=None, blocks=None)
    if window is not None:
        windows = Windows(keys=window, blocks=blocks_of_windows(work, window, 128 * NQ * CTAS, BN))

    # A buffer or barrier that this problem does not use is None, not an alias of another one.
    ROWS: gl.constexpr = 128 * CTAS
    q_main = gl.allocate_shared_memory(DTYPE, [NQ, ROWS, DIMS.main], LAYOUTS.main)
    q_tail = None
    if DIMS.tail > 0:
        q_tail = gl.allocate_shared_memory(DTYPE, [NQ, ROWS, DIMS.tail], LAYOUTS.tail)
    q_rope = None
    if DIMS.rope > 0:
        q_rope = gl.allocate_shared_memory(ROPE_DTYPE, [NQ, ROWS, DIMS.rope], LAYOUTS.rope)
    ST: gl.constexpr = RING.stages
    K_COLUMNS: gl.constexpr = DIMS.v if RING.is_fused and DIMS.v > DIMS.main else DIMS.main
    K_LAYOUT: gl.constexpr = LAYOUTS.fused if RING.is_fused else LAYOUTS.main
    k_main = gl.allocate_shared_memory(DTYPE, [ST, BN, K_COLUMNS], K_LAYOUT)
    k_rope = None
    if DIMS.rope > 0:
        k_rope = gl.allocate_shared_memory(ROPE_DTYPE, [ROPES, BN, DIMS.rope], LAYOUTS.rope)
    k_tail = None
    v_smem = k_main  # in a fused ring, which has no tail, K and V take turns
    if not RING.is_fused:
        if DIMS.tail > 0:
            k_tail = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS.tail], LAYOUTS.tail)
        v_smem = gl.allocate_shared_memory(V_DTYPE, [ST, BN, DIMS.v], LAYOUTS.v)

    SLOTS: gl.constexpr = RING.stages if RING.is_fused else 2 * RING.stages
    ring = RingBarriers(full=signals(SLOTS, 1, CTAS, True), empty=signals(SLOTS, 1, CTAS, False))
    s_full = signals(2, 1, CTAS, False)
    p_full = signals(2, 2, CTAS, True)
    o_full = signals(2, 1, CTAS, False)
    c_full = signals(2, 1, CTAS, False)
    t_full = signals(2, 1, CTAS, False)
    second = signals(1, 1, CTAS, True) if NQ == 2 else None
    scale_smem = None
    scale_bars = None
    q_raw = None
    q_wide = None
    k_raw = None
    k_wide = None
    if SCALED:
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        scale_smem = gl.allocate_shared_memory(gl.float32, [ROPES, BN], LINEAR)
        scale_bars = RingBarriers(full=barriers(ROPES, LANES), empty=barriers(ROPES, 2))
    if RAW.q:
        q_raw = barriers(NQ, 1)
        q_wide = barriers(NQ, 1)
    if RAW.k:
        k_raw = barriers(ROPES, 1)
        k_wide = barriers(ROPES, 1)
    tmem = allocate(TMEM_COLUMNS, TMEM)
    smem = Tiles(
        q=Parts(main=q_main, tail=q_tail, rope=q_rope),
        k=Parts(main=k_main, tail=k_tail, rope=k_rope),
        v=v_smem,
        key_scales=scale_smem,
    )
    bars = Barriers(
        ring=ring,
        second=second,
        s_full=s_full,
        p_full=p_full,
        o_full=o_full,
        c_full=c_full,
        t_full=t_full,
        scales=scale_bars,
        q_raw=q_raw,
        q_wide=q_wide,
        k_raw=k_raw,
        k_wide=k_wide,
    )
    sources = Sources(
        q=Parts(main=q_main_desc, tail=q_tail_desc, rope=q_rope_desc),
        k=Parts(main=k_main_desc, tail=k_tail_desc, rope=k_rope_desc),
        v=v_desc,
        key_scales=k_scale_ptr,
    )
    results = Results(
        out=HeadRows(base=out_ptr, token_stride=out_stride_t, head_stride=out_stride_h),
        lse=HeadRows(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h),
    )
    table = BlockTable(base=table_ptr, entries=table_stride)
    rope_scales = CacheScales(
        base=rope_scales_ptr,
        page_stride=scales_stride_p,
        row_stride=scales_stride_r,
        last_page=last_page,
    )
    scales = TokenScales(keys=scale_smem, queries=q_scale_ptr)
    key_mask = KeyMask(base=mask_ptr, row_stride=mask_stride, words=mask_words)
    hidden = Visibility(key_mask=key_mask, windows=windows)
    R0: gl.constexpr = REGISTERS.softmax
    R1: gl.constexpr = REGISTERS.correction
    R2: gl.constexpr = REGISTERS.single
    if GROUPS == 2 and DEQUANTIZES:
        gl.warp_specialize(
            [
                (softmax, (tmem, bars, work, factor, scales, hidden, 0, QUERIES, SOFTMAX, TMEM)),
                (softmax, (tmem, bars, work, factor, scales, hidden, 1, QUERIES, SOFTMAX, TMEM)),
                (correction, (tmem, q_main, bars, work, results, sink_ptr, QUERIES, TMEM)),
                (multiply, (smem, tmem, bars, work, QUERIES, MULTIPLY, TMEM)),
                (load, (sources, smem, bars, table, work, QUERIES, LOAD)),
                (dequantize, (smem, bars, table, work, rope_scales, RING, ROPE, RAW, ROPE_SCALES)),
            ],
            [4, 4, 1, 1, 2],
            [R0, R1, R2, R2, R2],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (softmax, (tmem, bars, work, factor, scales, hidden, 0, QUERIES, SOFTMAX, TMEM)),
                (softmax, (tmem, bars, work, factor, scales, hidden, 1, QUERIES, SOFTMAX, TMEM)),
                (correction, (tmem, q_main, bars, work, results, sink_ptr, QUERIES, TMEM)),
                (multiply, (smem, tmem, bars, work, QUERIES, MULTIPLY, TMEM)),
                (load, (sources, smem, bars, table, work, QUERIES, LOAD)),
            ],
            [4, 4, 1, 1],
            [R0, R1, R2, R2],
        )
    elif DEQUANTIZES:
        gl.warp_specialize(
            [
                (softmax, (tmem, bars, work, factor, scales, hidden, 0, QUERIES, SOFTMAX, TMEM)),
                (correction, (tmem, q_main, bars, work, results, sink_ptr, QUERIES, TMEM)),
                (multiply, (smem, tmem, bars, work, QUERIES, MULTIPLY, TMEM)),
                (load, (sources, smem, bars, table, work, QUERIES, LOAD)),
                (dequantize, (smem, bars, table, work, rope_scales, RING, ROPE, RAW, ROPE_SCALES)),
            ],
            [4, 1, 1, 2],
            [R1, R2, R2, R2],
        )
    else:
        gl.warp_specialize(
            [
                (softmax, (tmem, bars, work, factor, scales, hidden, 0, QUERIES, SOFTMAX, TMEM)),
                (correction, (tmem, q_main, bars, work, results, sink_ptr, QUERIES, TMEM)),
                (multiply, (smem, tmem, bars, work, QUERIES, MULTIPLY, TMEM)),
                (load, (sources, smem, bars, table, work, QUERIES, LOAD)),
            ],
            [4, 1, 1],
            [R1, R2, R2],
        )
