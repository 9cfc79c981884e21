"""Latent MLA prefill on Blackwell: rows of 512 + 64 columns, all heads share them.

The rows of a token are those of a list, or (rows.py) all that its sequence has in a paged cache.

A CTA serves one token and up to 64 of its heads, padded to the 64 rows of a product, and walks the
token's list of rows B_TOPK = 64 at a time. The kernel obeys an `MLASparseConfig` of one CTA; those
of a pair are pair/kernel.py's.

| partition | warps | does |
|---|---|---|
| softmax (default) | 4 | scores to weights, multiplies O, stores the result (softmax.py) |
| load_k | 4 | gathers K, for an fp8 cache also dequantizes it (load.py, rows_fp8.py) |
| load_v | 4 | loads Q, gathers V, likewise |
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
| k_rope_done | NB | TMA bytes of rope in rows of 656 bytes (1) | load_k |

There is one buffer of K and of V; NB = 2 barriers of each kind let a step's signals be told from
those of the step before. Over an fp8 cache the four ready barriers are completed by the producers.

| shared memory of a CTA | bytes | before the steps | after them |
|---|---|---|---|
| q_smem | 64 x 192 x 2 = 24576 | first 192 columns of Q | |
| k_smem | 64 x 576 x 2 = 73728 | Q's last 128 columns, from tile 4 on | |
| v_smem | 64 x 512 x 2 = 65536 | Q's 256 columns from 192 on | output |
| p_smem | 64 x 64 x 2 = 8192 | | |
| is_k_valid, barriers | 16 + 208 | | |
| fp8: raw rows of K | 64 x 576, or of rows of 656 bytes 512 | | |
| fp8: scales of K and V | 64 x 4 x (blocks of 576 + blocks of 512) | | |

| tensor memory | columns |
|---|---|
| O: two atoms of 256 columns | 0 … 255, each atom in half the lanes |
| S | 256 … 319 |
| Q's columns 192 … 575, two to a cell | 320 … 511 |

The original's fp32 P, 32 KiB, is not needed.
`openmla.planning.blackwell.sparse.kernel.SparseKernel` has the bytes in full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory

from openmla.kernels.blackwell.sparse.load import GATHERED, HEADS, load_k, load_q, load_v
from openmla.kernels.blackwell.sparse.mma import mma
from openmla.kernels.blackwell.sparse.rows import (
    count_of,
    keys_seen,
    kv_valid_producer,
    steps_of,
    vector_layout,
)
from openmla.kernels.blackwell.sparse.rows_fp8 import load_k_fp8, load_v_fp8, scale_blocks
from openmla.kernels.blackwell.sparse.softmax import finish, softmax
from openmla.kernels.gluon.barriers import barriers


@gluon.jit
def serve_rows(
    tmem, smem, bars, results, sink_ptr, place, factor, HOW: gl.constexpr, MAP: gl.constexpr,
    TMEM: gl.constexpr, REGS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The softmax partition: all steps, then the result."""
    p_smem, v_smem, is_k_valid = smem
    token, first_head, heads, steps = place
    state = softmax(
        tmem, p_smem, is_k_valid, bars, steps, factor, HOW[0], HOW[1], MAP, TMEM, REGS
    )  # fmt: skip
    finish(
        tmem, v_smem, state, results, sink_ptr, token, first_head, heads, MAP, TMEM, REGS, TILE
    )  # fmt: skip


