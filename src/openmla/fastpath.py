"""Calls that were made before skip checking and planning.

A dense call on a GPU, or a sparse one over bf16 or fp16 rows, is checked and planned once; what
came of it is kept under everything that the checks and the plan depend on, except addresses and
token counts, which the kept launch looks at by itself. Whatever is not plain and known goes the
long way, which also has all the error messages.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.operands import DenseOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.problem import Problem

MOST_KNOWN = 1024
# Fields of a Problem that the keys below hold, or that a kept launch looks at by itself. A call
# with anything else in its Problem is never kept.
KEYED = frozenset({
    "form", "heads", "d_nope", "d_rope", "d_v", "q_dtype", "kv_dtype", "v_dtype", "rope",
    "rope_dtype", "page_size", "causal", "topk", "has_topk_lengths", "has_sink", "has_q_scale",
    "has_k_scale", "has_k_start", "has_key_mask", "wants_lse", "wants_max_logits", "batch",
    "total_q", "total_k", "aligned_16",
})  # fmt: skip
Key = tuple[Any, ...] | None
Repeated = DenseOperands | SparseOperands


class Replay(Protocol):
    """A kept launch."""

    def add(self, plan: Plan, op: Any, results: Results) -> None:
        """Keep the kernels of a call that was launched before."""

    def run(self, op: Any, results: Results) -> bool:
        """Launch, or return False: then the call must be checked and planned like a new one."""


_known: dict[Key, Replay] = {}


def dense_key(op: DenseOperands, results: Results, backend: str) -> Key:
    """Everything a dense launch depends on besides addresses and token counts; None: no fast way.

    Nothing is assumed of the operands but their types here, so that unchecked ones may be asked
    about: what differs from a checked call in anything but counts has another key.
    """
    q, k, rope, v, out, lse = op.q, op.k_nope, op.k_rope, op.v, results.out, results.lse
    cu_q, cu_k, weights = op.cu_seqlens_q, op.cu_seqlens_k, op.weights
    rare = (op.rope_cache, op.k_start, op.key_mask, weights.q_scale, weights.k_scale)
    if any(x is not None for x in rare):
        return None
    sink = weights.sink
    return (
        "dense", q.device, q.dtype, q.shape[1:], q.stride(),
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


def sparse_key(op: SparseOperands, results: Results, backend: str) -> Key:
    """The same for a sparse launch. The pool is part of it: it stays while a model is served."""
    q, cache, lists, lengths, weights = op.q, op.cache, op.indices, op.topk_lengths, op.weights
    latent = 0
    if isinstance(cache, LatentCache):
        if cache.format != "bf16":
            return None
        latent, cache = cache.latent, cache.data
    if weights.q_scale is not None or weights.k_scale is not None:
        return None
    out, lse, logits, sink = results.out, results.lse, results.max_logits, weights.sink
    return (
        "sparse", q.device, q.dtype, q.shape[1:], q.stride(),
        latent, cache.device, cache.dtype, cache.shape, cache.stride(),
        lists.device, lists.dtype, lists.shape[1:], lists.stride(),
        None if lengths is None else (lengths.device, lengths.dtype, lengths.stride()),
        out.device, out.dtype, out.shape[1:], out.stride(),
        # Rows of an output with gaps might overlap if there were more of them.
        None if out.is_contiguous() else out.shape[0],
        None if lse is None else lse.stride(), None if logits is None else logits.stride(),
        None if sink is None else (sink.device, sink.dtype, sink.shape, sink.stride()),
        weights.scale, op.d_v, backend,
    )  # fmt: skip


def may_repeat() -> bool:
    """Whether any call is known: if not, outputs need not be made to ask about one."""
    return not torch.compiler.is_compiling() and bool(_known)


def run(op: Repeated, results: Results, backend: str) -> bool:
    """Launch a call that is known; False if it is not, and then nothing has happened."""
    if not _known:
        return False
    replay = _known.get(_key(op, results, backend))
    return replay is not None and replay.run(op, results)


def learn(plan: Plan, op: Repeated, results: Results, backend: str) -> None:
    """Keep what a checked call, just launched with this plan, came to."""
    key = _key(op, results, backend) if _repeatable(plan, op, results) else None
    if key is None:
        return
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _replay(plan, op, results)
    _known[key].add(plan, op, results)


def _key(op: Repeated, results: Results, backend: str) -> Key:
    if isinstance(op, DenseOperands):
        return dense_key(op, results, backend)
    return sparse_key(op, results, backend)


def _replay(plan: Plan, op: Repeated, results: Results) -> Replay:
    from openmla.kernels.hopper.dense.replay import DenseReplay
    from openmla.kernels.hopper.latent.replay import SparseReplay

    if isinstance(op, DenseOperands):
        return DenseReplay(plan, op, results)
    return SparseReplay(plan, op, results)


def _repeatable(plan: Plan, op: Repeated, results: Results) -> bool:
    """Whether a launch can be kept at all. What is not contiguous would be copied."""
    if plan.backend != "hopper" or not keyed(plan.problem):
        return False
    if isinstance(op, DenseOperands):
        keys, vectors = op.k_nope.shape[0], [op.cu_seqlens_q, op.cu_seqlens_k, op.weights.sink]
    else:
        keys, vectors = op.rows * op.indices.shape[1], [op.topk_lengths, op.weights.sink]
        if op.indices.stride(1) != 1:
            return False
    return bool(
        keys and results.out.numel()
        and torch.cuda.current_device() == op.q.device.index
        and not torch.cuda.is_current_stream_capturing()
        and all(x is None or x.is_contiguous() for x in vectors)
    )  # fmt: skip


def keyed(problem: Problem) -> bool:
    """Whether all that sets a problem apart is in the keys."""
    return all(f.name in KEYED or getattr(problem, f.name) == f.default for f in fields(problem))


def plain(needed: tuple[object, ...], *optional: object) -> bool:
    """Whether these are ordinary CUDA tensors in ordinary eager execution without gradients."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    gradients = torch.is_grad_enabled()
    for x in (*needed, *(x for x in optional if x is not None)):
        if type(x) is not Tensor or not x.is_cuda or (gradients and x.requires_grad):
            return False
    return True
