"""Dense prefill on Blackwell: per-head K and V, one rope row for all heads or none. 16 or 8 bits.

A block works on one work item (tiles.py): BM = 256 or 128 queries of a head, in query tiles of 128,
and walks their keys BN at a time, from the last block to the first. All tiles, columns and ring
depths are the plan's (MLAConfig; FA4Config without rope).

With a pair of CTAs (TMEM[6] = 2, Triton 3.8 and later) a query tile has 256 rows, of which each CTA
holds and weighs 128, and multiplies them by all keys: it loads half of the keys of K and half of
the columns of V, and two-CTA products read both. So K and V pass through shared memory once for 512
rows, and their rings are deeper. Each CTA has all partitions; the products are issued by the first.

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
one accumulator (V 256) has no softmax 1. QUERIES says which: 1, 2, or 0 for two tiles where the
work item has more than 128 rows left and one where it has not.

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| ring full * | slots | TMA bytes of K, the first with Q, or of V (1) | multiply |
| ring empty | slots | commit of the last product that reads the slot (1) | load |
| second * | 1 | TMA bytes of the second query tile (1) | multiply |
| s_full | 2 | commit of a score tile (1) | its softmax group |
| c_full | 2 | softmax: what a block rescales is told (1) | correction |
| p_full * | 2 | softmax: weights are stored; correction: O is in step (2) | multiply |
| o_full | 2 | commit of a product with V (1) | correction |
| t_full | 2 | softmax: row_max and row_sum are told (1) | correction |
| scale full | rope buffers | load: its copies of scales of keys have landed (32) | softmax |
| scale empty | rope buffers | both softmax groups have read them, or one for both (2) | load |
| q_raw, k_raw | query tiles, rope buffers | TMA bytes of FP8 rope (1) | dequantize |
| q_wide, k_wide | likewise | dequantize: the rope is 16 bits wide (1) | multiply |

Of a pair the first CTA has the barriers marked *, for both; commits signal the others in each.

| shared memory | bytes (128 + 64 -> 128 in bf16, two query tiles, BN 128, fused ring of 3) |
|---|---|
| q main, tail, rope | 2 x 128 x (128 + 0 + 64) x 2 = 98304; at the end out passes through main |
| ring of K main and V | 3 x 128 x 128 x 2 = 98304 |
| k rope | 2 x 128 x 64 x 2 = 32768 |
| scales of keys, if any | rope buffers x 128 x 4 |
| barriers | 17 x 8 = 136 |
| what Triton passes to the partitions, and their warps' states | about 340 |

`openmla.planning.blackwell.kernel.DenseKernel` has the bytes in full. The original has 1024 more
for the correction factors; they go through tensor memory here (see columns.py, where its map is),
and Triton's own bytes fit in their place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.dense.columns import allocate
from openmla.kernels.blackwell.dense.correction import correction
from openmla.kernels.blackwell.dense.load import load
from openmla.kernels.blackwell.dense.multiply import multiply
from openmla.kernels.blackwell.dense.ring import signals
from openmla.kernels.blackwell.dense.softmax import softmax
from openmla.kernels.blackwell.dense.tiles import work_item_of
from openmla.kernels.blackwell.dequantize import dequantize
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import LANES


@gluon.jit
def query_tiles(
    TILES: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr, DTYPE: gl.constexpr,
    ROPE_DTYPE: gl.constexpr,
):  # fmt: skip
    """Query tiles, TILES = (number, rows): main, tail and rope columns. For a missing one main
    stands in."""
    main = gl.allocate_shared_memory(DTYPE, [TILES[0], TILES[1], DIMS[0]], LAYOUTS[0])
    tail = main
    if DIMS[1] > 0:
        tail = gl.allocate_shared_memory(DTYPE, [TILES[0], TILES[1], DIMS[1]], LAYOUTS[1])
    rope = main
    if DIMS[2] > 0:
        rope = gl.allocate_shared_memory(ROPE_DTYPE, [TILES[0], TILES[1], DIMS[2]], LAYOUTS[2])
    return main, tail, rope


@gluon.jit
def key_tiles(
    BN: gl.constexpr, RING: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
    DTYPE: gl.constexpr, ROPE_DTYPE: gl.constexpr,
):  # fmt: skip
    """The slots of K (main, tail, rope columns) and of V; in a fused ring main and V are one."""
    ST: gl.constexpr = RING[1]
    if RING[0]:
        WIDE: gl.constexpr = DIMS[0] if DIMS[0] > DIMS[3] else DIMS[3]
        slots = gl.allocate_shared_memory(DTYPE, [ST, BN, WIDE], LAYOUTS[4])
        rope = slots
        if DIMS[2] > 0:
            rope = gl.allocate_shared_memory(ROPE_DTYPE, [RING[2], BN, DIMS[2]], LAYOUTS[2])
        return (slots, slots, rope), slots
    else:
        main = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[0]], LAYOUTS[0])
        rope = main
        if DIMS[2] > 0:
            rope = gl.allocate_shared_memory(ROPE_DTYPE, [RING[2], BN, DIMS[2]], LAYOUTS[2])
        tail = main
        if DIMS[1] > 0:
            tail = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[1]], LAYOUTS[1])
        v = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[3]], LAYOUTS[3])
        return (main, tail, rope), v


COUNTS = ["batch", "total_q", "total_k", "heads", "table_stride", "last_page", "factor"]
STRIDES = [
    "out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", "scales_stride_p",
    "scales_stride_r",
]  # fmt: skip
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr", "q_scale_ptr", "k_scale_ptr",
    "rope_scales_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_main_desc, q_tail_desc, q_rope_desc, k_main_desc, k_tail_desc, k_rope_desc, v_desc,
    k_scale_ptr, q_scale_ptr, rope_scales_ptr,
    out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    factor, batch, total_q, total_k, heads,
    table_stride, last_page, scales_stride_p, scales_stride_r, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h,
    QUERIES: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr, RING: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, ROPE_DTYPE: gl.constexpr, RAW: gl.constexpr,
    ROPE_SCALES: gl.constexpr, CAUSAL: gl.constexpr, SIGN: gl.constexpr, WEIGHTS: gl.constexpr,
    TMEM: gl.constexpr, TMEM_COLUMNS: gl.constexpr, BYTES: gl.constexpr, REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """DIMS: columns of main, tail, rope, V. RING: see ring.py. ROPE: source of K's rope, page size.
    RAW, ROPE_SCALES: see dequantize.py. WEIGHTS: threshold and bias, see softmax.py. TMEM: see
    columns.py. BYTES: on the barrier of a Q, of a K, of a V tile, from one CTA. LAYOUTS: as DIMS,
    then of a fused slot.
    """
    DTYPE: gl.constexpr = v_desc.dtype
    NQ: gl.constexpr = 1 if QUERIES == 1 else 2
    CTAS: gl.constexpr = TMEM[6]
    SCALED: gl.constexpr = k_scale_ptr is not None
    HOW: gl.constexpr = (CAUSAL, SIGN, WEIGHTS[0], WEIGHTS[1], DTYPE, SCALED)
    LOAD: gl.constexpr = (BYTES, RAW)
    BIAS: gl.constexpr = WEIGHTS[1]
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, total_k, heads)
    # Scales of keys are released by both softmax groups, block by block, so none may skip one.
    work = work_item_of(gl.program_id(0), shape, 128 * NQ * CTAS, BN, CAUSAL, not SCALED, CTAS)
    q_smem = query_tiles((NQ, 128 * CTAS), DIMS, LAYOUTS, DTYPE, ROPE_DTYPE)
    k_smem, v_smem = key_tiles(BN, RING, DIMS, LAYOUTS, DTYPE, ROPE_DTYPE)
    SLOTS: gl.constexpr = RING[1] if RING[0] else 2 * RING[1]
    ring = (signals(SLOTS, 1, CTAS, True), signals(SLOTS, 1, CTAS, False))
    s_full = signals(2, 1, CTAS, False)
    p_full = signals(2, 2, CTAS, True)
    o_full = signals(2, 1, CTAS, False)
    c_full = signals(2, 1, CTAS, False)
    t_full = signals(2, 1, CTAS, False)
    second = signals(1, 1, CTAS, True) if NQ == 2 else o_full
    # What a problem does not need stands for something else, and is never touched.
    scale_smem = k_smem[2]
    scale_bars = (s_full, s_full)
    q_raw = s_full
    q_wide = s_full
    k_raw = s_full
    k_wide = s_full
    if SCALED:
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        scale_smem = gl.allocate_shared_memory(gl.float32, [RING[2], BN], LINEAR)
        scale_bars = (barriers(RING[2], LANES), barriers(RING[2], 2))
    if RAW[0]:
        q_raw = barriers(NQ, 1)
        q_wide = barriers(NQ, 1)
    if RAW[1]:
        k_raw = barriers(RING[2], 1)
        k_wide = barriers(RING[2], 1)
    tmem = allocate(TMEM_COLUMNS, TMEM)
    smem = (q_smem, k_smem, v_smem)
    loaded = (q_smem, k_smem, v_smem, scale_smem)
    descs = (
        (q_main_desc, q_tail_desc, q_rope_desc),
        (k_main_desc, k_tail_desc, k_rope_desc),
        v_desc,
        k_scale_ptr,
    )
    results = ((out_ptr, out_stride_t, out_stride_h), (lse_ptr, lse_stride_t, lse_stride_h))
    table = (table_ptr, table_stride)
    scales = (scale_smem, q_scale_ptr)
    s_bars = (s_full, p_full, c_full, t_full, scale_bars)
    c_bars = (p_full, o_full, c_full, t_full)
    m_bars = (ring, second, s_full, p_full, o_full, (q_wide, k_wide))
    l_bars = (ring, second, scale_bars, q_raw, k_raw)
    w_bars = (q_raw, q_wide, k_raw, k_wide)
    soft = (tmem, s_bars, work, factor, scales)
    corr = (tmem, q_smem[0], c_bars, work, results, sink_ptr)
    mult = (smem, tmem, m_bars, work)
    fill = (descs, loaded, l_bars, table, work)
    source = (rope_scales_ptr, scales_stride_p, scales_stride_r, last_page)
    wide = ((q_smem[2], k_smem[2]), w_bars, table, work, source)
    R0: gl.constexpr = REGISTERS[0]
    R1: gl.constexpr = REGISTERS[1]
    R2: gl.constexpr = REGISTERS[2]
    if GROUPS == 2 and RAW[3]:
        gl.warp_specialize(
            [
                (softmax, (soft, 0, QUERIES, HOW, TMEM)),
                (softmax, (soft, 1, QUERIES, HOW, TMEM)),
                (correction, (corr, QUERIES, BIAS, TMEM)),
                (multiply, (mult, QUERIES, RING, DIMS, RAW, TMEM)),
                (load, (fill, QUERIES, RING, DIMS, ROPE, LOAD)),
                (dequantize, (wide, RING, ROPE, RAW, ROPE_SCALES)),
            ],
            [4, 4, 1, 1, 2],
            [R0, R1, R2, R2, R2],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (softmax, (soft, 0, QUERIES, HOW, TMEM)),
                (softmax, (soft, 1, QUERIES, HOW, TMEM)),
                (correction, (corr, QUERIES, BIAS, TMEM)),
                (multiply, (mult, QUERIES, RING, DIMS, RAW, TMEM)),
                (load, (fill, QUERIES, RING, DIMS, ROPE, LOAD)),
            ],
            [4, 4, 1, 1],
            [R0, R1, R2, R2],
        )
    elif RAW[3]:
        gl.warp_specialize(
            [
                (softmax, (soft, 0, QUERIES, HOW, TMEM)),
                (correction, (corr, QUERIES, BIAS, TMEM)),
                (multiply, (mult, QUERIES, RING, DIMS, RAW, TMEM)),
                (load, (fill, QUERIES, RING, DIMS, ROPE, LOAD)),
                (dequantize, (wide, RING, ROPE, RAW, ROPE_SCALES)),
            ],
            [4, 1, 1, 2],
            [R1, R2, R2, R2],
        )
    else:
        gl.warp_specialize(
            [
                (softmax, (soft, 0, QUERIES, HOW, TMEM)),
                (correction, (corr, QUERIES, BIAS, TMEM)),
                (multiply, (mult, QUERIES, RING, DIMS, RAW, TMEM)),
                (load, (fill, QUERIES, RING, DIMS, ROPE, LOAD)),
            ],
            [4, 1, 1],
            [R1, R2, R2],
        )
