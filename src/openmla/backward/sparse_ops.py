"""The sparse form as functional operators, for calls that need gradients.

    sparse_train(q, kv, indices, …) -> out, lse               by the same plan, the same bits
    sparse_backward(d_out, d_lse, …, out, lse) -> d_q, d_kv, d_sink

As in openmla.backward.ops: nothing is written into an argument, nothing is copied to be kept, and
whether gradients can be computed is asked before the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.backward.ops import (
    Operator,
    backend_of,
    or_empty,
    outputs,
    readable,
    register,
    require_backward,
    save_for_backward,
)
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands, WantedRows
from openmla.dispatch import run_call
from openmla.operands import Results, SparseOperands, Weights

_ARGUMENTS = (
    "Tensor q, Tensor kv, Tensor indices, Tensor? topk_lengths, Tensor? sink, float scale, "
    "int d_v, str backend, bool wants_lse"
)
SPARSE_SCHEMAS = {
    "sparse_train": f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "sparse_backward": (
        f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] wanted, {_ARGUMENTS}) -> "
        "(Tensor d_q, Tensor d_kv, Tensor d_sink)"
    ),
}
TENSORS = ("q", "kv", "indices", "topk_lengths", "sink")
OPTIONS = ("scale", "d_v", "backend", "wants_lse")


def _sparse_train(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_lengths: Tensor | None,
    sink: Tensor | None,
    scale: float,
    d_v: int,
    backend: str,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The forward pass, by the operator that serves calls without gradients. wants_lse: whether the
    caller gets lse, so that a gradient of it may come back."""
    out, lse = outputs(q, d_v)
    operands = SparseOperands(q, kv, indices, topk_lengths, d_v, Weights(scale, sink))
    require_backward(operands, Results(out, lse), backend, wants_lse)
    torch.ops.openmla.sparse(
        *(q, kv, None, "", 0, indices, topk_lengths, sink, None, None),
        *(scale, d_v, backend, out, lse, None),
    )
    return out, lse


def _fake_train(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, d_v, _, _ = rest
    return outputs(q, d_v)


def _sparse_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """The gradients that are wanted; an empty tensor stands for another."""
    operands, gradients, backend = _bundled(wanted, *arguments)
    read = SparseBackwardOperands(operands, out, lse, readable(d_out), d_lse)
    run_call(read, gradients, backend_of(read.problem(), read.device, backend))
    return _returned(gradients, out)


def _fake_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    return _returned(_bundled(wanted, *arguments)[1], out)


def _bundled(wanted: list[bool], *arguments: Any) -> tuple[SparseOperands, RowGradients, str]:
    q, kv, indices, topk_lengths, sink, scale, d_v, backend, _ = arguments
    operands = SparseOperands(q, kv, indices, topk_lengths, d_v, Weights(scale, sink))
    return operands, RowGradients.allocate(operands, WantedRows(*wanted)), backend


def _returned(gradients: RowGradients, like: Tensor) -> tuple[Tensor, ...]:
    return or_empty((gradients.q, gradients.rows, gradients.sink), like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save_for_backward(ctx, inputs, output, len(TENSORS))


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of all arguments: None for what has none, or is not wanted."""
    *tensors, out, lse = ctx.saved_tensors
    needed = dict(zip(TENSORS, ctx.needs_input_grad, strict=False))
    wanted = [needed["q"], needed["kv"], needed["sink"]]
    if (d_out is None and d_lse is None) or not any(wanted):
        return (None,) * (len(TENSORS) + len(OPTIONS))
    if d_out is None:
        d_out = torch.zeros_like(out)
    found = torch.ops.openmla.sparse_backward(
        d_out, d_lse, out, lse, wanted, *tensors, *ctx.options
    )
    d_q, d_kv, d_sink = (x if want else None for x, want in zip(found, wanted, strict=True))
    return (d_q, d_kv, None, None, d_sink, *(None for _ in OPTIONS))


register(
    {
        "sparse_train": Operator(_sparse_train, _fake_train, _differentiate, _save),
        "sparse_backward": Operator(_sparse_backward, _fake_backward),
    },
    SPARSE_SCHEMAS,
)
