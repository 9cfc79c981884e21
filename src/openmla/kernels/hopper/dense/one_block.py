# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""One request whose keys fit one block: the dense kernel without its loops, rings and partitions.

A program is 4 warps with 64 queries of one head. It starts all loads at once and computes as soon
as they arrive, so a short prompt costs little besides the trip to memory: 12.7 microseconds
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
from openmla.kernels.gluon.boxes import load_ragged
from openmla.kernels.gluon.scores import signed
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.kernel import COUNTS, STRIDES, VECTORS, column_tiles, issue_qk
from openmla.kernels.hopper.dense.producer import load_keys, load_query_rows
from openmla.kernels.hopper.dense.records import (
    ColumnTiles,
    KeyBlock,
    Output,
    OutputTile,
    Requests,
    Results,
    TableLine,
)
from openmla.kernels.hopper.dense.softmax import hide, softmax_first
from openmla.kernels.hopper.dense.tiles import request_rows

ROWS = gl.constexpr(64)


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def one_block_kernel(  # noqa: PLR0913
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
    starts_ptr,
    table_ptr,
    factor,
    batch,
    total_q,
    rest_q,
    total_k,
    heads,
    table_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    BN: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Arguments are those of dense_kernel; there is a program for every head and 64 rows."""
    DTYPE: gl.constexpr = v_desc.dtype
    D_V: gl.constexpr = DIMS.v
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    head = gl.program_id(0) % heads
    first = gl.program_id(0) // heads * ROWS
    Q_ROPE: gl.constexpr = LAYOUTS.rope
    K_ROPE: gl.constexpr = LAYOUTS.k_rope
    q_smem = column_tiles(1, ROWS, DIMS, LAYOUTS, DTYPE, Q_ROPE, DTYPE)
    k_smem = column_tiles(1, BN, DIMS, LAYOUTS, DTYPE, K_ROPE, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [BN, D_V], LAYOUTS.v)
    ready = barriers(3, 1)
    k_ready = ready.index(0)
    q_ready = ready.index(1)
    v_ready = ready.index(2)
    requests = Requests(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        rest_q=rest_q,
        total_k=total_k,
        heads=heads,
        k_start=starts_ptr,
    )
    q_start, q_len, key, keys = request_rows(first * 0, requests)
    token = q_start + first
    q_descs = ColumnTiles(q_main_desc, q_tail_desc, q_rope_desc)
    k_descs = ColumnTiles(k_main_desc, k_tail_desc, k_rope_desc)
    line = TableLine(table_ptr, table_stride)  # of the only request
    block = KeyBlock(head=head, row=key, keys=keys, key=0, line=line)
    load_keys(k_descs, k_smem, k_ready, 0, block, DIMS, BN, ROPE, 0)
    mbarrier.expect(q_ready, ROWS * (DIMS.main + DIMS.tail + DIMS.rope) * 2)
    load_query_rows(q_descs, q_smem, q_ready, 0, token, head, DIMS)
    mbarrier.expect(v_ready, BN * D_V * 2)
    load_ragged(v_desc, key, keys, 0, head, v_ready, v_smem)
    mbarrier.wait(k_ready, 0)
    mbarrier.wait(q_ready, 0)
    S = issue_qk(q_smem, k_smem, 0, 0, SL, DIMS)
    S = signed(warpgroup_mma_wait(0, deps=(S,)), SIGN)
    weights, row_max, sums = softmax_first(
        hide(S, keys - q_len + first + 1, keys, CAUSAL), factor, BN
    )
    P = gl.convert_layout(weights.to(DTYPE), PL)
    mbarrier.wait(v_ready, 0)
    O = gl.zeros([64, D_V], gl.float32, OL)
    O = warpgroup_mma(P, v_smem, O, is_async=True)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, sums.type.layout)) + first
    sums = gl.where((row < q_len)[:, None], sums, 0.0)
    O = warpgroup_mma_wait(0, deps=(O,))
    results = Results(
        out=Output(out_ptr, out_stride_t, out_stride_h),
        lse=Output(lse_ptr, lse_stride_t, lse_stride_h),
        sink=sink_ptr,
        part_sums=None,
        part_state=None,
    )
    # Every row up to total_q is written: the rows after the request's last query see no key.
    tile = OutputTile(head=head, token=token, rows=total_q - token, slot=None)
    finish(O, row_max, sums, tile, results, 0, 1, 0)
