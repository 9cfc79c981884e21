"""Latent MLA prefill on Blackwell with a pair of CTAs: 128 heads, rows of 512 + 64 columns or 512.

The rows of a token are listed, or those that it sees of its sequence in a paged cache, or a span of
positions there (see sparse/rows.py). With a second source, its rows follow in steps of their own.
A pair serves one token at a time, or a range of a token's keys (items.py), and walks its rows
KEYS = 256 at a time by two-CTA products: each CTA holds 64 heads of Q, of the weights and of the
output. Pairs are persistent: as many as fit on the chip take tokens in turn, so that the first
products of a token run under the last softmax and the store of the one before.

| partition | warps | does |
|---|---|---|
| softmax (default) | 4 | scores to weights, multiplies O, stores the result (softmax.py) |
| load | 4 | Q by TMA boxes, K and V by gather4, in the order of the products (load.py) |
| multiply | 1 | issues all products (multiply.py); CTA 0 |
| kv_valid_producer | 1 | one bit per key: does its index count? (softmax.py) |

K and V go through one ring of slots of 16 KiB a CTA. A slot of K holds 64 columns of all keys of a
step, half the keys in each CTA; a slot of V holds 64 keys and 256 columns, half the columns in each
CTA. A step is 9 slots of K, and 8 of V behind the K of the next step. So a slot is refilled as soon
as its product is done, a seventeenth of a step, and gathers are in flight SLOTS - 1 products ahead.

256 keys because Q is read from shared memory once for them all: what bounds the kernel is shared
memory, and with 128 keys Q would be a fifth of its bytes. (The original has most of Q in tensor
memory; the compiler refuses a two-CTA product of 64 rows a CTA with its left operand there.)

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_full * | 1 | TMA bytes of Q (1) | multiply |
| q_free | 1 | commit of a token's last product with Q (1) | load |
| full * | SLOTS | TMA bytes of a slot (1) | multiply |
| empty | SLOTS | commit of its product (1) | load |
| s_full | 2 | commit of a step's scores (1) | softmax |
| p_full * | 1 | softmax: weights stored, O multiplied (1) | multiply |
| o_done | 1 | commit of a step's products with V (1) | softmax |
| valid_full, valid_free | 2 | kv_valid_producer, softmax (1) | the other one |

CTA 0 has the barriers marked *, which wait for both CTAs (2); commits signal both. Scores need none
to be overwritten: products of step k + 2 are issued after the weights of step k were waited for.

| shared memory of a CTA | bytes, 16 bits | 8 bits |
|---|---|---|
| q_smem, 9 tiles (8 without rope) | 64 x 576 x 2 = 73728 | 36864 |
| ring | SLOTS x 16384 | SLOTS x 8192 |
| p_smem, then output | 64 x 256 x 2 = 32768 | the same: weights in two parts |

Tensor memory: O in two atoms of 256 columns (128 cells each), then two score tiles of 128 cells.
`openmla.kernels.blackwell.pair.plan.PairKernel` has the bytes in full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory

from openmla.kernels.blackwell.pair.items import KEYS, ROWS, barriers
from openmla.kernels.blackwell.pair.load import load
from openmla.kernels.blackwell.pair.multiply import multiply
from openmla.kernels.blackwell.pair.records import (
    Barriers,
    ScoreScale,
    Sources,
    TensorMemory,
    Tiles,
)
from openmla.kernels.blackwell.pair.softmax import kv_valid_producer, softmax
from openmla.kernels.blackwell.records import HeadRows
from openmla.kernels.blackwell.sparse.records import (
    Pool,
    Ranges,
    Results,
    SecondLists,
    Spans,
    TokenLists,
)
from openmla.kernels.blackwell.sparse.rows import vector_layout
from openmla.kernels.gluon.ranges.records import Parts
from openmla.kernels.gluon.turning import COUNTS as ANGLE_COUNTS
from openmla.kernels.gluon.turning import VECTORS as ANGLE_VECTORS
from openmla.kernels.gluon.turning import Angles

COUNTS = [
    *("factor", "rows", "topk", "tokens", "batch", "window", "heads", "page_step", "row_step"),
    *("part_rows", "rest_q", "requests"),
    *("second_requests", "second_topk", "second_rows", "second_base"),
    *ANGLE_COUNTS,
]
STRIDES = [
    "indices_stride",
    "second_indices_stride",
    "lse_stride_t",
    "lse_stride_h",
    "logits_stride_t",
    "logits_stride_h",
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    *("indices_ptr", "lengths_ptr", "cu_ptr", "lse_ptr", "max_logits_ptr", "sink_ptr"),
    *("q_scale_ptr", "part_state_ptr", "request_ptr", "begin_ptr"),
    *("second_indices_ptr", "second_lengths_ptr", "second_request_ptr", "second_begin_ptr"),
    *ANGLE_VECTORS,
]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def pair_kernel(  # noqa: PLR0913
    q_desc,
    k_desc,
    v_desc,
    out_desc,
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
    page_step,
    row_step,
    part_sums_ptr,
    part_state_ptr,
    part_rows,
    rest_q,
    request_ptr,
    begin_ptr,
    requests,
    second_indices_ptr,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_requests,
    second_topk,
    second_rows,
    second_base,
    second_indices_stride,
    indices_stride,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    angles_ptr,
    positions_ptr,
    angle_lines,
    angles_stride,
    INDEXING: gl.constexpr,
    Q_TILES: gl.constexpr,
    SLOTS: gl.constexpr,
    WEIGHTS: gl.constexpr,
    ATOM: gl.constexpr,
    REGS: gl.constexpr,
    TILE: gl.constexpr,
    V_TILE: gl.constexpr,
    OUT_TILE: gl.constexpr,
    REGISTERS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """INDEXING: sparse.records.Indexing. Q_TILES: tiles of 64 columns. WEIGHTS: WeightRange, see
    softmax.py. REGISTERS: a record. TURNED: columns of the output that are turned back by the
    angles that `angles_ptr` has for `positions_ptr` (gluon.turning.Angles), 0 for none.
    ATOM, REGS: layouts of a tile of 256 columns in tensor memory and in registers. TILE, V_TILE,
    OUT_TILE: shared memory layouts of tiles of Q and K, of V, of the output."""
    DTYPE: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = 16 // DTYPE.primitive_bitwidth
    q_smem = gl.allocate_shared_memory(DTYPE, [Q_TILES, ROWS, 64], TILE)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KEYS, 64], TILE)
    p_smem = gl.allocate_shared_memory(DTYPE, [ROWS, PARTS * KEYS], TILE)
    FLAT: gl.constexpr = vector_layout(2)
    is_k_valid = gl.allocate_shared_memory(gl.uint8, [2, KEYS // 8], FLAT)
    first = allocate_tensor_memory(gl.float32, [ROWS, 256], ATOM)
    second = allocate_tensor_memory(gl.float32, [ROWS, 256], ATOM)
    S = allocate_tensor_memory(gl.float32, [2, ROWS, KEYS], ATOM)

    q_full = barriers(1, True)
    q_free = barriers(1, False)
    full = barriers(SLOTS, True)
    empty = barriers(SLOTS, False)
    s_full = barriers(2, False)
    p_full = barriers(1, True)
    o_done = barriers(1, False)
    valid_full = barriers(2, False)
    valid_free = barriers(2, False)

    smem = Tiles(q=q_smem, ring=ring, p=p_smem, is_k_valid=is_k_valid)
    tmem = TensorMemory(outputs=(first, second), scores=S)
    bars = Barriers(
        q_full=q_full,
        q_free=q_free,
        full=full,
        empty=empty,
        s_full=s_full,
        p_full=p_full,
        o_done=o_done,
        valid_full=valid_full,
        valid_free=valid_free,
    )
    parts = None
    ranges = None
    if part_sums_ptr is not None:
        parts = Parts(sums=part_sums_ptr, state=part_state_ptr)
        ranges = Ranges(heads=heads, rest_q=rest_q, part_rows=part_rows)
    spans = None
    if request_ptr is not None:
        spans = Spans(request=request_ptr, begin=begin_ptr, requests=requests)
    second_spans = None
    if second_request_ptr is not None:
        second_spans = Spans(
            request=second_request_ptr, begin=second_begin_ptr, requests=second_requests
        )
    second = None
    if second_indices_ptr is not None:
        second = SecondLists(
            indices=second_indices_ptr,
            lengths=second_lengths_ptr,
            stride=second_indices_stride,
            topk=second_topk,
            spans=second_spans,
            pool=Pool(rows=second_rows, page_step=page_step, row_step=row_step, base=second_base),
        )
    lists = TokenLists(
        indices=indices_ptr,
        lengths=lengths_ptr,
        cu_seqlens=cu_ptr,
        stride=indices_stride,
        topk=topk,
        tokens=tokens,
        batch=batch,
        ranges=ranges,
        spans=spans,
        second=second,
        window=window,
    )
    pool = Pool(rows=rows, page_step=page_step, row_step=row_step, base=None)
    sources = Sources(q=q_desc, k=k_desc, v=v_desc)
    results = Results(
        out=out_desc,
        lse=HeadRows(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h),
        max_logits=HeadRows(
            base=max_logits_ptr, token_stride=logits_stride_t, head_stride=logits_stride_h
        ),
        parts=parts,
        angles=Angles(
            table=angles_ptr, positions=positions_ptr, lines=angle_lines, stride=angles_stride
        ),
    )
    gl.warp_specialize(
        [
            (
                softmax,
                (
                    tmem,
                    smem,
                    bars,
                    lists,
                    results,
                    sink_ptr,
                    heads,
                    ScoreScale(factor=factor, q_scale=q_scale_ptr),
                    INDEXING,
                    WEIGHTS,
                    REGS,
                    OUT_TILE,
                    TURNED,
                ),
            ),
            (load, (sources, smem, bars, lists, pool, INDEXING, V_TILE)),
            (multiply, (smem, tmem, bars, lists, INDEXING, V_TILE)),
            (kv_valid_producer, (is_k_valid, bars, lists, pool, INDEXING)),
        ],
        [4, 1, 1],
        [REGISTERS.load, REGISTERS.multiply, REGISTERS.kv_valid_producer],
    )