@gluon.jit
def load_q_and_v(
    q_descs, v_source, keys, smem, q_ready, v_bars, place, SPLIT: gl.constexpr, HOW: gl.constexpr,
    CACHE: gl.constexpr, TILE: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """The load_v partition."""
    q_smem, k_smem, v_smem, v_scales = smem
    token, first_head, steps = place
    load_q(
        q_descs[0], q_descs[1], q_smem, k_smem, v_smem, q_ready.index(0), token, first_head, SPLIT,
        TILE,
    )  # fmt: skip
    v_desc, scales = v_source
    if CACHE is None:
        load_v(v_desc, keys, v_smem, v_bars, steps, HOW)
    else:
        load_v_fp8(
            v_desc, scales, keys, v_smem, v_scales, v_bars, steps, HOW, CACHE, BYTES
        )  # fmt: skip


@gluon.jit
def load_rows_of_k(
    source, keys, k_smem, k_raw, k_scales, bars, steps, EARLY: gl.constexpr, HOW: gl.constexpr,
    CACHE: gl.constexpr,
):  # fmt: skip
    """The load_k partition."""
    k_desc, rope_desc, scales = source
    if CACHE is None:
        load_k(k_desc, keys, k_smem, bars, steps, EARLY, HOW)
    else:
        load_k_fp8(
            (k_desc, rope_desc), scales, keys, k_smem, k_raw, k_scales, bars, steps, EARLY, HOW,
            CACHE,
        )  # fmt: skip


COUNTS = [
    "factor", "rows", "topk", "tokens", "batch", "heads", "head_blocks", "page_step", "row_step",
]  # fmt: skip
STRIDES = [
    "indices_stride", "lse_stride_t", "lse_stride_h", "logits_stride_t", "logits_stride_h",
    "scale_stride_page", "scale_stride_row",
]  # fmt: skip
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr", "lengths_ptr", "cu_ptr", "lse_ptr", "max_logits_ptr", "sink_ptr", "scale_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_desc, q_warp_desc, k_desc, rope_desc, v_desc, out_desc,
    scale_ptr, indices_ptr, lengths_ptr, cu_ptr, lse_ptr, max_logits_ptr, sink_ptr,
    factor, rows, topk, tokens, batch, heads, head_blocks, page_step, row_step,
    scale_stride_page, scale_stride_row, indices_stride, lse_stride_t, lse_stride_h,
    logits_stride_t, logits_stride_h,
    HOW: gl.constexpr, SPLIT: gl.constexpr, CACHE: gl.constexpr, MAP: gl.constexpr,
    TMEM: gl.constexpr, REGS: gl.constexpr, TILE: gl.constexpr, V_TILE: gl.constexpr,
    WORDS: gl.constexpr, BYTES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """HOW: B_TOPK, barriers of a kind, page sizes of rows and of scales (0: rows lie evenly), CTAs,
    page size of a block table (0: indices are lists), causal. SPLIT: columns of Q in shared and in
    tensor memory. CACHE: None, or see rows_fp8.py. MAP: first columns of O, S and Q in tensor
    memory. TMEM: layouts of O, S, Q, Q's copy, and of all. REGS: registers for S
    and for some columns of O, and how many columns those are. TILE, V_TILE, WORDS, BYTES: shared
    layouts of tiles of 16, 16, 32 and 8 bits."""
    DTYPE: gl.constexpr = q_desc.dtype
    B_TOPK: gl.constexpr = HOW[0]
    NB: gl.constexpr = HOW[1]
    EARLY: gl.constexpr = SPLIT[0] // GATHERED
    TILES: gl.constexpr = EARLY + SPLIT[1] // GATHERED
    program = gl.program_id(0)
    token = program // head_blocks
    first_head = program % head_blocks * HEADS
    of_line = token
    if cu_ptr is None:
        count = count_of(lengths_ptr, token, topk)
    else:  # the last tokens see most keys
        token = tokens - 1 - token
        of_line, count = keys_seen(token, cu_ptr, lengths_ptr, batch, tokens, topk, HOW)
    steps = steps_of(count, B_TOPK)
    line = indices_ptr + of_line.to(gl.int64) * indices_stride
    keys = (line, count, rows, page_step, row_step)

    q_smem = gl.allocate_shared_memory(DTYPE, [EARLY, HEADS, GATHERED], TILE)
    k_smem = gl.allocate_shared_memory(DTYPE, [TILES, B_TOPK, GATHERED], TILE)
    v_smem = gl.allocate_shared_memory(DTYPE, [4, B_TOPK // 2, 256], V_TILE)
    p_smem = gl.allocate_shared_memory(DTYPE, [HEADS, B_TOPK], TILE)
    FLAT: gl.constexpr = vector_layout(1)
    is_k_valid = gl.allocate_shared_memory(gl.uint8, [NB, B_TOPK // 8], FLAT)
    ALL: gl.constexpr = TMEM[4]
    tmem = allocate_tensor_memory(gl.float32, [128, 512], ALL)

    q_ready = barriers(1, 1)
    q_copied = barriers(1, 1)
    k_ready = (barriers(NB, 1), barriers(NB, 1))
    qk_done = (barriers(NB, 1), barriers(NB, 1))
    v_ready = (barriers(NB, 1), barriers(NB, 1))
    sv_done = (barriers(NB, 1), barriers(NB, 1))
    p_free = barriers(NB, 1)
    so_ready = barriers(NB, 1)
    k_valid_ready = barriers(NB, 1)
    k_valid_free = barriers(NB, 1)

    k_scales = is_k_valid  # without an fp8 cache something must stand there
    v_scales = is_k_valid
    k_raw = is_k_valid
    fp8_done = ((p_free, p_free), p_free)
    if CACHE is not None:
        k_raw = gl.allocate_shared_memory(gl.float8e4nv, [CACHE[1], B_TOPK, GATHERED], BYTES)
        BLOCKS: gl.constexpr = scale_blocks(CACHE, TILES)
        k_scales = gl.allocate_shared_memory(gl.float32, [BLOCKS[0], B_TOPK], FLAT)
        v_scales = gl.allocate_shared_memory(gl.float32, [BLOCKS[1], B_TOPK], FLAT)
        raw_done = barriers(NB, 1)
        rope_done = barriers(NB, 1) if CACHE[1] < TILES else raw_done
        fp8_done = ((raw_done, rope_done), barriers(NB, 1))
    k_bars = (q_copied, qk_done[0], qk_done[1], k_ready[0], k_ready[1], fp8_done[0])
    v_bars = (q_copied, sv_done[0], sv_done[1], v_ready[0], v_ready[1], fp8_done[1])
    soft_bars = (qk_done[1], p_free, k_valid_ready, k_valid_free, sv_done[1], so_ready)
    qk_bars = (k_ready[0], k_ready[1], p_free, qk_done[0], qk_done[1])
    mma_bars = ((q_ready, q_copied), qk_bars, so_ready, v_ready, sv_done)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    max_logits = (max_logits_ptr, logits_stride_t, logits_stride_h)
    scales = (scale_ptr, scale_stride_page, scale_stride_row)
    gl.warp_specialize(
        [
            (serve_rows, (
                tmem, (p_smem, v_smem, is_k_valid), soft_bars, (out_desc, lse, max_logits),
                sink_ptr, (token, first_head, heads, steps), factor, HOW, MAP, TMEM, REGS, TILE,
            )),
            (load_rows_of_k, (
                (k_desc, rope_desc, scales), keys, k_smem, k_raw, k_scales, k_bars, steps, EARLY,
                HOW, CACHE,
            )),
            (load_q_and_v, (
                (q_desc, q_warp_desc), (v_desc, scales), keys,
                (q_smem, k_smem, v_smem, v_scales), q_ready, v_bars,
                (token, first_head, steps), SPLIT, HOW, CACHE, TILE, BYTES,
            )),
            (mma, (
                (q_smem, k_smem, v_smem, p_smem), tmem, mma_bars, steps, B_TOPK, NB, MAP,
                TMEM, WORDS,
            )),
            (kv_valid_producer, (
                keys, is_k_valid, k_valid_ready, k_valid_free, steps, HOW,
            )),
        ],
        [4, 4, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2], REGISTERS[3]],
    )  # fmt: skip
