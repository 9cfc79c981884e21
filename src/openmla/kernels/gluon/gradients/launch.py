"""Host side of dense backward passes: from a plan and its operands to kernel calls.

The query pass runs first: it makes the statistics of query rows, which the key pass reads. Nothing
here reads a device tensor. Workspaces are the statistics, fp32 [2, H, rows], and where they are
needed the parts of d_sink and of the rope rows that all heads share, in fp32, and the bits of a key
mask in the order of both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backward.operands import BackwardOperands, Gradients, copyable
from openmla.kernels.call import Call, scale_arguments, strides, vector
from openmla.kernels.gluon.descriptors import (
    SWIZZLE_BYTES,
    lines,
    ragged,
    rows_of_heads,
    shared_rows,
    tile_layout,
)
from openmla.kernels.gluon.gradients.records import Columns, TileLayouts
from openmla.kernels.gluon.gradients.seen_bits import WORD_BITS, SeenBits
from openmla.kernels.gluon.gradients.sums import summed
from openmla.operands import DenseOperands
from openmla.planning import Plan

GROUP_ROWS = 64  # of a warp-group: each leaves a part of d_sink
VECTOR = 8  # elements in 16 bytes


class Passes(NamedTuple):
    """The two kernels of a family."""

    query: Any
    key: Any
    box_rows: int
    """Rows of a bulk copy of what a pass owns."""
    launched: Callable[[Any, Plan, int, dict[str, Any]], Call]
    """The call of a kernel for a plan: its programs, given the rows of the side that it owns, and
    what only this family's kernels take beside these arguments."""


