"""Host side of the indexer on Hopper: from a plan and its operands to kernel calls.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import (
    IndexOperands,
    ScoresOperands,
    SelectOperands,
    SelectResults,
)
from openmla.indexer.problem import DIM
from openmla.kernels.call import Call, vector
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.indexer.scores import scores_kernel
from openmla.kernels.hopper.indexer.select import select_kernel
from openmla.planning.hopper.indexer import HopperScoresConfig, HopperSelectConfig
from openmla.planning.indexer import IndexPlan

LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_counters: dict[tuple[torch.device, int], Tensor] = {}


def calls(plan: IndexPlan, operands: IndexOperands, results: Any) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    if isinstance(operands, SelectOperands):
        if operands.scores.shape[0]:
            yield _select(plan.config, operands, results)
    elif operands.columns(results) and operands.q.shape[0]:
        yield _scores(plan.config, operands, results)


def _scores(config: HopperScoresConfig, op: ScoresOperands, out: Tensor) -> Call:
    windows, columns = op.windows, op.columns(out)
    total_q, heads, _ = op.q.shape
    weights = op.weights if op.weights.stride(1) == 1 else op.weights.contiguous()
    table = vector(op.block_table)
    q_box = [DIM // heads, heads, DIM]
    q = op.q
    arguments = {
        "q_desc": TensorDescriptor(
            q, list(q.shape), list(q.stride()), q_box, tile_layout(DIM, 3, element=1)
        ),
        **_keys(config, op),
        "weights_ptr": weights,
        "starts_ptr": vector(windows.starts),
        "ends_ptr": vector(windows.ends),
        "sequences_ptr": windows.sequences,
        "longest_ptr": windows.longest,
        "table_ptr": table,
        "out_ptr": out,
        "counter_ptr": _counter(q.device),
        "total_q": total_q,
        "columns": columns,
        "chunks": -(-columns // config.chunk),
        "weights_stride": weights.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "out_stride": out.stride(0),
        "CFG": (config.consumers, config.BN, config.stages, config.query_stages, config.chunk),
        "HEADS": heads,
        "PAGE": config.page_size,
        "REGISTERS": (config.registers.consumer, config.registers.producer),
        "LAYOUT": tile_layout(DIM, 2, element=1),
        "num_warps": 4,
    }
    work_items = -(-total_q // config.block_queries) * arguments["chunks"]
    return Call(scores_kernel, min(work_items, config.sm_count), arguments)


def _select(config: HopperSelectConfig, op: SelectOperands, results: SelectResults) -> Call:
    scores, windows = op.scores, op.windows
    table, mask = vector(op.block_table), results.mask
    programs = min(scores.shape[0], config.sm_count * config.blocks_per_sm)
    arguments = {
        "scores_ptr": scores,
        "starts_ptr": vector(windows.starts),
        "ends_ptr": vector(windows.ends),
        "sequences_ptr": None if table is None else windows.sequences,
        "table_ptr": table,
        "out_ptr": results.out,
        "counts_ptr": results.counts,
        "mask_ptr": mask,
        "lists_ptr": scores.new_empty(programs * 2 * config.list_size, dtype=torch.int32),
        "rows": scores.shape[0],
        "width": scores.shape[1],
        "k": op.topk,
        "words": 0 if mask is None else mask.shape[1],
        "pages": 0 if table is None else table.shape[1],
        "stride": scores.stride(0) // 4,
        "out_stride": results.out.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "CFG": (config.warps, config.chunk_vectors, config.list_vectors, config.stages),
        "PAGE": op.page_size if table is not None else 0,
        "ADD": op.add_starts,
        "LONG": config.long_rows,
        "num_warps": config.warps,
        "maxnreg": config.max_registers,
    }
    return Call(select_kernel, programs, arguments)


def _keys(config: HopperScoresConfig, op: ScoresOperands) -> dict[str, Any]:
    """Descriptors of values and scales, as pages; contiguous keys are one page."""
    if isinstance(op.keys, IndexCache):
        values, scales = op.keys.values_view, op.keys.scales_view
        strides = list(values.stride()), list(scales.stride())
    else:
        values, scales = op.keys[0][None], _aligned(op.keys[1])[None]
        rows = -(-values.shape[1] // 4) * 4  # of the one page: its stride is never used
        strides = [rows * values.stride(1), values.stride(1), 1], [rows, 1]
    boxes = [1, config.box_rows, DIM], [1, config.box_rows]
    layout = tile_layout(DIM, 3, element=1)
    return {
        "k_desc": TensorDescriptor(values, list(values.shape), strides[0], boxes[0], layout),
        "s_desc": TensorDescriptor(scales, list(scales.shape), strides[1], boxes[1], LINE),
    }


def _aligned(x: Tensor) -> Tensor:
    """A vector that TMA can read: contiguous, at a multiple of 16 bytes."""
    fits = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _counter(device: torch.device) -> Tensor:
    """A zero from which a launch draws its work, and which it leaves zero.

    One per stream: launches on a stream follow one another. A captured graph gets its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, driver.active.get_current_stream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]
