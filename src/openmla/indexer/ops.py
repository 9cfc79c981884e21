"""The indexer's calls as torch operators, so that torch.compile sees one opaque op each.

Called by openmla.indexer.api, which has checked the arguments and allocated the outputs. Windows
come first: where every query's keys begin and end. Scores and selections are then planned and
launched as calls of attention are, and kept as these are (openmla.cached).
"""

import torch
from torch import Tensor

from openmla.arithmetic import ceildiv, round_up
from openmla.checks import ragged_values
from openmla.dispatch import run_call
from openmla.indexer import checks
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import (
    SCORES_STEP,
    FoundWindows,
    Keys,
    ScoresOperands,
    SelectOperands,
    SelectResults,
    Windows,
)
from openmla.indexer.windows import paged_windows
from openmla.kernels.launch import append_keys, current
from openmla.ops import Launched, cached_operator, register
from openmla.planning import Plan

SELECTION_BYTES = 20 << 20
"""Taken off a limit of scores: the lists of Hopper's selection (17 MB on an H200), and windows."""


def windows_of(
    cu_seqlens_q: Tensor, cache_lengths: Tensor, total_q: int, least: int = 0
) -> FoundWindows:
    """Windows over a paged cache, on a GPU still to be written; those of at most `least` keys need
    no scores."""
    if cu_seqlens_q.device.type == "cpu":
        seen = paged_windows(cu_seqlens_q, cache_lengths, total_q)
        return FoundWindows(seen, seen.longer_than(least))
    from openmla.kernels.portable.indexer import windows

    return windows.paged_windows(cu_seqlens_q, cache_lengths, total_q, least)


def given_windows(
    starts: Tensor | None,
    ends: Tensor | None,
    total_q: int,
    width: int,
    device: torch.device,
    cu_seqlens_q: Tensor | None = None,
) -> FoundWindows:
    """Windows of the caller, from the first column to the last where there are none; with
    `cu_seqlens_q`, the sequences that queries are of."""
    if device.type != "cpu":
        from openmla.kernels.portable.indexer import windows

        return windows.given_windows(starts, ends, total_q, width, device, cu_seqlens_q)
    lines = None
    if cu_seqlens_q is not None:
        lines = paged_windows(cu_seqlens_q, torch.zeros_like(cu_seqlens_q[1:]), total_q).sequences
    if starts is None:
        starts = torch.zeros(total_q, dtype=torch.int32, device=device)
    if ends is None:
        ends = torch.full((total_q,), width, dtype=torch.int32, device=device)
    seen = Windows(starts, ends, lines)
    return FoundWindows(seen, seen)


def windows_in_pages(
    cu_seqlens_q: Tensor,
    cache_lengths: Tensor,
    ends: Tensor | None,
    total_q: int,
    width: int,
    least: int = 0,
) -> FoundWindows:
    """Windows over a paged cache: bottom-right causal, or as `ends` say. The latter are scored
    whatever `least` says: what a launch like it reads must be what its caller gave."""
    if ends is None:
        return windows_of(cu_seqlens_q, cache_lengths, total_q, least)
    return given_windows(None, ends, total_q, width, cu_seqlens_q.device, cu_seqlens_q)


def run_scores(op: ScoresOperands, out: Tensor, backend: str, windows: FoundWindows) -> Launched:
    """Plan and launch, behind the launch that writes the windows unless the kernel finds them."""

    def before(plan: Plan) -> None:
        # Without columns nothing is launched, and a selection still reads its windows.
        if not (plan.kernel.finds_windows(plan.config) and op.columns(out)):
            write(windows, op.device)

    return run_call(op, out, backend, before)


def write(windows: FoundWindows, device: torch.device) -> None:
    """Launch what writes windows, where that was not done yet."""
    with current(device):
        windows.write()


def _index_scores(
    q: Tensor,
    keys: Tensor,
    k_scale: Tensor | None,
    page_size: int,
    weights: Tensor,
    cu_seqlens_q: Tensor | None,
    block_table: Tensor | None,
    cache_lengths: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    backend: str,
    out: Tensor,
) -> Launched:
    total_q = q.shape[0]
    inputs = {"q": q, "keys": keys, "keys[1]": k_scale, "weights": weights}
    checks.separate(out, **inputs, block_table=block_table, starts=starts, ends=ends)
    pool: Keys
    if k_scale is None:
        assert cu_seqlens_q is not None and block_table is not None and cache_lengths is not None
        pool = IndexCache.of_pages(keys, page_size)
        if q.device.type == "cpu":
            checks.paged_values(cu_seqlens_q, total_q, pool, block_table, cache_lengths)
            checks.fits(cache_lengths, out.shape[1])
            checks.ends_in_cache(ends, cu_seqlens_q, cache_lengths)
        places = block_table.shape[1] * page_size
        windows = windows_in_pages(cu_seqlens_q, cache_lengths, ends, total_q, places)
    else:
        pool = keys, k_scale
        windows = given_windows(starts, ends, total_q, keys.shape[0], q.device)
    operands = ScoresOperands(q, weights, pool, windows.seen, block_table)
    plan, made = run_scores(operands, out, backend, windows)
    return plan, windows.made + made


