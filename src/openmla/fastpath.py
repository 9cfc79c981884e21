"""Calls that were made before skip checking and planning.

A dense call on a GPU is checked and planned once; what came of it is kept under everything that the
checks and the plan depend on, except addresses and token counts, which the kept launch looks at by
itself. Whatever is not plain and known goes the long way, which also has all the error messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmla.dispatch import plan_call
from openmla.operands import DenseOperands, Results

if TYPE_CHECKING:
    from openmla.kernels.hopper.replay import DenseReplay

MOST_KNOWN = 1024
_known: dict[tuple[Any, ...], DenseReplay] = {}


def dense_key(op: DenseOperands, results: Results, backend: str) -> tuple[Any, ...] | None:
    """Everything a dense launch depends on besides addresses and token counts; None: no fast way.

    Nothing is assumed of the operands but their types here, so that unchecked ones may be asked
    about: what differs from a checked call in anything but counts has another key.
    """
    q, k, rope, v, out, lse = op.q, op.k_nope, op.k_rope, op.v, results.out, results.lse
    cu_q, cu_k, weights = op.cu_seqlens_q, op.cu_seqlens_k, op.weights
    if op.rope_cache is not None or weights.q_scale is not None or weights.k_scale is not None:
        return None
    sink = weights.sink
    return (
        q.device, q.dtype, q.shape[1:], q.stride(),
        k.device, k.dtype, k.shape[1:], k.stride(),
        v.device, v.dtype, v.shape[1:], v.stride(),
        None if rope is None else (rope.device, rope.dtype, rope.shape[1:], rope.stride()),
        out.device, out.dtype, out.shape[1:], out.stride(),
        # Rows of an output with gaps might overlap if there were more of them.
        None if out.is_contiguous() else out.shape[0],
        cu_q.device, cu_q.dtype, cu_q.stride(), cu_k.device, cu_k.dtype, cu_k.stride(),
        None if lse is None else lse.stride(),
        None if sink is None else (sink.device, sink.dtype, sink.shape, sink.stride()),
        weights.scale, op.causal, backend,
    )  # fmt: skip


def run_dense(op: DenseOperands, results: Results, backend: str) -> bool:
    """Launch a call that is known; False if it is not, and then nothing has happened."""
    if not _known:
        return False
    replay = _known.get(dense_key(op, results, backend))  # type: ignore[arg-type]
    return replay is not None and replay.run(op, results)


def learn_dense(op: DenseOperands, results: Results, backend: str) -> None:
    """Keep what a checked call, just launched, came to."""
    plan = plan_call(op, results, backend)
    key = dense_key(op, results, backend)
    vectors = (op.cu_seqlens_q, op.cu_seqlens_k, op.weights.sink)
    if (
        plan.backend != "hopper" or key is None or not results.out.numel()
        or not op.k_nope.shape[0] or torch.cuda.current_device() != op.q.device.index
        or torch.cuda.is_current_stream_capturing()
        or not all(x is None or x.is_contiguous() for x in vectors)
    ):  # fmt: skip
        return
    from openmla.kernels.hopper.replay import DenseReplay

    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = DenseReplay(plan, op, results)
    _known[key].add(plan, op, results)


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary CUDA tensors in ordinary eager execution without gradients."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    gradients = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor or not x.is_cuda or (gradients and x.requires_grad):
            return False
    return True
