"""Arguments of the scores kernels of Hopper and Blackwell: descriptors, vectors, counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands, Windows
from openmla.indexer.problem import DIM
from openmla.kernels.call import COUNTER, WORKSPACE, Sources, launch_counter, vector
from openmla.kernels.gluon.descriptors import fitting_strides, tile_layout

SOURCES: Sources = {
    "q_desc": "q",
    "k_desc": "keys",
    "s_desc": ("k_scale", "keys"),
    "weights_ptr": "weights",
    "starts_ptr": "starts",
    "ends_ptr": "ends",
    "table_ptr": "block_table",
    "out_ptr": ("out", WORKSPACE),  # where a selection follows, scores are its own
    "counter_ptr": COUNTER,
}
WINDOW_POINTERS = "starts_ptr", "ends_ptr", "sequences_ptr"
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def scores_arguments(
    op: ScoresOperands, out: Tensor, box_rows: int, tile_queries: int
) -> dict[str, Any]:
    """Arguments of a scores kernel but for windows and what its plan decides. box_rows,
    tile_queries: so many keys and queries are one TMA box."""
    columns, q = op.columns(out), op.q
    total_q, heads, _ = q.shape
    weights = op.weights if op.weights.stride(1) == 1 else op.weights.contiguous()
    table = vector(op.block_table)
    box, layout = [tile_queries, heads, DIM], tile_layout(DIM, 3, element=1)
    return {
        "q_desc": TensorDescriptor(q, list(q.shape), fitting_strides(q), box, layout),
        **_keys(op, box_rows),
        "weights_ptr": weights,
        "table_ptr": table,
        "out_ptr": out,
        "total_q": total_q,
        "columns": columns,
        "weights_stride": weights.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "out_stride": out.stride(0),
        "HEADS": heads,
        "PAGE": op.keys.page_size if isinstance(op.keys, IndexCache) else 0,
        "LAYOUT": tile_layout(DIM, 2, element=1),
    }


def window_arguments(windows: Windows) -> dict[str, Any]:
    """Windows, as a kernel reads or writes them."""
    arrays = vector(windows.starts), vector(windows.ends), windows.sequences
    return dict(zip(WINDOW_POINTERS, arrays, strict=True))


def counted(op: ScoresOperands, out: Tensor, chunk: int) -> dict[str, Any]:
    """Arguments of a kernel that fetches work items from an atomic counter. chunk: most keys of a
    work item."""
    return {
        "longest_ptr": op.windows.longest,
        "counter_ptr": launch_counter(op.device),
        "chunks": -(-op.columns(out) // chunk),
    }


def _keys(op: ScoresOperands, box_rows: int) -> dict[str, Any]:
    """Descriptors of values and scales, as pages; contiguous keys are one page. Of FP4 keys, of
    codes and exponents."""
    if isinstance(op.keys, IndexCache) and op.keys.key_dtype == "e2m1":
        return _fp4_keys(op.keys, box_rows)
    if isinstance(op.keys, IndexCache):
        values, scales = op.keys.values_view, op.keys.scales_view
        strides = fitting_strides(values), fitting_strides(scales)
    else:
        values, scales = op.keys[0][None], _aligned(op.keys[1])[None]
        rows = -(-values.shape[1] // 4) * 4  # a multiple of 16 bytes; no second page is ever read
        _, row, _ = fitting_strides(values)
        strides = [rows * row, row, 1], [rows, 1]
    boxes = [1, box_rows, DIM], [1, box_rows]
    layout = tile_layout(DIM, 3, element=1)
    return {
        "k_desc": TensorDescriptor(values, list(values.shape), strides[0], boxes[0], layout),
        "s_desc": TensorDescriptor(scales, list(scales.shape), strides[1], boxes[1], LINE),
    }


def _fp4_keys(keys: IndexCache, box_rows: int) -> dict[str, Any]:
    codes, exponents = keys.codes_view, keys.exponents_view.flatten(1).view(torch.int32)
    box, layout = [1, box_rows, codes.shape[2]], tile_layout(codes.shape[2], 3, element=1)
    lines = TensorDescriptor(
        exponents, list(exponents.shape), fitting_strides(exponents), [1, box_rows], LINE
    )
    return {
        "k_desc": TensorDescriptor(codes, list(codes.shape), fitting_strides(codes), box, layout),
        "s_desc": lines,
    }


def _aligned(x: Tensor) -> Tensor:
    """A vector that TMA can read: contiguous, at a multiple of 16 bytes."""
    fits = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
