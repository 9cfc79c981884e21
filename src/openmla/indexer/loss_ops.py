"""The loss of an indexer as functional operators, which autograd differentiates.

    index_loss(index_q, index_k, index_weights, q, k_nope, …, lse) -> loss [total_q]
    index_loss_backward(d_loss, …the same) -> d_index_q, d_index_k, d_index_weights

Attention's tensors are a target: they have no gradient. Nothing of the size of a score matrix is
kept for the backward pass, which computes it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla import checks
from openmla.backward.ops import Operator, register
from openmla.dispatch import device_target, plan_for, run_call
from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.indexer.loss_problem import LossProblem
from openmla.operands import DenseOperands, Weights

_ARGUMENTS = (
    "Tensor index_q, Tensor index_k, Tensor index_weights, Tensor q, Tensor k_nope, "
    "Tensor? k_rope, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sink, "
    "Tensor? key_mask, float scale, bool causal, str backend"
)
SCHEMAS = {
    "index_loss": f"({_ARGUMENTS}) -> Tensor",
    "index_loss_backward": f"(Tensor d_loss, {_ARGUMENTS}) -> (Tensor d_q, Tensor d_k, Tensor d_w)",
}
TENSORS = 11
"""Tensors among the arguments, which come first; three of them have gradients."""


def _operands(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sink: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
) -> LossOperands:
    weights = Weights(scale, sink)
    rows = q, k_nope, k_rope, k_nope, cu_seqlens_q, cu_seqlens_k, causal, weights
    attention = DenseOperands(*rows, key_mask=key_mask)
    return LossOperands(index_q, index_k, index_weights, attention, lse)


def _index_loss(*arguments: Any) -> Tensor:
    *rest, backend = arguments
    operands = _operands(*rest)
    if operands.device.type == "cpu":
        _check_values(operands.attention)
    _require_gradients(operands.problem(), operands.device, backend)
    loss = _fake_loss(*arguments)
    run_call(operands, loss, backend)
    return loss


def _check_values(attention: DenseOperands) -> None:
    """CPU only: offsets lie in their tensors, and every key has a bit."""
    checks.ragged_values("cu_seqlens_q", attention.cu_seqlens_q, attention.q.shape[0], "q")
    keys = attention.k_nope.shape[0]
    checks.ragged_values("cu_seqlens_k", attention.cu_seqlens_k, keys, "the keys")
    if attention.key_mask is not None:
        checks.mask_values(attention.key_mask.shape[1], attention.cu_seqlens_k)


def _require_gradients(problem: LossProblem, device: torch.device, backend: str) -> None:
    """Raise Unsupported, before the loss is computed, if no kernel computes its gradients."""
    dense, heads = problem.attention, problem.index_heads
    wanted = LossProblem.of(dense, heads, problem.index_dim, wants_gradients=True)
    plan_for(wanted, device_target(device), backend)


def _fake_loss(index_q: Tensor, *_: Any) -> Tensor:
    return index_q.new_empty(index_q.shape[0], dtype=torch.float32)


def _index_loss_backward(d_loss: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *rest, backend = arguments
    operands = replace(_operands(*rest), d_loss=d_loss.contiguous())
    gradients = LossGradients.allocate(operands)
    run_call(operands, gradients, backend)
    return gradients.q, gradients.k, gradients.weights


def _fake_backward(
    d_loss: Tensor, index_q: Tensor, index_k: Tensor, index_weights: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (index_q, index_k, index_weights))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]


def _differentiate(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
    found = torch.ops.openmla.index_loss_backward(d_loss, *ctx.saved_tensors, *ctx.options)
    needed = ctx.needs_input_grad
    wanted = [x if need else None for x, need in zip(found, needed, strict=False)]
    return (*wanted, *(None for _ in needed[3:]))


register(
    {
        "index_loss": Operator(_index_loss, _fake_loss, _differentiate, _save),
        "index_loss_backward": Operator(_index_loss_backward, _fake_backward),
    },
    SCHEMAS,
)
