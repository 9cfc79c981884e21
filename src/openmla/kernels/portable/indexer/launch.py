"""Host side of the portable indexer: from a plan and its operands to kernel calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import IndexOperands, ScoresOperands, SelectOperands, SelectResults
from openmla.kernels.call import WORKSPACE, Call, Sources, vector
from openmla.kernels.portable.formats import as_operand
from openmla.kernels.portable.indexer.scores import scores_kernel
from openmla.kernels.portable.indexer.select import select_kernel
from openmla.planning import Plan
from openmla.planning.target import target_by_name

SCORES_SOURCES: Sources = {
    "q_ptr": "q",
    "weights_ptr": "weights",
    "values_ptr": "keys",
    "scales_ptr": ("k_scale", "keys"),
    "starts_ptr": "starts",
    "ends_ptr": "ends",
    "table_ptr": "block_table",
    "out_ptr": ("out", WORKSPACE),  # where a selection follows, scores are its own
}
SELECT_SOURCES: Sources = {
    "scores_ptr": "scores",
    "starts_ptr": "starts",
    "ends_ptr": "ends",
    "table_ptr": "block_table",
    "out_ptr": "out",
    "counts_ptr": "counts",
    "mask_ptr": "mask",
}


def calls(plan: Plan, operands: IndexOperands, results: Any) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    if isinstance(operands, SelectOperands):
        if operands.scores.shape[0]:
            yield _select(plan, operands, results)
    elif operands.columns(results) and operands.q.shape[0]:
        yield _scores(plan, operands, results)


def _scores(plan: Plan, op: ScoresOperands, out: Tensor) -> Call:
    config, windows = plan.config, op.windows
    native = target_by_name(plan.target).has_e4m3
    chunks = -(-op.columns(out) // config.chunk)
    total_q, heads, _ = op.q.shape
    weights = op.weights if op.weights.stride(1) == 1 else op.weights.contiguous()
    arguments = {
        "q_ptr": as_operand(op.q, native),
        "weights_ptr": weights,
        **_keys(op, native),
        "starts_ptr": vector(windows.starts),
        "ends_ptr": vector(windows.ends),
        "sequences_ptr": windows.sequences,
        "out_ptr": out,
        "total_q": total_q,
        "columns": op.columns(out),
        "chunks": chunks,
        "heads": heads,
        "q_stride_t": op.q.stride(0),
        "q_stride_h": op.q.stride(1),
        "weights_stride": weights.stride(0),
        "out_stride": out.stride(0),
        "TYPE": tl.float8e4nv if config.native_products else tl.bfloat16,
        "FP4": isinstance(op.keys, IndexCache) and op.keys.key_dtype == "e2m1",
        "QUERIES": config.queries,
        "HEADS": config.heads,
        "CHUNK": config.chunk,
        "BN": config.BN,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return Call(scores_kernel, -(-total_q // config.queries) * chunks, arguments, SCORES_SOURCES)


def _keys(op: ScoresOperands, native: bool) -> dict[str, Any]:
    """Where keys and their scales are: contiguous, or in pages."""
    if isinstance(op.keys, IndexCache):
        table = vector(op.block_table)
        assert table is not None
        if op.keys.key_dtype == "e2m1":
            values, scales = op.keys.codes_view, op.keys.exponents_view
        else:
            values, scales = as_operand(op.keys.values_view, native), op.keys.scales_view
        return {
            "values_ptr": values,
            "scales_ptr": scales,
            "table_ptr": table,
            "values_stride": values.stride(1),
            "values_stride_page": values.stride(0),
            "scales_stride_page": scales.stride(0),
            "table_stride": table.shape[1],
            "last_page": op.keys.num_pages - 1,
            "PAGE": op.keys.page_size,
        }
    values, scales = op.keys
    return {
        "values_ptr": as_operand(values, native),
        "scales_ptr": vector(scales),
        "table_ptr": None,
        "values_stride": values.stride(0),
        "values_stride_page": 0,
        "scales_stride_page": 0,
        "table_stride": 0,
        "last_page": 0,
        "PAGE": 0,
    }


def _select(plan: Plan, op: SelectOperands, results: SelectResults) -> Call:
    config, windows = plan.config, op.windows
    table, mask = vector(op.block_table), results.mask
    arguments = {
        "scores_ptr": op.scores,
        "starts_ptr": vector(windows.starts),
        "ends_ptr": vector(windows.ends),
        "sequences_ptr": None if table is None else windows.sequences,
        "table_ptr": table,
        "out_ptr": results.out,
        "counts_ptr": results.counts,
        "mask_ptr": mask,
        "width": op.scores.shape[1],
        "topk": op.topk,
        "pages": 0 if table is None else table.shape[1],
        "words": 0 if mask is None else mask.shape[1],
        "keep_first": op.keep_first,
        "keep_last": op.keep_last,
        "scores_stride": op.scores.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "out_stride": results.out.stride(0),
        "PAGE": op.page_size if table is not None else 0,
        "ADD": op.add_starts,
        "KEEPS": op.keep_first + op.keep_last > 0,
        "BLOCK": config.block,
        "num_warps": config.num_warps,
    }
    return Call(select_kernel, op.scores.shape[0], arguments, SELECT_SOURCES)
