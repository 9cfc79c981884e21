"""The dense form as functional operators, for calls that need gradients.

`openmla::dense` writes into its outputs, and torch takes no autograd formula for such an operator.
So a call that needs gradients goes through

    dense_train(q, k_nope, k_rope, v, …) -> out, lse               by the same plan, the same bits
    dense_backward(d_out, d_lse, …, out, lse) -> d_q, d_kv, d_rope, d_sink

which neither write nor keep an argument: activation checkpointing and torch.compile need that. The
arguments are saved for the backward pass, as the views they are, with out and lse: nothing is
copied. Whether gradients can be computed is asked before the forward pass.

d_kv has the gradients of k_nope and v side by side. A second derivative is refused.

Where another form computed out and lse, `dense_given(out, lse, q, k_nope, …)` returns copies of
them whose gradients are those of the dense form: see openmla.backward.given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla import checks
from openmla.backward.operands import BackwardOperands, Gradients, Wanted
from openmla.backward.problem import BackwardProblem
from openmla.dispatch import device_target, plan_for, run_call
from openmla.errors import Unsupported
from openmla.operands import DenseOperands, Results, SparseOperands, Weights

_ARGUMENTS = (
    "Tensor q, Tensor k_nope, Tensor? k_rope, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? sink, Tensor? key_mask, float scale, bool causal, "
    "int window, str backend, bool wants_lse"
)
SCHEMAS = {
    "dense_train": f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "dense_given": (
        f"(Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor out_given, Tensor lse_given)"
    ),
    "dense_backward": (
        f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] wanted, {_ARGUMENTS}) -> "
        "(Tensor d_q, Tensor d_kv, Tensor d_rope, Tensor d_sink)"
    ),
}
TENSORS = ("q", "k_nope", "k_rope", "v", "cu_seqlens_q", "cu_seqlens_k", "sink", "key_mask")
DIFFERENTIABLE = ("q", "k_nope", "k_rope", "v", "sink")
OPTIONS = ("scale", "causal", "window", "backend", "wants_lse")


def _dense_train(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sink: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    backend: str,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The forward pass, by the operator that serves calls without gradients. wants_lse: whether the
    caller gets lse, so that a gradient of it may come back."""
    out, lse = outputs(q, v.shape[2])
    weights = Weights(scale, sink)
    rows = q, k_nope, k_rope, v, cu_seqlens_q, cu_seqlens_k
    operands = DenseOperands(*rows, causal, weights, key_mask=key_mask, window=window)
    require_backward(operands, Results(out, lse), backend, wants_lse)
    torch.ops.openmla.dense(
        q,
        k_nope,
        k_rope,
        v,
        None,
        None,
        "",
        0,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        sink,
        None,
        None,
        key_mask,
        scale,
        causal,
        window,
        backend,
        out,
        lse,
    )
    return out, lse


def require_backward(
    operands: DenseOperands | SparseOperands, results: Results, backend: str, wants_lse: bool
) -> None:
    """Raise Unsupported, before the forward pass, if no kernel computes its gradients: without one
    of lse and, where the caller gets lse, with one. Which of them it will be is not known yet."""
    forward = operands.problem(results)
    for has_d_lse in (False, True) if wants_lse else (False,):
        backend_of(BackwardProblem.of(forward, has_d_lse), operands.device, backend)


def backend_of(problem: BackwardProblem, device: torch.device, backend: str) -> str:
    """Whose kernels compute gradients: those of the backend that is named.

    Whether a gradient of lse comes back is known only then, too late to refuse. So where the named
    kernels lack that alone, as Hopper's do beside a sink, any that have it compute gradients.
    """
    target = device_target(device)
    try:
        plan_for(problem, target, backend)
    except Unsupported:
        if not problem.has_d_lse:
            raise
        plan_for(replace(problem, has_d_lse=False), target, backend)
        plan_for(problem, target, "auto")
        return "auto"
    return backend


