"""Host side of the portable backward: from a plan and its operands to kernel calls.

The query pass runs first: it makes delta, which the key pass reads. Nothing here reads a device
tensor. Workspaces are delta [H, total_q], and where they are needed the parts of d_sink and of the
rope rows that all heads share, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.kernels.call import PLAIN_LAUNCH, Call, strides, vector
from openmla.kernels.portable.backward.key_pass import key_pass_kernel
from openmla.kernels.portable.backward.query_pass import query_pass_kernel
from openmla.kernels.portable.backward.sums import rope_sum_kernel, sink_sum_kernel
from openmla.planning import Plan

SUM_BLOCK, SINK_BLOCK = 1024, 32


def calls(plan: Plan, operands: BackwardOperands, gradients: Gradients) -> Iterator[Call]:
    """What a backward pass runs, in order."""
    op, config = operands.forward, plan.config
    total_q, heads = op.q.shape[:2]
    shared = _shared(plan, operands)
    delta = op.q.new_empty(heads, total_q, dtype=torch.float32)
    tiles = config.tiles(plan.problem)
    part_sink = None
    if gradients.sink is not None:
        part_sink = op.q.new_empty(tiles, heads, dtype=torch.float32)
    own = {
        "out_ptr": operands.out,
        **strides("out", operands.out),
        "d_q_ptr": gradients.q,
        **strides("d_q", gradients.q),
        "delta_ptr": delta,
        "part_sink_ptr": part_sink,
        "tiles": tiles,
    }
    tile = config.query_tile._asdict()
    yield Call(query_pass_kernel, tiles * heads, {**shared, **own, **tile})
    if gradients.sink is not None:
        summing = {"part_ptr": part_sink, "d_sink_ptr": gradients.sink, "tiles": tiles}
        summing |= {"heads": heads, "BLOCK": SINK_BLOCK, **PLAIN_LAUNCH}
        yield Call(sink_sum_kernel, -(-heads // SINK_BLOCK), summing)
    if gradients.kv is not None and op.k_nope.shape[0]:
        yield from _key_pass(plan, operands, gradients, shared, delta)


def _key_pass(
    plan: Plan,
    operands: BackwardOperands,
    gradients: Gradients,
    shared: dict[str, Any],
    delta: Tensor,
) -> Iterator[Call]:
    """d_k and d_v, and the sum of rope parts over the heads."""
    op, d_rope = operands.forward, gradients.k_rope
    total_k, heads = op.k_nope.shape[:2]
    tile = plan.config.key_tile
    tiles = total_k // tile.BN + op.cu_seqlens_k.shape[0]
    d_out = operands.seen_d_out()
    part = None
    if d_rope is not None and d_rope.dim() == 2:
        part = op.q.new_empty(heads, *d_rope.shape, dtype=torch.float32)
    written = d_rope if part is None else part.transpose(0, 1)
    own = {
        "delta_ptr": delta,
        "d_out_ptr": d_out,
        **strides("d_out", d_out),
        "d_k_ptr": gradients.k_nope,
        **strides("d_k", gradients.k_nope),
        "d_v_ptr": gradients.v,
        **strides("d_v", gradients.v),
        "d_rope_ptr": written,
        **strides("d_rope", written),
        "tiles": tiles,
    }
    yield Call(key_pass_kernel, tiles * heads, {**shared, **own, **tile._asdict()})
    if part is not None and d_rope is not None and d_rope.numel():
        summing = {"part_ptr": part, "d_rope_ptr": d_rope, "elements": d_rope.numel()}
        summing |= {"heads": heads, "BLOCK": SUM_BLOCK, **PLAIN_LAUNCH}
        yield Call(rope_sum_kernel, -(-d_rope.numel() // SUM_BLOCK), summing)


def _shared(plan: Plan, operands: BackwardOperands) -> dict[str, Any]:
    """Arguments that both passes take."""
    op, config = operands.forward, plan.config
    d_nope, d_v = op.k_nope.shape[2], op.v.shape[2]
    rope, mask = op.k_rope, op.key_mask
    per_head = rope is not None and rope.dim() == 3
    return {
        "q_ptr": op.q,
        **strides("q", op.q),
        "k_ptr": op.k_nope,
        **strides("k", op.k_nope),
        "rope_ptr": rope,
        "rope_stride_t": 0 if rope is None else rope.stride(0),
        "rope_stride_h": rope.stride(1) if rope is not None and per_head else 0,
        "v_ptr": op.v,
        **strides("v", op.v),
        "lse_ptr": operands.lse,
        **strides("lse", operands.lse),
        "d_out_ptr": operands.d_out,
        **strides("d_out", operands.d_out),
        "d_lse_ptr": operands.d_lse,
        **strides("d_lse", operands.d_lse),
        "sink_ptr": vector(op.weights.sink),
        "mask_ptr": mask,
        "mask_stride": 0 if mask is None else mask.stride(0),
        "words": 0 if mask is None else mask.shape[1],
        "window": op.window or None,
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "factor": op.weights.scale * math.log2(math.e),
        "scale": op.weights.scale,
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "batch": op.cu_seqlens_q.shape[0] - 1,
        "heads": op.q.shape[1],
        "CAUSAL": op.causal,
        "D_NOPE": d_nope,
        "D_ROPE": op.q.shape[2] - d_nope,
        "D_V": d_v,
        "NOPE": config.nope_cols,
        "ROPE": config.rope_cols,
        "VALUE": config.v_cols,
    }