def calls(
    plan: Plan, operands: BackwardOperands, gradients: Gradients, passes: Passes
) -> Iterator[Call]:
    """What a backward pass runs, in order."""
    op, config = operands.forward, plan.config
    if not operands.out.numel() or not op.k_nope.numel():
        gradients.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    total_q, heads = op.q.shape[:2]
    batch = op.cu_seqlens_q.shape[0] - 1
    rows = config.statistics_rows(total_q, batch)
    statistics = op.q.new_empty(2 * heads, rows, dtype=torch.float32)
    part_sink = None
    if gradients.sink is not None:
        part_sink = op.q.new_zeros(rows // GROUP_ROWS, heads, dtype=torch.float32)
    shared, d_out = _shared(plan, op), copyable(operands.seen_d_out())
    bits = None
    if op.key_mask is not None:
        bits = SeenBits.allocate(op.key_mask, rows, config.BN)
        yield bits.transposed(op)
    yield _query_pass(passes, plan, operands, gradients, shared, d_out, statistics, part_sink, bits)
    if part_sink is not None and gradients.sink is not None:
        yield summed(part_sink, gradients.sink)
    if gradients.kv is not None:
        yield from _key_pass(passes, plan, op, gradients, shared, d_out, statistics, bits)


def _query_pass(
    passes: Passes,
    plan: Plan,
    operands: BackwardOperands,
    gradients: Gradients,
    shared: dict[str, Any],
    d_out: Tensor,
    statistics: Tensor,
    part_sink: Tensor | None,
    bits: SeenBits | None,
) -> Call:
    """Statistics and d_q, which is computed where it is not wanted too."""
    op, config = operands.forward, plan.config
    d_q = op.q.new_empty(op.q.shape) if gradients.q is None else gradients.q
    tail, rope = config.second_tile, op.k_rope
    d_nope = config.d_nope - tail
    if rope is not None and rope.dim() == 2:
        rope = rope.unsqueeze(1)
    own = {
        "q_nope_desc": rows_of_heads(op.q, passes.box_rows, d_nope, SWIZZLE_BYTES),
        "q_rope_desc": None,
        "d_out_desc": rows_of_heads(d_out, passes.box_rows, config.d_v, SWIZZLE_BYTES),
        "k_nope_desc": ragged(op.k_nope[..., :d_nope], config.BN),
        "k_rope_desc": None,
        "v_desc": ragged(op.v, config.BN),
        "out_ptr": operands.out,
        **strides("out", operands.out, VECTOR),
        "d_out_ptr": d_out,
        **strides("d_out", d_out, VECTOR),
        "lse_ptr": operands.lse,
        **strides("lse", operands.lse),
        "d_lse_ptr": operands.d_lse,
        **strides("d_lse", operands.d_lse),
        "sink_ptr": vector(op.weights.sink),
        "d_q_ptr": d_q,
        **strides("d_q", d_q, VECTOR),
        "statistics_ptr": statistics,
        "statistics_rows": statistics.shape[1],
        "part_sink_ptr": part_sink,
        "BN": config.BN,
        "ST": config.key_stages,
    }
    if rope is not None and config.d_rope:
        width = config.d_rope + tail
        own["q_rope_desc"] = rows_of_heads(op.q, passes.box_rows, width, SWIZZLE_BYTES)
        own["k_rope_desc"] = ragged(rope, config.BN)
    if tail:
        own["k_tail_desc"] = ragged(op.k_nope[..., d_nope:], config.BN)
    if bits is not None:
        own["bits_desc"] = lines(bits.by_query, GROUP_ROWS * config.BN // WORD_BITS)
    return passes.launched(passes.query, plan, op.q.shape[0], {**shared, **own})


def _key_pass(
    passes: Passes,
    plan: Plan,
    op: DenseOperands,
    gradients: Gradients,
    shared: dict[str, Any],
    d_out: Tensor,
    statistics: Tensor,
    bits: SeenBits | None,
) -> Iterator[Call]:
    """d_k and d_v, and the sum of rope parts over the heads."""
    config, d_rope = plan.config, gradients.k_rope
    total_k, heads, _ = op.k_nope.shape
    tail = config.second_tile
    d_nope = config.d_nope - tail
    part = None
    if d_rope is not None and d_rope.dim() == 2:
        part = op.q.new_empty(heads, *d_rope.shape, dtype=torch.float32)
    written = d_rope if part is None else part.transpose(0, 1)
    own = {
        "k_nope_desc": rows_of_heads(op.k_nope, passes.box_rows, d_nope, SWIZZLE_BYTES),
        "k_rope_desc": None,
        "v_desc": rows_of_heads(op.v, passes.box_rows, config.d_v, SWIZZLE_BYTES),
        "q_nope_desc": ragged(op.q[..., :d_nope], config.BQ),
        "q_rope_desc": None,
        "d_out_desc": ragged(d_out, config.BQ),
        "statistics_desc": lines(statistics, config.BQ),
        "d_k_ptr": gradients.k_nope,
        **strides("d_k", gradients.k_nope, VECTOR),
        "d_v_ptr": gradients.v,
        **strides("d_v", gradients.v, VECTOR),
        "d_rope_ptr": written,
        **strides("d_rope", written, VECTOR if part is None else 1),
        "BQ": config.BQ,
        "ST": config.query_stages,
    }
    if op.k_rope is not None and config.d_rope:
        width = config.d_rope
        own["q_rope_desc"] = ragged(op.q[..., d_nope:], config.BQ)
        own["k_rope_desc"] = (
            shared_rows(op.k_rope, passes.box_rows, SWIZZLE_BYTES)
            if op.k_rope.dim() == 2
            else rows_of_heads(op.k_rope, passes.box_rows, width, SWIZZLE_BYTES)
        )
    if bits is not None:
        own["bits_desc"] = lines(bits.by_key, GROUP_ROWS * config.BQ // WORD_BITS)
    if tail:
        own["k_tail_desc"] = rows_of_heads(op.k_nope, passes.box_rows, tail, SWIZZLE_BYTES)
    for which in config.key_launches:
        only = {} if which == "all" else {"GRADIENTS": which}
        yield passes.launched(passes.key, plan, total_k, {**shared, **own, **only})
    if part is not None and d_rope is not None:
        yield summed(part, d_rope)


def tiles_of(plan: Plan, rows: int) -> int:
    """The most work items that so many rows of the side that a pass owns can make."""
    config = plan.config
    tiles: int = (rows // config.own_rows + plan.problem.batch + 1) * config.heads
    return tiles


def _shared(plan: Plan, op: DenseOperands) -> dict[str, Any]:
    """Arguments that both passes take."""
    config = plan.config
    tail = config.second_tile
    columns = Columns(nope=config.d_nope - tail, rope=config.d_rope + tail, v=config.d_v, tail=tail)
    return {
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        **scale_arguments(op.weights.scale),
        "scale": op.weights.scale,
        "batch": op.cu_seqlens_q.shape[0] - 1,
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": op.q.shape[1],
        "DIMS": columns,
        "ROPE": plan.problem.rope,
        "CAUSAL": op.causal,
        "HG": config.heads_per_l2_group,
        "LAYOUTS": TileLayouts(
            nope=tile_layout(columns.nope),
            rope=tile_layout(columns.rope) if columns.rope else None,
            v=tile_layout(columns.v),
        ),
        "num_warps": 4,
    }