def outputs(q: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    """out and lse, not yet written: as openmla.api allocates them."""
    out = q.new_empty((*q.shape[:2], d_v), dtype=checks.out_dtype(q.dtype))
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_train(
    q: Tensor, k_nope: Tensor, k_rope: Tensor | None, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return outputs(q, v.shape[2])


def _dense_given(out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """out and lse as they are given: an operator may not return an argument."""
    operands, _, backend = _bundled([False] * 3, *arguments)
    require_backward(operands, Results(out, lse), backend, wants_lse=arguments[-1])
    side_by_side = torch.contiguous_format  # whatever strides they came with
    return out.clone(memory_format=side_by_side), lse.clone(memory_format=side_by_side)


def _fake_given(out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


def readable(d_out: Tensor) -> Tensor:
    """d_out with columns side by side, as kernels read it; autograd may hand over any strides."""
    return d_out if d_out.shape[-1] == 1 or d_out.stride(-1) == 1 else d_out.contiguous()


def _dense_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """The gradients that are wanted; an empty tensor stands for another."""
    operands, gradients, backend = _bundled(wanted, *arguments)
    read = BackwardOperands(operands, out, lse, readable(d_out), d_lse)
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


def _bundled(wanted: list[bool], *arguments: Any) -> tuple[DenseOperands, Gradients, str]:
    """What the backward pass reads besides d_out and d_lse, and where it writes."""
    named = dict(zip((*TENSORS, *OPTIONS), arguments, strict=True))
    weights = Weights(named["scale"], named["sink"])
    rows = {name: named[name] for name in TENSORS if name != "sink"}
    mask = {name: named[name] for name in ("causal", "window")}
    operands = DenseOperands(**rows, **mask, weights=weights)
    return operands, Gradients.allocate(operands, Wanted(*wanted)), named["backend"]


def _returned(gradients: Gradients, like: Tensor) -> tuple[Tensor, ...]:
    found = (gradients.q, gradients.kv, gradients.k_rope, gradients.sink)
    return or_empty(found, like)


def or_empty(gradients: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """What an operator returns: an empty tensor for a gradient that is not wanted."""
    return tuple(like.new_empty(0) if x is None else x for x in gradients)


def save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], tensors: int
) -> None:
    """Keep the arguments, of which so many are tensors, with out and lse."""
    ctx.set_materialize_grads(False)
    ctx.options = inputs[tensors:]
    ctx.save_for_backward(*inputs[:tensors], *output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save_for_backward(ctx, inputs, output, len(TENSORS))


def _save_given(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """The arguments follow out and lse, which are given."""
    _save(ctx, inputs[2:], output)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of all arguments: None for what has none, or is not wanted."""
    return _gradients(ctx, ctx.needs_input_grad, d_out, d_lse)


def _differentiate_given(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    """None for out and lse, whatever they were computed from."""
    return (None, None, *_gradients(ctx, ctx.needs_input_grad[2:], d_out, d_lse))


def _gradients(
    ctx: Any, needs_input_grad: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needed = dict(zip(TENSORS, needs_input_grad, strict=False))
    kv = needed["k_nope"] or needed["k_rope"] or needed["v"]
    wanted = [needed["q"], kv, needed["sink"]]
    nothing = (None,) * (len(TENSORS) + len(OPTIONS))
    if (d_out is None and d_lse is None) or not any(wanted):
        return nothing
    if d_out is None:
        d_out = torch.zeros_like(out)
    d_q, d_kv, d_rope, d_sink = torch.ops.openmla.dense_backward(
        d_out, d_lse, out, lse, wanted, *tensors, *ctx.options
    )
    d_nope = tensors[1].shape[2]
    found = {
        "q": d_q,
        "k_nope": d_kv[..., :d_nope] if kv else None,
        "k_rope": d_rope,
        "v": d_kv[..., d_nope:] if kv else None,
        "sink": d_sink,
    }
    by_argument = [found[name] if needed[name] else None for name in DIFFERENTIABLE]
    named = dict(zip(DIFFERENTIABLE, by_argument, strict=True))
    return (*(named.get(name) for name in TENSORS), *(None for _ in OPTIONS))


def refuse_second_derivative(ctx: Any, *gradients: Any) -> Any:
    """The formula of an operator that computes gradients."""
    raise Unsupported(
        "a second derivative: openmla computes gradients, not gradients of gradients",
        "torch.autograd.grad(…, create_graph=False)",
    )


class Operator(NamedTuple):
    """A torch operator that autograd differentiates, or refuses to."""

    run: Callable[..., Any]
    fake: Callable[..., Any]
    """Its results, not yet written: what torch.compile sees."""
    formula: Callable[..., Any] = refuse_second_derivative
    save: Callable[..., None] | None = None
    """What the formula reads."""


def register(operators: dict[str, Operator], schemas: dict[str, str]) -> None:
    """Make operators torch's, under their names."""
    for name, operator in operators.items():
        torch.library.define(f"openmla::{name}", schemas[name])
        torch.library.impl(f"openmla::{name}", "CompositeExplicitAutograd", operator.run)
        torch.library.register_fake(f"openmla::{name}", operator.fake)
        torch.library.register_autograd(
            f"openmla::{name}", operator.formula, setup_context=operator.save
        )


register(
    {
        "dense_train": Operator(_dense_train, _fake_train, _differentiate, _save),
        "dense_given": Operator(_dense_given, _fake_given, _differentiate_given, _save_given),
        "dense_backward": Operator(_dense_backward, _fake_backward),
    },
    SCHEMAS,
)
