# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""One request whose keys fit one block: the dense kernel without its loops, rings and partitions.

A program is 4 warps with 64 queries of one head. It asks for everything at once and computes as
soon as it is there, so a short prompt costs little besides the trip to memory: 12.7 microseconds
for 128 tokens of 128 heads with cold caches, 16.3 by kernel.py in the same run (H200, CUDA graphs).
The products, their order and the softmax are those of kernel.py, and so are the bits.

Rows after the request's last query see no key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import load_ragged, load_rows
from openmla.kernels.gluon.scores import signed
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.kernel import COUNTS, STRIDES, VECTORS, column_tiles, issue_qk
from openmla.kernels.hopper.dense.producer import load_keys
from openmla.kernels.hopper.dense.softmax import hide, softmax_first
from openmla.kernels.hopper.dense.tiles import spans

ROWS = gl.constexpr(64)


@gluon.jit
def load_queries(descs, smem, barrier, row, head, DIMS: gl.constexpr):
    """64 rows of a head."""
    mbarrier.expect(barrier, ROWS * (DIMS[0] + DIMS[1] + DIMS[2]) * 2)
    load_rows(descs[0], row, head, 0, barrier, smem[0].index(0))
    if DIMS[1] > 0:
        load_rows(descs[1], row, head, DIMS[0], barrier, smem[1].index(0))
    if DIMS[2] > 0:
        load_rows(descs[2], row, head, DIMS[0] + DIMS[1], barrier, smem[2].index(0))


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def one_block_kernel(  # noqa: PLR0913
    q_main_desc, q_tail_desc, q_rope_desc, k_main_desc, k_tail_desc, k_rope_desc, v_desc, out_ptr,
    lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, starts_ptr, table_ptr, factor, batch, total_q, rest_q,
    total_k, heads, table_stride, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    BN: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr, CAUSAL: gl.constexpr,
    SIGN: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Arguments as those of dense_kernel; a program for every head and 64 rows."""
    DTYPE: gl.constexpr = v_desc.dtype
    D_V: gl.constexpr = DIMS[3]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    head = gl.program_id(0) % heads
    first = gl.program_id(0) // heads * ROWS
    q_smem = column_tiles(1, ROWS, DIMS, LAYOUTS, DTYPE)
    k_smem = column_tiles(1, BN, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [BN, D_V], LAYOUTS[3])
    ready = barriers(3, 1)
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, rest_q, total_k, heads, starts_ptr)
    q_start, q_len, key, keys = spans(first * 0, shape)
    token = q_start + first
    k_descs = (k_main_desc, k_tail_desc, k_rope_desc)
    paged = ((table_ptr, table_stride), keys)
    load_keys(k_descs, k_smem, ready.index(0), 0, key, head, paged, 0, DIMS, BN, ROPE, 0)
    load_queries((q_main_desc, q_tail_desc, q_rope_desc), q_smem, ready.index(1), token, head, DIMS)
    mbarrier.expect(ready.index(2), BN * D_V * 2)
    load_ragged(v_desc, key, keys, 0, head, ready.index(2), v_smem)
    mbarrier.wait(ready.index(0), 0)
    mbarrier.wait(ready.index(1), 0)
    S = issue_qk(q_smem, k_smem, 0, 0, SL, DIMS)
    S = signed(warpgroup_mma_wait(0, deps=(S,)), SIGN)
    weights, row_max, sums = softmax_first(
        hide(S, keys - q_len + first + 1, keys, CAUSAL), factor, BN
    )
    P = gl.convert_layout(weights.to(DTYPE), PL)
    mbarrier.wait(ready.index(2), 0)
    O = gl.zeros([64, D_V], gl.float32, OL)
    O = warpgroup_mma(P, v_smem, O, is_async=True)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, sums.type.layout)) + first
    sums = gl.where((row < q_len)[:, None], sums, 0.0)
    O = warpgroup_mma_wait(0, deps=(O,))
    out = (out_ptr, out_stride_t, out_stride_h)
    results = (out, (lse_ptr, lse_stride_t, lse_stride_h), sink_ptr, (out_ptr, out_ptr))
    finish(O, row_max, sums, (head, token, total_q - token, head), results, 0, 1, 0)
