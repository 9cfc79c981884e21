"""Host side of CDNA4's backward pass: from a plan and its operands to kernel calls.

The query pass runs first: it makes the statistics of query rows, which the key pass reads. Nothing
here reads a device tensor. Workspaces are the statistics, fp32 [2, H, rows], and where they are
needed the parts of d_sink and of the rope rows that all heads share, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openmla.backward.operands import BackwardOperands, Gradients, copyable
from openmla.kernels.call import Call, scale_arguments, strides, vector
from openmla.kernels.cdna4.backward.key_pass import key_pass_kernel
from openmla.kernels.cdna4.backward.plan import Cdna4BackwardConfig
from openmla.kernels.cdna4.backward.query_pass import query_pass_kernel
from openmla.kernels.cdna4.backward.records import BackwardBlock, BackwardLayouts, Columns
from openmla.kernels.cdna4.dense.launch import piece_strides
from openmla.kernels.cdna4.layouts import k_layouts, matrix_layouts
from openmla.kernels.gluon.gradients.sums import summed
from openmla.kernels.triton_version import TRITON
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.modular.cdna4.layout.k import K_SUB_ROWS
from openmla.operands import DenseOperands
from openmla.planning import Plan

HOLD = TRITON >= (3, 9)
"""Whether reads of a key pass are held ahead: Triton 3.8 reads ahead by itself, and would spill."""
MFMA_DEPTH, NEIGHBORS = 16, 8  # columns of a product, and those of an operand in a lane


def calls(plan: Plan, operands: BackwardOperands, gradients: Gradients) -> Iterator[Call]:
    """What a backward pass runs, in order."""
    op, config = operands.forward, plan.config
    if not operands.out.numel() or not op.k_nope.numel():
        gradients.clear()  # nobody sees a key, and an empty tensor has no address to copy from
        return
    total_q, heads = op.q.shape[:2]
    tiles = config.tiles(total_q, op.cu_seqlens_q.shape[0] - 1)
    statistics = op.q.new_empty(2, heads, tiles * config.own_rows, dtype=torch.float32)
    part_sink = None
    if gradients.sink is not None:
        part_sink = op.q.new_empty(tiles, heads, dtype=torch.float32)
    shared = _shared(plan, operands)
    own = {
        "out_ptr": operands.out,
        **piece_strides("out", operands.out),
        "lse_ptr": operands.lse,
        **strides("lse", operands.lse),
        "d_lse_ptr": operands.d_lse,
        **strides("d_lse", operands.d_lse),
        "sink_ptr": vector(op.weights.sink),
        "statistics_ptr": statistics,
        "part_sink_ptr": part_sink,
        "tiles": tiles,
    }
    # d_q is computed where it is not wanted too.
    d_q = op.q.new_empty(op.q.shape) if gradients.q is None else gradients.q
    own |= {"d_q_ptr": d_q, **strides("d_q", d_q)}
    yield Call(query_pass_kernel, tiles * heads, {**shared, **own})
    if part_sink is not None and gradients.sink is not None:
        yield summed(part_sink, gradients.sink, WAVE)
    if gradients.kv is not None:
        yield from _key_pass(plan, op, gradients, shared, statistics)


def _key_pass(
    plan: Plan,
    op: DenseOperands,
    gradients: Gradients,
    shared: dict[str, Any],
    statistics: Tensor,
) -> Iterator[Call]:
    """d_k and d_v, and the sum of rope parts over the heads."""
    config, d_rope = plan.config, gradients.k_rope
    total_k, heads = op.k_nope.shape[:2]
    part = None
    if d_rope is not None and d_rope.dim() == 2:
        part = op.q.new_empty(heads, *d_rope.shape, dtype=torch.float32)
    written = d_rope if part is None else part.transpose(0, 1)
    own = {
        "statistics_ptr": statistics,
        "statistics_rows": statistics.shape[2],
        "d_k_ptr": gradients.k_nope,
        **strides("d_k", gradients.k_nope),
        "d_v_ptr": gradients.v,
        **strides("d_v", gradients.v),
        "d_rope_ptr": written,
        **strides("d_rope", written),
        "HOLD": HOLD,
    }
    tiles = config.tiles(total_k, op.cu_seqlens_k.shape[0] - 1)
    yield Call(key_pass_kernel, tiles * heads, {**shared, **own})
    if part is not None and d_rope is not None:
        yield summed(part, d_rope, WAVE)


def _shared(plan: Plan, operands: BackwardOperands) -> dict[str, Any]:
    """Arguments that both passes take."""
    op, config = operands.forward, plan.config
    rows = config.step_rows
    d_out = copyable(operands.seen_d_out())
    rope = op.k_rope if op.k_rope is None or op.k_rope.dim() == 3 else op.k_rope[:, None]
    shared_rope = op.k_rope is not None and op.k_rope.dim() == 2
    found = {
        "q_ptr": op.q,
        **piece_strides("q", op.q, rows),
        "k_ptr": op.k_nope,
        **piece_strides("k", op.k_nope, rows),
        "rope_ptr": rope,
        **({"rope_stride_t": 0} if rope is None else piece_strides("rope", rope, rows)),
        "v_ptr": op.v,
        **piece_strides("v", op.v, rows),
        "d_out_ptr": d_out,
        **piece_strides("d_out", d_out, rows),
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        **scale_arguments(op.weights.scale),
        "scale": op.weights.scale,
        "batch": op.cu_seqlens_q.shape[0] - 1,
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": op.q.shape[1],
        "CAUSAL": op.causal,
        **_constexprs(config),
    }
    if rope is None or shared_rope:
        found["rope_stride_h"] = 0
    return found


@lru_cache(maxsize=256)
def _constexprs(config: Cdna4BackwardConfig) -> dict[str, Any]:
    """Constants and launch options that follow from the config alone."""

    def tile(columns: int) -> Any:
        return k_layouts(config.step_rows, columns, 2, config.num_warps, K_SUB_ROWS)

    tiles = Columns(
        nope=tile(config.d_nope),
        rope=tile(config.d_rope) if config.d_rope else None,
        v=tile(config.d_v),
    )
    matrices = matrix_layouts(config.num_warps, 1, MFMA_DEPTH, MFMA_DEPTH, NEIGHBORS)
    return {
        "BLOCK": BackwardBlock(
            own_rows=config.own_rows,
            step_rows=config.step_rows,
            slots=config.slots,
            d_nope=config.d_nope,
            d_rope=config.d_rope,
            d_qk=config.d_nope + config.d_rope,
            d_v=config.d_v,
        ),
        "LAYOUTS": BackwardLayouts(matrices=matrices, tiles=tiles),
        "num_warps": config.num_warps,
    }
