"""Host side of the portable sparse backward: from a plan and its operands to kernel calls.

The query pass runs first: it makes delta, which the row pass reads. Which entries name a row is
found by a stable sort of the entries of some queries at a time, on the device: nothing here waits
for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands, by_row
from openmla.kernels.call import PLAIN_LAUNCH, Call, strides, vector
from openmla.kernels.portable.backward.sums import sink_sum_kernel
from openmla.kernels.portable.plan import padded
from openmla.kernels.portable.sparse_backward.query_pass import sparse_query_pass_kernel
from openmla.kernels.portable.sparse_backward.row_pass import sparse_row_pass_kernel
from openmla.kernels.portable.sparse_backward.row_sum import sparse_row_sum_kernel
from openmla.operands import SparseOperands
from openmla.planning import Plan

SINK_BLOCK = 32


def calls(plan: Plan, operands: SparseBackwardOperands, gradients: RowGradients) -> Iterator[Call]:
    """What a backward pass runs, in order; nothing where nobody sees a row."""
    op, config = operands.forward, plan.config
    if not plan.variant.tokens:
        gradients.clear()
        return
    total_q, heads = op.q.shape[:2]
    shared = _shared(plan, operands)
    delta = op.q.new_empty(total_q, heads, dtype=torch.float32)
    part_sink = None
    if gradients.sink is not None:
        part_sink = op.q.new_empty(total_q, heads, dtype=torch.float32)
    head_blocks = -(-heads // config.BM)
    own = {
        "out_ptr": operands.out,
        **strides("out", operands.out),
        "d_q_ptr": gradients.q,
        **strides("d_q", gradients.q),
        "delta_ptr": delta,
        "part_sink_ptr": part_sink,
        "head_blocks": head_blocks,
    }
    yield Call(sparse_query_pass_kernel, total_q * head_blocks, {**shared, **own})
    if gradients.sink is not None:
        summing = {"part_ptr": part_sink, "d_sink_ptr": gradients.sink, "tiles": total_q}
        summing |= {"heads": heads, "BLOCK": SINK_BLOCK, **PLAIN_LAUNCH}
        yield Call(sink_sum_kernel, -(-heads // SINK_BLOCK), summing)
    if gradients.rows is not None:
        yield from _row_pass(plan, op, gradients.rows, shared, delta)


def _row_pass(
    plan: Plan, op: SparseOperands, d_rows: Tensor, shared: dict[str, Any], delta: Tensor
) -> Iterator[Call]:
    """What entries give to rows, and its sums, some queries at a time."""
    total_q, topk, tokens = op.q.shape[0], op.indices.shape[1], plan.variant.tokens
    width = op.q.shape[2]
    part = op.q.new_empty(tokens * topk, width, dtype=torch.float32)
    total = None
    if tokens < total_q:
        total = op.q.new_empty(op.rows, width, dtype=torch.float32)
    blocks = -(-topk // plan.config.BN)
    for first in range(0, total_q, tokens):
        last = min(first + tokens, total_q)
        own = {"delta_ptr": delta, "part_ptr": part, "blocks": blocks, "first_token": first}
        yield Call(sparse_row_pass_kernel, (last - first) * blocks, {**shared, **own})
        entries = by_row(op, first, last)
        summing = {
            "part_ptr": part,
            "order_ptr": entries.order,
            "starts_ptr": entries.starts,
            "total_ptr": total,
            "d_rows_ptr": d_rows,
            "WIDTH": width,
            "COLUMNS": padded(width),
            "FIRST": first == 0,
            "LAST": last == total_q,
            **PLAIN_LAUNCH,
        }
        yield Call(sparse_row_sum_kernel, op.rows, summing)


def _shared(plan: Plan, operands: SparseBackwardOperands) -> dict[str, Any]:
    """Arguments that both passes take."""
    op, config = operands.forward, plan.config
    rows = op.cache
    assert isinstance(rows, Tensor)
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "q_ptr": op.q,
        **strides("q", op.q),
        "rows_ptr": rows,
        "rows_stride": rows.stride(0),
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "lengths_ptr": vector(op.topk_lengths),
        "lse_ptr": operands.lse,
        **strides("lse", operands.lse),
        "d_out_ptr": operands.d_out,
        **strides("d_out", operands.d_out),
        "d_lse_ptr": operands.d_lse,
        **strides("d_lse", operands.d_lse),
        "sink_ptr": vector(op.weights.sink),
        "factor": op.weights.scale * math.log2(math.e),
        "scale": op.weights.scale,
        "topk": op.indices.shape[1],
        "rows": min(op.rows, 2**31 - 1),
        "heads": op.q.shape[1],
        "D_LATENT": plan.problem.d_nope,
        "D_ROPE": plan.problem.d_rope,
        "D_V": op.d_v,
        "LATENT": config.latent_cols,
        "ROPE": config.rope_cols,
        "BM": config.BM,
        "BN": config.BN,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
