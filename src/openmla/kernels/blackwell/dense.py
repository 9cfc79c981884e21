# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dense MLA prefill on Blackwell."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.columns import allocate
from openmla.kernels.blackwell.correction import correction
from openmla.kernels.blackwell.load import load
from openmla.kernels.blackwell.multiply import multiply
from openmla.kernels.blackwell.ring import barriers
from openmla.kernels.blackwell.softmax import softmax
from openmla.kernels.blackwell.tiles import piece_of


@gluon.jit
def query_tiles(
    NUMBER: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr, DTYPE: gl.constexpr,
    ROPE_DTYPE: gl.constexpr,
):  # fmt: skip
    """NUMBER query tiles: main, tail and rope columns. A missing tail stands for main."""
    main = gl.allocate_shared_memory(DTYPE, [NUMBER, 128, DIMS[0]], LAYOUTS[0])
    tail = main
    if DIMS[1] > 0:
        tail = gl.allocate_shared_memory(DTYPE, [NUMBER, 128, DIMS[1]], LAYOUTS[1])
    rope = gl.allocate_shared_memory(ROPE_DTYPE, [NUMBER, 128, DIMS[2]], LAYOUTS[2])
    return main, tail, rope


@gluon.jit
def key_tiles(
    BN: gl.constexpr, RING: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
    DTYPE: gl.constexpr, ROPE_DTYPE: gl.constexpr,
):  # fmt: skip
    """The slots of K (main, tail, rope columns) and of V; in a fused ring main and V are one."""
    ST: gl.constexpr = RING[1]
    rope = gl.allocate_shared_memory(ROPE_DTYPE, [RING[2], BN, DIMS[2]], LAYOUTS[2])
    if RING[0]:
        WIDE: gl.constexpr = DIMS[0] if DIMS[0] > DIMS[3] else DIMS[3]
        slots = gl.allocate_shared_memory(DTYPE, [ST, BN, WIDE], LAYOUTS[4])
        return (slots, slots, rope), slots
    else:
        main = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[0]], LAYOUTS[0])
        tail = main
        if DIMS[1] > 0:
            tail = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[1]], LAYOUTS[1])
        v = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[3]], LAYOUTS[3])
        return (main, tail, rope), v


COUNTS = ["batch", "total_q", "total_k", "heads", "table_stride", "factor"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_main_desc,
    q_tail_desc,
    q_rope_desc,
    k_main_desc,
    k_tail_desc,
    k_rope_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    table_ptr,
    factor,
    batch,
    total_q,
    total_k,
    heads,
    table_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    QUERIES: gl.constexpr,
    BN: gl.constexpr,
    RING: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    THRESHOLD: gl.constexpr,
    TMEM: gl.constexpr,
    TMEM_COLUMNS: gl.constexpr,
    BYTES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """To be described."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = (CAUSAL, SIGN, THRESHOLD, DTYPE)
    NQ: gl.constexpr = 1 if QUERIES == 1 else 2
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, total_k, heads)
    piece = piece_of(gl.program_id(0), shape, 128 * NQ, BN, CAUSAL)
    q_smem = query_tiles(NQ, DIMS, LAYOUTS, DTYPE, q_rope_desc.dtype)
    k_smem, v_smem = key_tiles(BN, RING, DIMS, LAYOUTS, DTYPE, k_rope_desc.dtype)
    SLOTS: gl.constexpr = RING[1] if RING[0] else 2 * RING[1]
    ring = (barriers(SLOTS, 1), barriers(SLOTS, 1))
    s_full = barriers(2, 1)
    p_full = barriers(2, 2)
    o_full = barriers(2, 1)
    c_full = barriers(2, 1)
    t_full = barriers(2, 1)
    second = o_full
    if NQ == 2:
        second = barriers(1, 1)
    tmem = allocate(TMEM_COLUMNS, TMEM)
    smem = (q_smem, k_smem, v_smem)
    descs = (
        (q_main_desc, q_tail_desc, q_rope_desc),
        (k_main_desc, k_tail_desc, k_rope_desc),
        v_desc,
    )
    results = ((out_ptr, out_stride_t, out_stride_h), (lse_ptr, lse_stride_t, lse_stride_h))
    table = (table_ptr, table_stride)
    s_bars = (s_full, p_full, c_full, t_full)
    m_bars = (ring, second, s_full, p_full, o_full)
    c_all = (p_full, o_full, c_full, t_full)
    gl.warp_specialize(
        [
            (softmax, (tmem, s_bars, piece, factor, 0, QUERIES, HOW, TMEM)),
            (softmax, (tmem, s_bars, piece, factor, 1, QUERIES, HOW, TMEM)),
            (
                correction,
                (tmem, q_smem[0], c_all, piece, results, sink_ptr, QUERIES, TMEM),
            ),
            (multiply, (smem, tmem, m_bars, piece[2], piece[6], QUERIES, RING, DIMS, TMEM)),
            (load, (descs, smem, (ring, second), table, piece, QUERIES, RING, DIMS, ROPE, BYTES)),
        ],
        [4, 4, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2], REGISTERS[2]],
    )
