"""Host side of Hopper's sparse backward: from a plan and its operands to kernel calls.

Statistics come first, of all queries. Then, some queries at a time, the walk over their lists and
the sums by row. Which entries name a row is found by a stable sort on the device: nothing here
waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.backward.operands import copyable
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands, by_row
from openmla.kernels.call import Call, scale_arguments, strides, vector
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.gluon.gradients.sums import summed
from openmla.kernels.hopper.latent.launch import heads_of_tokens
from openmla.kernels.hopper.sparse_backward.kernel import entry_pass_kernel
from openmla.kernels.hopper.sparse_backward.records import Columns, Registers, TileLayouts
from openmla.kernels.hopper.sparse_backward.row_sum import row_sum_kernel
from openmla.kernels.hopper.sparse_backward.statistics import statistics_kernel
from openmla.operands import SparseOperands
from openmla.planning import Plan

VECTOR = 8  # elements in 16 bytes
PANEL = 64  # columns of a tile of Q and d_out
STATISTICS_HEADS = 16  # of a program
NARROW_SPAN = 64  # bytes of a swizzle pattern of tiles that the warp-groups share: 32 columns
MOST_ROWS = 2**31 - 1  # no index names more


def calls(plan: Plan, operands: SparseBackwardOperands, gradients: RowGradients) -> Iterator[Call]:
    """What a backward pass runs, in order; nothing where nobody sees a row."""
    op, tokens = operands.forward, plan.variant.tokens
    if not tokens:
        gradients.clear()
        return
    total_q, heads, width = op.q.shape
    statistics = op.q.new_empty(2, total_q, heads, dtype=torch.float32)
    part_sink = None
    if gradients.sink is not None:
        part_sink = op.q.new_empty(total_q, heads, dtype=torch.float32)
    d_out = copyable(operands.d_out)
    yield _statistics(operands, d_out, statistics, part_sink)
    if part_sink is not None and gradients.sink is not None:
        yield summed(part_sink, gradients.sink)
    blocks = plan.config.head_blocks
    d_rows = gradients.rows
    d_q = op.q.new_empty(op.q.shape) if gradients.q is None else gradients.q
    walk = _walk(plan, op, d_out, statistics, d_q)
    if d_rows is None:
        yield Call(
            entry_pass_kernel, total_q * blocks, {**walk, "part_ptr": None, "first_token": 0}
        )
        return
    part = op.q.new_empty(tokens * op.indices.shape[1] * blocks, width)
    total = None
    if tokens < total_q:
        total = op.q.new_empty(op.rows, width, dtype=torch.float32)
    for first in range(0, total_q, tokens):
        last = min(first + tokens, total_q)
        own = {"part_ptr": part, "first_token": first}
        yield Call(entry_pass_kernel, (last - first) * blocks, {**walk, **own})
        entries = by_row(op, first, last)
        summing = {
            "part_ptr": part,
            "order_ptr": entries.order,
            "starts_ptr": entries.starts,
            "total_ptr": total,
            "d_rows_ptr": d_rows,
            "DIMS": walk["DIMS"],
            "BLOCKS": blocks,
            "FIRST": first == 0,
            "LAST": last == total_q,
            "num_warps": 1,
        }
        yield Call(row_sum_kernel, op.rows, summing)


def _statistics(
    operands: SparseBackwardOperands, d_out: Tensor, statistics: Tensor, part_sink: Tensor | None
) -> Call:
    op = operands.forward
    total_q, heads = op.q.shape[:2]
    head_blocks = -(-heads // STATISTICS_HEADS)
    arguments = {
        "out_ptr": operands.out,
        **strides("out", operands.out, VECTOR),
        "d_out_ptr": d_out,
        **strides("d_out", d_out, VECTOR),
        "lse_ptr": operands.lse,
        **strides("lse", operands.lse),
        "d_lse_ptr": operands.d_lse,
        **strides("d_lse", operands.d_lse),
        "sink_ptr": vector(op.weights.sink),
        "total_ptr": statistics[0],
        "delta_ptr": statistics[1],
        "part_sink_ptr": part_sink,
        "heads": heads,
        "head_blocks": head_blocks,
        "D_V": op.d_v,
        "num_warps": 4,
    }
    return Call(statistics_kernel, total_q * head_blocks, arguments)


def _walk(
    plan: Plan, op: SparseOperands, d_out: Tensor, statistics: Tensor, d_q: Tensor
) -> dict[str, Any]:
    """Arguments of the entry pass that all of its launches share."""
    config, rows = plan.config, op.cache
    assert isinstance(rows, Tensor)
    rope = config.rope
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "q_panel_desc": heads_of_tokens(op.q, PANEL),
        "q_rope_desc": heads_of_tokens(op.q, rope, span=NARROW_SPAN) if rope else None,
        "d_out_desc": heads_of_tokens(d_out, PANEL),
        "rows_ptr": rows,
        "rows_stride": rows.stride(0) // VECTOR,
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "lengths_ptr": vector(op.topk_lengths),
        "total_ptr": statistics[0],
        "delta_ptr": statistics[1],
        "d_q_ptr": d_q,
        **strides("d_q", d_q, VECTOR),
        **scale_arguments(op.weights.scale),
        "scale": op.weights.scale,
        "topk": indices.shape[1],
        "rows": min(op.rows, MOST_ROWS),
        "heads": op.q.shape[1],
        "head_blocks": config.head_blocks,
        "DIMS": Columns(latent=config.latent, rope=rope),
        "REGISTERS": Registers(config.registers.consumer, config.registers.producer),
        "LAYOUTS": TileLayouts(
            half=tile_layout(config.latent // 2),
            panel=tile_layout(PANEL),
            narrow=tile_layout(PANEL, span=NARROW_SPAN),
        ),
        "num_warps": 4,
    }
