"""Host side of an indexer's loss on a GPU: from a plan and its operands to kernel calls.

Sums and scores of some tiles of queries at a time go to a workspace, and what follows of them is
computed before the next ones. Nothing here reads a device tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.kernels.call import PLAIN_LAUNCH, Call, strides, vector
from openmla.kernels.portable.backward.launch import SUM_BLOCK
from openmla.kernels.portable.backward.sums import rope_sum_kernel
from openmla.kernels.portable.indexer_loss.key_pass import loss_key_pass_kernel
from openmla.kernels.portable.indexer_loss.plan import GROUP
from openmla.kernels.portable.indexer_loss.query_pass import loss_query_pass_kernel
from openmla.kernels.portable.indexer_loss.row_pass import loss_row_pass_kernel
from openmla.kernels.portable.indexer_loss.score_pass import loss_score_pass_kernel
from openmla.planning import Plan

ROW_BLOCK = 1024
"""Keys of a step of the row pass."""


def calls(plan: Plan, op: LossOperands, results: Tensor | LossGradients) -> Iterator[Call]:
    """What a loss or its gradients run, in order; nothing where no query sees a key."""
    gradients = results if isinstance(results, LossGradients) else None
    loss = results if isinstance(results, Tensor) else None
    together = plan.variant.tiles
    if not together:
        if loss is not None:
            loss.zero_()
        if gradients is not None:
            gradients.clear()
        return
    config = plan.config
    columns = config.columns(op.index_k.shape[0])
    sums = op.index_q.new_empty(together * config.BM, columns, dtype=torch.float32)
    scores = torch.empty_like(sums)
    part = sums.new_empty(-(-op.index_q.shape[1] // GROUP), *op.index_k.shape)
    sequences = _sequences(plan, op) | {"columns": columns}
    indexer = _indexer(plan, op)
    tiles = config.tiles(plan.problem)
    for first in range(0, tiles, together):
        here = min(together, tiles - first)
        launch = sequences | {"launch_tile": first}
        written = {"sums_ptr": sums, "scores_ptr": scores}
        yield _score_pass(plan, op, here, {**launch, **indexer, **written})
        rows = {"loss_ptr": loss, "d_loss_ptr": op.d_loss}
        options = {"BN": config.BN, "BLOCK": ROW_BLOCK, **PLAIN_LAUNCH}
        yield Call(loss_row_pass_kernel, here * config.BM, {**launch, **written, **rows, **options})
        if gradients is not None:
            passes = {**launch, **indexer, "d_scores_ptr": sums}
            yield _query_pass(op, gradients, here, passes)
            yield _key_pass(plan, op, part, here, passes)
    if gradients is not None:
        elements = gradients.k.numel()
        summing = {"part_ptr": part, "d_rope_ptr": gradients.k, "elements": elements}
        summing |= {"heads": part.shape[0], "BLOCK": SUM_BLOCK, **PLAIN_LAUNCH}
        yield Call(rope_sum_kernel, -(-elements // SUM_BLOCK), summing)


def _score_pass(plan: Plan, op: LossOperands, tiles: int, given: dict[str, Any]) -> Call:
    """Weights of attention and scores of the indexer."""
    attention, config = op.attention, plan.config
    rope, mask = attention.k_rope, attention.key_mask
    key_blocks = given["columns"] // config.BN
    own = {
        "q_ptr": attention.q,
        **strides("q", attention.q),
        "k_ptr": attention.k_nope,
        **strides("k", attention.k_nope),
        "rope_ptr": rope,
        "rope_stride_t": 0 if rope is None else rope.stride(0),
        "rope_stride_h": rope.stride(1) if rope is not None and rope.dim() == 3 else 0,
        "lse_ptr": op.lse,
        **strides("lse", op.lse),
        "sink_ptr": vector(attention.weights.sink),
        "mask_ptr": mask,
        "mask_stride": 0 if mask is None else mask.stride(0),
        "words": 0 if mask is None else mask.shape[1],
        "factor": attention.weights.scale * math.log2(math.e),
        "heads": attention.q.shape[1],
        "key_blocks": key_blocks,
        "D_NOPE": plan.problem.d_nope,
        "D_ROPE": plan.problem.d_rope,
        "NOPE": config.nope_cols,
        "ROPE": config.rope_cols,
    }
    return Call(loss_score_pass_kernel, tiles * key_blocks, {**given, **own})


def _query_pass(
    op: LossOperands, gradients: LossGradients, tiles: int, given: dict[str, Any]
) -> Call:
    """d_q and d_weights."""
    own = {"d_q_ptr": gradients.q, **strides("d_q", gradients.q), "d_w_ptr": gradients.weights}
    return Call(loss_query_pass_kernel, tiles * op.index_q.shape[1], {**given, **own})


def _key_pass(
    plan: Plan, op: LossOperands, part: Tensor, tiles: int, given: dict[str, Any]
) -> Call:
    """What groups of heads give to d_k."""
    total_k, groups = op.index_k.shape[0], part.shape[0]
    key_tiles = total_k // plan.config.BN + op.attention.cu_seqlens_k.shape[0]
    own = {"part_ptr": part, "groups": groups, "GROUP": GROUP, "launch_tiles": tiles}
    own |= {"FIRST": given["launch_tile"] == 0}
    return Call(loss_key_pass_kernel, key_tiles * groups, {**given, **own})


def _sequences(plan: Plan, op: LossOperands) -> dict[str, Any]:
    """Arguments of every pass: whose rows and keys there are."""
    attention = op.attention
    return {
        "cu_q_ptr": vector(attention.cu_seqlens_q),
        "cu_k_ptr": vector(attention.cu_seqlens_k),
        "total_q": op.index_q.shape[0],
        "total_k": op.index_k.shape[0],
        "batch": attention.cu_seqlens_q.shape[0] - 1,
        "CAUSAL": attention.causal,
        "BM": plan.config.BM,
    }


def _indexer(plan: Plan, op: LossOperands) -> dict[str, Any]:
    """Arguments of the passes that multiply the indexer's queries and keys."""
    config = plan.config
    return {
        "index_q_ptr": op.index_q,
        **strides("index_q", op.index_q),
        "index_k_ptr": op.index_k,
        "index_k_stride": op.index_k.stride(0),
        "index_w_ptr": op.index_weights,
        **strides("index_w", op.index_weights),
        "index_heads": op.index_q.shape[1],
        "D_INDEX": op.index_q.shape[2],
        "WIDTH": config.index_cols,
        "BN": config.BN,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
