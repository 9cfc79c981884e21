"""Operands that stand in for those of a call: zeros in the shapes and types of a problem.

On the device "meta", which has shapes and no memory, a problem of any size can be compiled:

>>> v3 = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512, total_k=512)
>>> operands, results = operands_of(v3)
>>> operands.q.shape, operands.problem(results) == v3
(torch.Size([512, 16, 192]), True)
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from openmla.arithmetic import ceildiv
from openmla.backward.operands import BackwardOperands, Gradients
from openmla.backward.problem import BackwardProblem
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.cache import LatentCache
from openmla.formats import FormatName
from openmla.indexer.cache import MXFP4, IndexCache
from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.indexer.loss_problem import LossProblem
from openmla.indexer.operands import (
    Requests,
    ScoresOperands,
    SelectOperands,
    SelectResults,
    Windows,
)
from openmla.indexer.problem import DIM, IndexProblem
from openmla.operands import (
    DTYPE_NAMES,
    AnyOperands,
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.planning.problems import AnyProblem
from openmla.problem import Problem, RowSource
from openmla.sources import Listed, Source, Span, TurnBack

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PAGE = 64  # of a cache whose problem names no page size
LATENT = 512  # of the rows that hold the rope part of dense keys
WORD = 32  # keys of a word of a mask


class _Zeros:
    """Makes tensors on one device, whatever torch's defaults are."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def __call__(self, dtype: str, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)

    def stats(self, wanted: bool, *shape: int) -> Tensor | None:
        return self("fp32", *shape) if wanted else None

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def ends(self, rows: int, batch: int) -> Tensor:
        """cu_seqlens of sequences of about equal lengths.

        Never on "meta", where all tensors have one address: whether those of queries and keys are
        the same tensor matters.
        """
        ends = [rows * i // batch for i in range(batch + 1)]
        device = "cpu" if self.device.type == "meta" else self.device
        return torch.tensor(ends, dtype=torch.int32, device=device)

    def cache(
        self, rows: Problem | RowSource, latent: int, rope: int, format: str, gap: int
    ) -> LatentCache:
        """Room for all rows; `gap` more between pages."""
        size = rows.page_size or PAGE
        cache = LatentCache.allocate(
            num_pages=-(-rows.total_k // size),
            page_size=size + gap,
            latent=latent,
            rope=rope,
            format=cast(FormatName, format),
            device=self.device,
        )
        scales = None if cache.scales is None else cache.scales[:, :size]
        return replace(cache, data=cache.data[:, :size], scales=scales)


def operands_of(
    problem: AnyProblem, device: torch.device | str = "meta", page_gap: int = 0
) -> tuple[AnyOperands, Any]:
    """Operands and results of a call that poses the problem; `page_gap` rows lie between pages."""
    zeros = _Zeros(device)
    if isinstance(problem, IndexProblem):
        return _scores(zeros, problem) if problem.form == "scores" else _select(zeros, problem)
    if isinstance(problem, BackwardProblem):
        return _backward(problem, device)
    if isinstance(problem, LossProblem):
        return _loss(zeros, problem)
    rows, heads = problem.total_q, problem.heads
    q = zeros(problem.q_dtype, rows, heads, problem.d_qk)
    results = Results(
        zeros(problem.out_dtype, rows, heads, problem.d_v),
        zeros.stats(problem.wants_lse, rows, heads),
        zeros.stats(problem.wants_max_logits, rows, heads),
    )
    weights = Weights(
        problem.d_qk**-0.5,
        zeros.stats(problem.has_sink, heads),
        zeros.stats(problem.has_q_scale, rows),
        zeros.stats(problem.has_k_scale, problem.total_k),
    )
    if problem.form == "dense":
        return _dense(zeros, problem, q, weights), results
    if problem.is_attend:
        sources = tuple(_source(zeros, problem, source, page_gap) for source in problem.sources)
        return AttendOperands(q, sources, problem.d_v, weights, _turn_back(zeros, problem)), results
    if problem.form == "sparse":
        listed = _source(zeros, problem, problem.sources[0], page_gap)
        assert isinstance(listed, Listed)
        rows_of = listed.rows, listed.indices, listed.lengths
        return SparseOperands(q, *rows_of, problem.d_v, weights), results
    cache = zeros.cache(problem, problem.d_nope, problem.d_rope, problem.kv_dtype, page_gap)
    table = zeros.ints(problem.batch, ceildiv(problem.most_keys, cache.page_size))
    lengths = zeros.ends(problem.total_k, problem.batch).diff()
    cu = zeros.ends(rows, problem.batch)
    flags = problem.causal, problem.d_v, weights, problem.invariant, problem.window
    op = LatentOperands(q, cache, table, lengths, cu, *flags, problem.range_keys)
    return op, results


def _turn_back(zeros: _Zeros, problem: Problem) -> TurnBack | None:
    """Angles of one position, and positions as engines have them."""
    if not problem.turned_back:
        return None
    positions = torch.zeros(problem.total_q, dtype=torch.int64, device=zeros.device)
    return TurnBack(zeros("fp32", 1, problem.turned_back), positions)


def _source(zeros: _Zeros, problem: Problem, source: RowSource, page_gap: int) -> Source:
    """A list, or a span of the requests that there is a query for."""
    tokens = zeros.ints(problem.total_q)
    cache: LatentCache | Tensor
    if source.kv_dtype in DTYPES and not source.page_size:
        cache = zeros(source.kv_dtype, source.total_k, problem.d_qk)
    else:
        widths = problem.d_nope, problem.d_rope
        cache = zeros.cache(source, *widths, source.kv_dtype, page_gap)
    if source.span:
        assert isinstance(cache, LatentCache)
        table = zeros.ints(problem.batch, ceildiv(source.table_keys, cache.page_size))
        return Span(cache, table, tokens, tokens, tokens)
    lists = zeros.ints(problem.total_q, source.topk)
    return Listed(cache, lists, tokens if source.has_topk_lengths else None)


def _backward(problem: BackwardProblem, device: torch.device | str) -> tuple[AnyOperands, Any]:
    forward, results = operands_of(problem.forward, device)
    d_lse = torch.zeros_like(results.lse) if problem.has_d_lse else None
    d_out = torch.zeros_like(results.out)
    if isinstance(forward, SparseOperands):
        given = SparseBackwardOperands(forward, results.out, results.lse, d_out, d_lse)
        return given, RowGradients.allocate(forward)
    assert isinstance(forward, DenseOperands)
    operands = BackwardOperands(forward, results.out, results.lse, d_out, d_lse)
    return operands, Gradients.allocate(forward)


def _loss(zeros: _Zeros, problem: LossProblem) -> tuple[LossOperands, Any]:
    attention, results = operands_of(problem.attention, zeros.device)
    assert isinstance(attention, DenseOperands)
    rows, heads = problem.total_q, problem.index_heads
    operands = LossOperands(
        zeros(problem.q_dtype, rows, heads, problem.index_dim),
        zeros(problem.kv_dtype, problem.total_k, problem.index_dim),
        zeros("fp32", rows, heads),
        attention,
        results.lse,
        zeros.stats(problem.wants_gradients, rows),
    )
    if problem.wants_gradients:
        return operands, LossGradients.allocate(operands)
    return operands, zeros("fp32", rows)


def _dense(zeros: _Zeros, problem: Problem, q: Tensor, weights: Weights) -> DenseOperands:
    heads, keys, batch = problem.key_heads, problem.total_k, problem.batch
    cache = table = rope = None
    if problem.rope == "cache":
        cache = zeros.cache(problem, LATENT, problem.d_rope, problem.rope_dtype, 0)
        table = zeros.ints(batch, cache.num_pages)
    elif problem.rope != "none":
        per_head = (heads,) if problem.rope == "per_head" else ()
        rope = zeros(problem.rope_dtype, keys, *per_head, problem.d_rope)
    cu_q = zeros.ends(problem.total_q, batch)
    cu_k = cu_q if problem.self_attention else zeros.ends(keys, batch)
    words = -(-keys // (4 * WORD)) * 4  # rows of a mask begin at 16 bytes
    return DenseOperands(
        q,
        zeros(problem.kv_dtype, keys, heads, problem.d_nope),
        rope,
        zeros(problem.v_dtype, keys, heads, problem.d_v),
        cu_q,
        cu_k,
        problem.causal,
        weights,
        cache,
        table,
        zeros.ints(batch) if problem.has_k_start else None,
        zeros.ints(problem.total_q, words) if problem.has_key_mask else None,
        problem.window,
    )


def _scores(zeros: _Zeros, problem: IndexProblem) -> tuple[ScoresOperands, Tensor]:
    rows, width, page = problem.total_q, problem.width, problem.page_size
    row, out = zeros.ints(rows), zeros("fp32", rows, width)
    q, weights = zeros("e4m3", rows, problem.heads, DIM), zeros("fp32", rows, problem.heads)
    if not page:
        keys = zeros("e4m3", width, DIM), zeros("fp32", width)
        return ScoresOperands(q, weights, keys, Windows(row, row)), out
    table = zeros.ints(max(problem.batch, 1), ceildiv(width, page))
    cache = IndexCache.allocate(
        num_pages=table.shape[1],
        page_size=page,
        scales=MXFP4 if problem.key_dtype == "e2m1" else "ue8m0",
        device=zeros.device,
    )
    requests = Requests(zeros.ints(table.shape[0] + 1), zeros.ints(table.shape[0]))
    windows = Windows(row, row, row, row[:1], requests)
    return ScoresOperands(q, weights, cache, windows, table), out


def _select(zeros: _Zeros, problem: IndexProblem) -> tuple[SelectOperands, SelectResults]:
    rows, width, page = problem.total_q, problem.width, problem.page_size
    row, keeps = zeros.ints(rows), int(problem.keeps)
    results = SelectResults(
        zeros.ints(rows, problem.topk),
        row if problem.wants_counts else None,
        zeros.ints(rows, ceildiv(width, WORD)) if problem.wants_mask else None,
    )
    operands = SelectOperands(
        zeros("fp32", rows, width),
        problem.topk,
        Windows(row, row, row),
        zeros.ints(1, ceildiv(width, page)) if page else None,
        page,
        problem.add_starts,
        keeps,
        keeps,
    )
    return operands, results
