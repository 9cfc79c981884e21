"""The calls as torch operators, so that torch.compile and torch.export see one opaque op each.

Called by openmla.api, which has checked the arguments and allocated the outputs. Each operator
writes into its outputs: operands -> Problem -> Plan -> launch, which openmla.cached keeps. The fake
implementations do nothing, because the outputs already have their shapes.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import infer_schema

from openmla import cached, checks
from openmla.cache import LatentCache
from openmla.dispatch import run_call
from openmla.formats import Writer
from openmla.kernels.launch import append_rows, gather_rows, quantize_rows
from openmla.kernels.merge import merge
from openmla.operands import (
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.planning import Plan
from openmla.sources import Listed, Source, Span, TurnBack

if TYPE_CHECKING:
    from openmla.kernels.call import Call

Bundle = tuple[Operands, Results, str]
Launched = tuple[Plan | None, "list[tuple[Call, Any]]"]
"""The plan of a call (the last one, where there are several), and what was launched."""
# What operators write into.
WRITTEN = {
    "cache_append": ("data", "scales"),
    "index_append": ("data",),
    "quantize": ("outs", "scale"),
}
RESULTS = ("out", "lse", "max_logits", "counts", "mask")  # of the others


# `str` arguments: formats and backends. `*_latent` is the latent width of a cache (0: no cache).
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
    k_start: Tensor | None,
    sink: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> Bundle:
    cache = None
    if cache_data is not None:
        d_rope = q.shape[2] - k_nope.shape[2]
        cache = LatentCache(cache_data, cache_scales, cache_latent, d_rope, cache_format)
    if q.device.type == "cpu":
        checks.ragged_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
        if k_start is None:
            checks.ragged_values("cu_seqlens_k", cu_seqlens_k, k_nope.shape[0], "the keys")
        else:
            checks.shared_values(k_start, cu_seqlens_k, k_nope.shape[0])
        if key_mask is not None:
            checks.mask_values(key_mask.shape[1], cu_seqlens_k)
        if cache is not None and block_table is not None and cache_lengths is not None:
            first_keys = checks.first_keys(cu_seqlens_q, cache_lengths, window)
            checks.paged_values(cache, block_table, cache_lengths, first_keys)
            checks.equal_lengths(cache_lengths, cu_seqlens_k)
    weights = Weights(scale, sink, q_scale, k_scale)
    operands = DenseOperands(
        q=q,
        k_nope=k_nope,
        k_rope=k_rope,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        weights=weights,
        rope_cache=cache,
        block_table=block_table,
        k_start=k_start,
        key_mask=key_mask,
        window=window,
    )
    return operands, Results(out, lse), backend


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
    window: int,
    invariant: bool,
    range_keys: int,
    d_v: int,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> Bundle:
    d_rope = q.shape[2] - cache_latent
    cache = LatentCache(cache_data, cache_scales, cache_latent, d_rope, cache_format)
    if q.device.type == "cpu":
        checks.ragged_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
        first_keys = checks.first_keys(cu_seqlens_q, cache_lengths, window)
        checks.paged_values(cache, block_table, cache_lengths, first_keys)
    weights = Weights(scale, sink, q_scale, k_scale)
    flags = causal, d_v, weights, invariant or range_keys > 0, window, range_keys
    operands = LatentOperands(q, cache, block_table, cache_lengths, cu_seqlens_q, *flags)
    return operands, Results(out, lse), backend


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
) -> Bundle:
    rows = _rows(q, kv, cache_scales, cache_format, cache_latent)
    weights = Weights(scale, sink, q_scale, k_scale)
    operands = SparseOperands(q, rows, indices, topk_lengths, d_v, weights)
    return operands, Results(out, lse, max_logits), backend


def _attend(
    q: Tensor,
    kv: Tensor,
    cache_scales: Tensor | None,
    cache_format: str,
    cache_latent: int,
    indices: Tensor | None,
    topk_lengths: Tensor | None,
    block_table: Tensor | None,
    request: Tensor | None,
    begin: Tensor | None,
    end: Tensor | None,
    second_kv: Tensor | None,
    second_scales: Tensor | None,
    second_format: str,
    second_latent: int,
    second_indices: Tensor | None,
    second_lengths: Tensor | None,
    second_table: Tensor | None,
    second_request: Tensor | None,
    second_begin: Tensor | None,
    second_end: Tensor | None,
    turn_table: Tensor | None,
    turn_positions: Tensor | None,
    sink: Tensor | None,
    scale: float,
    d_v: int,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> Bundle:
    """Two sources, each as the tensors of its rows, and either a list or a span."""
    rows = _rows(q, kv, cache_scales, cache_format, cache_latent)
    sources = [_source(rows, indices, topk_lengths, block_table, request, begin, end)]
    if second_kv is not None:
        rows = _rows(q, second_kv, second_scales, second_format, second_latent)
        lists, line = (second_indices, second_lengths), (second_table, second_request)
        sources.append(_source(rows, *lists, *line, second_begin, second_end))
    turn = None
    if turn_table is not None and turn_positions is not None:
        turn = TurnBack(turn_table, turn_positions)
    operands = AttendOperands(q, tuple(sources), d_v, Weights(scale, sink), turn)
    return operands, Results(out, lse), backend


def _rows(
    q: Tensor, data: Tensor, scales: Tensor | None, format: str, latent: int
) -> LatentCache | Tensor:
    """Rows as they came: a cache where there is a format."""
    return LatentCache(data, scales, latent, q.shape[2] - latent, format) if format else data


def _source(
    rows: LatentCache | Tensor,
    indices: Tensor | None,
    lengths: Tensor | None,
    table: Tensor | None,
    request: Tensor | None,
    begin: Tensor | None,
    end: Tensor | None,
) -> Source:
    if indices is not None:
        return Listed(rows, indices, lengths)
    assert isinstance(rows, LatentCache) and table is not None
    assert request is not None and begin is not None and end is not None
    return Span(rows, table, request, begin, end)


def _cache_append(
    data: Tensor,
    scales: Tensor | None,
    format: str,
    latent_width: int,
    latent: Tensor,
    rope: Tensor,
    slots: Tensor,
    writer: str = "openmla",
) -> None:
    cache = LatentCache(data, scales, latent_width, rope.shape[1], format)
    append_rows(cache, latent, rope, slots, cast(Writer, writer))


def _cache_gather(
    data: Tensor, scales: Tensor | None, format: str, latent_width: int, rows: Tensor, out: Tensor
) -> None:
    cache = LatentCache(data, scales, latent_width, out.shape[1] - latent_width, format)
    gather_rows(cache, rows, out)


def _attention(bundled: Callable[..., Bundle]) -> Callable[..., Launched]:
    """A call whose arguments `bundled` takes: checked, planned, launched."""

    def launched(*args: Any) -> Launched:
        operands, results, backend = bundled(*args)
        checks.separate_outputs(operands, results)
        return run_call(operands, results, backend)

    launched.__signature__ = inspect.signature(bundled)  # type: ignore[attr-defined]
    return launched


def cached_operator(name: str, launched: Callable[..., Launched]) -> Callable[..., None]:
    """The operator of these arguments: `launched`, unless a call like it was made before."""
    signature = inspect.signature(launched).replace(return_annotation=None)
    names = tuple(signature.parameters)

    def run(*args: Any) -> None:
        if cached.run(name, args) is None:
            cached.remember(name, names, args, *launched(*args))

    run.__signature__ = signature  # type: ignore[attr-defined]  # what its schema is read from
    return run


def register(operators: dict[str, Callable[..., None]]) -> None:
    """Define torch.ops.openmla.* by the signatures of functions that write into arguments."""
    for name, function in operators.items():
        taken = list(inspect.signature(function).parameters)
        written = set(taken).intersection(WRITTEN.get(name, RESULTS))
        schema = infer_schema(function, mutates_args=written)
        places = [i for i, parameter in enumerate(taken) if parameter in written]
        # Widths are fixed where a graph is traced.
        torch.library.define(f"openmla::{name}", schema.replace("SymInt", "int"))
        run = _marking_written(function, places)
        torch.library.impl(f"openmla::{name}", "CompositeExplicitAutograd", run)
        torch.library.register_fake(f"openmla::{name}", lambda *args, **kwargs: None)


def _marking_written(function: Callable[..., None], places: list[int]) -> Callable[..., None]:
    """`function`, after which the arguments at some places have a new version in torch's count. A
    GPU's kernels write by address, which torch does not see: without it, a backward pass would take
    a tensor that was saved before for the same."""

    @wraps(function)
    def run(*args: Any) -> None:
        function(*args)
        for place in places:
            if args[place] is not None:
                increment_version(args[place])

    return run


FORMS: dict[str, Callable[..., Bundle]] = {
    "dense": _dense,
    "latent": _latent,
    "sparse": _sparse,
    "attend": _attend,
}
"""Operators of attention by name; `attend` is the sparse form with spans or a second source."""
register(
    {
        "merge_many": merge,
        "cache_append": _cache_append,
        "cache_gather": _cache_gather,
        "quantize": quantize_rows,
        **{form: cached_operator(form, _attention(bundled)) for form, bundled in FORMS.items()},
    }
)
