"""Host side of the indexer's scores on CDNA4: from a plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands
from openmla.kernels.call import Call, vector
from openmla.kernels.cdna4.indexer.plan import Cdna4ScoresConfig
from openmla.kernels.cdna4.indexer.records import ScoresLayouts
from openmla.kernels.cdna4.indexer.scores import scores_kernel
from openmla.kernels.cdna4.layouts import CDNA4_MFMA
from openmla.planning import Plan

PIECE = 16
"""Bytes: strides of rows count them, so that the compiler knows that rows are aligned."""
K_WIDTH = 16
"""Neighboring columns of an operand in a lane: one load."""


def calls(plan: Plan, op: ScoresOperands, out: Tensor) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    config: Cdna4ScoresConfig = plan.config
    columns, total_q = op.columns(out), op.q.shape[0]
    if not columns or not total_q:
        return
    weights = op.weights if op.weights.stride(1) == 1 else op.weights.contiguous()
    table = vector(op.block_table)
    chunks = -(-columns // config.chunk)
    arguments = {
        **_keys(op),
        "q_ptr": op.q,
        "weights_ptr": weights,
        "starts_ptr": vector(op.windows.starts),
        "ends_ptr": vector(op.windows.ends),
        "sequences_ptr": op.windows.sequences,
        "table_ptr": table,
        "out_ptr": out,
        "total_q": total_q,
        "columns": columns,
        "chunks": chunks,
        "q_stride_t": op.q.stride(0) // PIECE,
        "q_stride_h": op.q.stride(1) // PIECE,
        "weights_stride": weights.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "out_stride": out.stride(0),
        "CHUNK": config.chunk,
        "HEADS": config.heads,
        "PAGE": config.page_size,
        "LAYOUTS": _layouts(),
        "num_warps": config.warps,
    }
    yield Call(scores_kernel, -(-total_q // config.queries) * chunks, arguments)


def _keys(op: ScoresOperands) -> dict[str, Any]:
    """Values and scales, page by page; contiguous keys have no pages."""
    if isinstance(op.keys, IndexCache):
        values, scales = op.keys.values_view, op.keys.scales_view
        pages = values.stride(0) // PIECE, scales.stride(0)
    else:
        values, scales = op.keys
        pages = 0, 0
    return {
        "k_ptr": values,
        "scales_ptr": scales,
        "last_page": values.shape[0] - 1 if values.dim() == 3 else 0,
        "k_stride_page": pages[0],
        "k_stride_t": values.stride(-2) // PIECE,
        "scales_stride_page": pages[1],
        "scales_stride_t": scales.stride(-1),
    }


@lru_cache
def _layouts() -> ScoresLayouts:
    """In a product, a lane has half the columns of one row."""
    products = AMDMFMALayout(
        version=CDNA4_MFMA, instr_shape=[32, 32, 64], transposed=True, warps_per_cta=[4, 1]
    )
    keys, queries = (gl.DotOperandLayout(i, products, K_WIDTH) for i in range(2))
    return ScoresLayouts(products, keys, queries)