def _select_topk(
    scores: Tensor,
    topk: int,
    starts: Tensor | None,
    ends: Tensor | None,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    page_size: int,
    add_starts: bool,
    backend: str,
    out: Tensor,
    counts: Tensor | None,
    mask: Tensor | None,
) -> Launched:
    total_q, width = scores.shape
    checks.separate(out, scores=scores, starts=starts, ends=ends, block_table=block_table)
    if block_table is not None and cu_seqlens_q is not None and scores.device.type == "cpu":
        ragged_values("cu_seqlens_q", cu_seqlens_q, total_q, "the scores")
    windows = given_windows(starts, ends, total_q, width, scores.device, cu_seqlens_q)
    if block_table is not None and scores.device.type == "cpu":
        checks.table_reaches(block_table, page_size, windows.seen, width)
    operands = SelectOperands(scores, topk, windows.seen, block_table, page_size, add_starts)
    write(windows, scores.device)
    plan, made = run_call(operands, SelectResults(out, counts, mask), backend)
    return plan, windows.made + made


def _index_topk(
    q: Tensor,
    keys: Tensor,
    page_size: int,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    ends: Tensor | None,
    topk: int,
    physical: bool,
    keep_first: int,
    keep_last: int,
    scores_limit: int,
    backend: str,
    out: Tensor,
    counts: Tensor | None,
    mask: Tensor | None,
) -> Launched:
    """Scores and selection, as many queries at a time as the limit has room for.

    What several parts launched is not returned: together they would hold more memory than one.
    """
    total_q, pool = q.shape[0], IndexCache.of_pages(keys, page_size)
    if q.device.type == "cpu":
        checks.paged_values(cu_seqlens_q, total_q, pool, block_table, cache_lengths)
        checks.ends_in_cache(ends, cu_seqlens_q, cache_lengths)
    checks.separate(out, q=q, keys=keys, weights=weights, block_table=block_table, ends=ends)
    places = block_table.shape[1] * page_size
    # Rows of at most topk keys are selected whole: their scores are not read.
    windows = windows_in_pages(cu_seqlens_q, cache_lengths, ends, total_q, places, least=topk)
    width = scores_width(places)
    room = max(scores_limit - SELECTION_BYTES, scores_limit // 2)
    parts = ceildiv(total_q, max(room // (4 * max(width, 1)), 1))
    step = max(ceildiv(total_q, max(parts, 1)), 1)
    scores = torch.empty(step, width, dtype=torch.float32, device=q.device)
    results = SelectResults(out, counts, mask)
    table = block_table if physical else None
    plan, made = None, []
    for first in range(0, total_q, step):
        stop = min(first + step, total_q)
        rows, seen = scores[: stop - first], windows.seen.part(first, stop)
        scored = ScoresOperands(
            q[first:stop],
            weights[first:stop],
            pool,
            windows.scored.part(first, stop),
            block_table,
            seen,
        )
        _, scoring = run_scores(scored, rows, backend, windows)
        choice = SelectOperands(
            rows,
            topk,
            seen,
            table,
            page_size if physical else 0,
            False,
            keep_first,
            keep_last,
        )
        plan, selecting = run_call(choice, results.part(first, stop), backend)
        made = [*windows.made, *scoring, *selecting] if parts == 1 else []
    return plan, made


def _index_append(data: Tensor, page_size: int, scales: str, k: Tensor, slots: Tensor) -> None:
    append_keys(IndexCache(data, page_size, scales), k, slots)


def scores_width(columns: int) -> int:
    """Columns of a buffer for scores whose rows all begin at a multiple of 16 bytes."""
    return round_up(columns, SCORES_STEP)


register(
    {
        "index_scores": cached_operator("index_scores", _index_scores),
        "select_topk": cached_operator("select_topk", _select_topk),
        "index_topk": cached_operator("index_topk", _index_topk),
        "index_append": _index_append,
    }
)
