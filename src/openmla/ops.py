"""The calls as torch operators, so that torch.compile and torch.export see one opaque op each.

Called by openmla.api, which has checked the arguments and allocated the outputs. Each operator
writes into its outputs: Problem -> plan -> launch. The fake implementations do nothing, because the
outputs already have their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openmla import checks, reference
from openmla.cache import LatentCache
from openmla.kernels.launch import launch
from openmla.kernels.merge import merge
from openmla.operands import DenseOperands, LatentOperands, Results, SparseOperands, Weights
from openmla.plan import Plan, plan
from openmla.problem import Problem, RopeSource

# `str` arguments: formats and backends. `*_latent` is the latent width of a cache (0: no cache).
SCHEMAS = {
    "dense": (
        "(Tensor q, Tensor k_nope, Tensor? k_rope, Tensor v, Tensor? cache_data, "
        "Tensor? cache_scales, str cache_format, int cache_latent, Tensor? block_table, "
        "Tensor? cache_lengths, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sink, "
        "Tensor? q_scale, Tensor? k_scale, float scale, bool causal, str backend, "
        "Tensor(a!) out, Tensor(b!)? lse) -> ()"
    ),
    "latent": (
        "(Tensor q, Tensor cache_data, Tensor? cache_scales, str cache_format, int cache_latent, "
        "Tensor block_table, Tensor cache_lengths, Tensor cu_seqlens_q, Tensor? sink, "
        "Tensor? q_scale, Tensor? k_scale, float scale, bool causal, int d_v, str backend, "
        "Tensor(a!) out, Tensor(b!)? lse) -> ()"
    ),
    "sparse": (
        "(Tensor q, Tensor kv, Tensor? cache_scales, str cache_format, int cache_latent, "
        "Tensor indices, Tensor? topk_lengths, Tensor? sink, Tensor? q_scale, Tensor? k_scale, "
        "float scale, int d_v, str backend, "
        "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? max_logits) -> ()"
    ),
    "merge_states": (
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
        "Tensor(a!) out, Tensor(b!) lse) -> ()"
    ),
}
_DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
}


def _dense(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    cache_data: Tensor | None,
    cache_scales: Tensor | None,
    cache_format: str,
    cache_latent: int,
    block_table: Tensor | None,
    cache_lengths: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sink: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    scale: float,
    causal: bool,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    cache, source = None, _rope_source(k_rope)
    if cache_data is not None:
        d_rope = q.shape[2] - k_nope.shape[2]
        cache = LatentCache(cache_data, cache_scales, cache_latent, d_rope, cache_format)
        source = "cache"
    if q.device.type == "cpu":
        checks.ragged_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
        checks.ragged_values("cu_seqlens_k", cu_seqlens_k, k_nope.shape[0], "the keys")
        if cache is not None and block_table is not None and cache_lengths is not None:
            checks.paged_values(cache, block_table, cache_lengths)
            checks.equal_lengths(cache_lengths, cu_seqlens_k)
    weights = Weights(scale, sink, q_scale, k_scale)
    operands = DenseOperands(
        q, k_nope, k_rope, v, cu_seqlens_q, cu_seqlens_k, causal, weights, cache, block_table
    )
    problem = Problem(
        form="dense",
        heads=q.shape[1],
        d_nope=k_nope.shape[2],
        d_rope=q.shape[2] - k_nope.shape[2],
        d_v=v.shape[2],
        q_dtype=_DTYPE_NAMES[q.dtype],
        kv_dtype=_DTYPE_NAMES[k_nope.dtype],
        v_dtype=_DTYPE_NAMES[v.dtype],
        rope=source,
        rope_dtype=cache_format or _DTYPE_NAMES[(k_nope if k_rope is None else k_rope).dtype],
        page_size=0 if cache is None else cache.page_size,
        causal=causal,
        has_sink=sink is not None,
        has_q_scale=q_scale is not None,
        has_k_scale=k_scale is not None,
        wants_lse=lse is not None,
        batch=cu_seqlens_q.shape[0] - 1,
        total_q=q.shape[0],
        total_k=k_nope.shape[0],
        aligned_16=_aligned_16(q, k_nope, v, out, *([] if k_rope is None else [k_rope])),
    )
    _run(problem, backend, operands, Results(out, lse))


def _latent(
    q: Tensor,
    cache_data: Tensor,
    cache_scales: Tensor | None,
    cache_format: str,
    cache_latent: int,
    block_table: Tensor,
    cache_lengths: Tensor,
    cu_seqlens_q: Tensor,
    sink: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    scale: float,
    causal: bool,
    d_v: int,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    d_rope = q.shape[2] - cache_latent
    cache = LatentCache(cache_data, cache_scales, cache_latent, d_rope, cache_format)
    if q.device.type == "cpu":
        checks.ragged_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
        checks.paged_values(cache, block_table, cache_lengths)
    weights = Weights(scale, sink, q_scale, k_scale)
    operands = LatentOperands(
        q, cache, block_table, cache_lengths, cu_seqlens_q, causal, d_v, weights
    )
    problem = _latent_problem(
        "latent", q, cache_format, cache_latent, d_v, weights, lse is not None,
        page_size=cache.page_size, causal=causal, batch=cu_seqlens_q.shape[0] - 1,
        total_k=cache.rows, aligned_16=_aligned_16(q, cache_data, out),
    )  # fmt: skip
    _run(problem, backend, operands, Results(out, lse))


def _sparse(
    q: Tensor,
    kv: Tensor,
    cache_scales: Tensor | None,
    cache_format: str,
    cache_latent: int,
    indices: Tensor,
    topk_lengths: Tensor | None,
    sink: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    scale: float,
    d_v: int,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
    max_logits: Tensor | None,
) -> None:
    rows: LatentCache | Tensor = kv
    if cache_format:
        d_rope = q.shape[2] - cache_latent
        rows = LatentCache(kv, cache_scales, cache_latent, d_rope, cache_format)
    weights = Weights(scale, sink, q_scale, k_scale)
    operands = SparseOperands(q, rows, indices, topk_lengths, d_v, weights)
    problem = _latent_problem(
        "sparse", q, cache_format or _DTYPE_NAMES[kv.dtype], cache_latent or d_v, d_v, weights,
        lse is not None, page_size=kv.shape[1] if cache_format else 0, causal=False,
        topk=indices.shape[1], has_topk_lengths=topk_lengths is not None, total_k=operands.rows,
        aligned_16=_aligned_16(q, kv, out),
    )  # fmt: skip
    _run(problem, backend, operands, Results(out, lse, max_logits))


def _latent_problem(
    form: str,
    q: Tensor,
    kv_dtype: str,
    latent: int,
    d_v: int,
    weights: Weights,
    wants_lse: bool,
    **rest: Any,
) -> Problem:
    """What the latent and the sparse form have in common."""
    return Problem(
        form=form,  # type: ignore[arg-type]
        heads=q.shape[1],
        d_nope=latent,
        d_rope=q.shape[2] - latent,
        d_v=d_v,
        q_dtype=_DTYPE_NAMES[q.dtype],
        kv_dtype=kv_dtype,
        v_dtype=kv_dtype,
        rope="shared" if q.shape[2] > latent else "none",
        rope_dtype=kv_dtype,
        has_sink=weights.sink is not None,
        has_q_scale=weights.q_scale is not None,
        has_k_scale=weights.k_scale is not None,
        wants_lse=wants_lse,
        total_q=q.shape[0],
        **rest,
    )


def _rope_source(k_rope: Tensor | None) -> RopeSource:
    if k_rope is None:
        return "none"
    return "shared" if k_rope.dim() == 2 else "per_head"


def _aligned_16(*tensors: Tensor) -> bool:
    return all(
        t.data_ptr() % 16 == 0
        and all(t.stride(i) * t.element_size() % 16 == 0 for i in range(t.dim() - 1))
        for t in tensors
    )


def _run(
    problem: Problem,
    backend: str,
    operands: DenseOperands | LatentOperands | SparseOperands,
    results: Results,
) -> None:
    checks.separate_outputs(operands, results)
    chosen = _plan_for_device(problem, operands.q.device, backend)
    if chosen.backend == "reference":
        _run_reference(operands, results)
    else:
        launch(chosen, operands, results)


@lru_cache(maxsize=4096)
def _plan_for_device(problem: Problem, device: torch.device, backend: str) -> Plan:
    return plan(problem, target_name(device), backend)


def target_name(device: torch.device) -> str:
    """The planning target that a device is."""
    return device.type


def _run_reference(
    operands: DenseOperands | LatentOperands | SparseOperands, results: Results
) -> None:
    if isinstance(operands, DenseOperands):
        truth = reference.dense(operands)
    elif isinstance(operands, LatentOperands):
        truth = reference.latent(operands)
    else:
        truth = reference.sparse(operands)
    results.out.copy_(truth.out)
    if results.lse is not None:
        results.lse.copy_(truth.lse)
    if results.max_logits is not None:
        results.max_logits.copy_(truth.max_logits)


def _register() -> None:
    implementations: dict[str, Callable[..., None]] = {
        "dense": _dense, "latent": _latent, "sparse": _sparse, "merge_states": merge
    }  # fmt: skip
    for name, function in implementations.items():
        torch.library.define(f"openmla::{name}", SCHEMAS[name])
        torch.library.impl(f"openmla::{name}", "CompositeExplicitAutograd", function)
        torch.library.register_fake(f"openmla::{name}", lambda *args, **kwargs: None)


_register()
