"""The indexer's calls as torch operators, so that torch.compile sees one opaque op each.

Called by openmla.indexer.api, which has checked the arguments and allocated the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openmla.checks import ragged_values
from openmla.dispatch import run_call
from openmla.indexer import checks
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import Keys, ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.indexer.windows import paged_windows
from openmla.kernels.launch import append_keys, current

SCHEMAS = {
    "index_scores": (
        "(Tensor q, Tensor keys, Tensor? k_scale, int page_size, Tensor weights, "
        "Tensor? cu_seqlens_q, Tensor? block_table, Tensor? cache_lengths, Tensor? starts, "
        "Tensor? ends, str backend, Tensor(a!) out) -> ()"
    ),
    "select_topk": (
        "(Tensor scores, int topk, Tensor? starts, Tensor? ends, Tensor? block_table, "
        "Tensor? cu_seqlens_q, int page_size, bool add_starts, str backend, Tensor(a!) out, "
        "Tensor(b!)? counts, Tensor(c!)? mask) -> ()"
    ),
    "index_topk": (
        "(Tensor q, Tensor keys, int page_size, Tensor weights, Tensor cu_seqlens_q, "
        "Tensor block_table, Tensor cache_lengths, int topk, bool physical, int[] keep, "
        "int scores_limit, str backend, Tensor(a!) out, Tensor(b!)? counts, Tensor(c!)? mask) -> ()"
    ),
    "index_append": ("(Tensor(a!) data, int page_size, str scales, Tensor k, Tensor slots) -> ()"),
}
WIDEST_STEP = 4  # score rows begin at multiples of 16 bytes
SELECTION_BYTES = 20 << 20
"""Taken off a limit of scores: the lists of Hopper's selection (17 MB on an H200), and windows."""


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
) -> None:
    total_q = q.shape[0]
    pool: Keys
    if k_scale is None:
        assert cu_seqlens_q is not None and block_table is not None and cache_lengths is not None
        pool = IndexCache(keys, page_size)
        if q.device.type == "cpu":
            checks.paged_values(cu_seqlens_q, total_q, pool, block_table, cache_lengths)
            checks.fits(cache_lengths, out.shape[1])
        windows = windows_of(cu_seqlens_q, cache_lengths, total_q)
    else:
        pool = keys, k_scale
        windows = _given_windows(starts, ends, total_q, keys.shape[0], q.device)
    inputs = {"q": q, "keys": keys, "keys[1]": k_scale, "weights": weights}
    checks.separate(out, **inputs, block_table=block_table, starts=starts, ends=ends)
    run_call(ScoresOperands(q, weights, pool, windows, block_table), out, backend)


def _given_windows(
    starts: Tensor | None, ends: Tensor | None, total_q: int, width: int, device: torch.device
) -> Windows:
    """Those of the caller; from the first column to the last where there are none."""
    if starts is None:
        starts = torch.zeros(total_q, dtype=torch.int32, device=device)
    if ends is None:
        ends = torch.full((total_q,), width, dtype=torch.int32, device=device)
    return Windows(starts, ends)


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
) -> None:
    total_q, width = scores.shape
    windows = _given_windows(starts, ends, total_q, width, scores.device)
    if block_table is not None and cu_seqlens_q is not None:
        if scores.device.type == "cpu":
            ragged_values("cu_seqlens_q", cu_seqlens_q, total_q, "the scores")
            checks.table_reaches(block_table, page_size, windows, width)
        lengths = torch.zeros_like(cu_seqlens_q[1:])
        lines = windows_of(cu_seqlens_q, lengths, total_q).sequences
        windows = Windows(windows.starts, windows.ends, lines)
    checks.separate(out, scores=scores, starts=starts, ends=ends, block_table=block_table)
    operands = SelectOperands(scores, topk, windows, block_table, page_size, add_starts)
    run_call(operands, SelectResults(out, counts, mask), backend)


def _index_topk(
    q: Tensor,
    keys: Tensor,
    page_size: int,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    topk: int,
    physical: bool,
    keep: list[int],
    scores_limit: int,
    backend: str,
    out: Tensor,
    counts: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Scores and selection, as many queries at a time as the limit has room for."""
    total_q, pool = q.shape[0], IndexCache(keys, page_size)
    if q.device.type == "cpu":
        checks.paged_values(cu_seqlens_q, total_q, pool, block_table, cache_lengths)
    checks.separate(out, q=q, keys=keys, weights=weights, block_table=block_table)
    seen = windows_of(cu_seqlens_q, cache_lengths, total_q)
    # Rows of at most topk keys are selected whole: nobody reads their scores.
    scored = seen.longer_than(topk)
    width = scores_width(block_table.shape[1] * page_size)
    room = max(scores_limit - SELECTION_BYTES, scores_limit // 2)
    parts = -(-total_q // max(room // (4 * max(width, 1)), 1))
    step = -(-total_q // max(parts, 1)) or 1
    scores = torch.empty(step, width, dtype=torch.float32, device=q.device)
    results = SelectResults(out, counts, mask)
    table = block_table if physical else None
    for first in range(0, total_q, step):
        stop = min(first + step, total_q)
        rows = scores[: stop - first]
        part = q[first:stop], weights[first:stop], pool, scored.part(first, stop), block_table
        run_call(ScoresOperands(*part), rows, backend)
        choice = SelectOperands(
            rows, topk, seen.part(first, stop), table, page_size if physical else 0, False, *keep
        )
        run_call(choice, results.part(first, stop), backend)


def windows_of(cu_seqlens_q: Tensor, cache_lengths: Tensor, total_q: int) -> Windows:
    """`paged_windows` on any device, without waiting for it."""
    if cu_seqlens_q.device.type == "cpu":
        return paged_windows(cu_seqlens_q, cache_lengths, total_q)
    from openmla.kernels.portable.indexer import windows

    with current(cu_seqlens_q.device):
        return windows.paged_windows(cu_seqlens_q, cache_lengths, total_q)


def _index_append(data: Tensor, page_size: int, scales: str, k: Tensor, slots: Tensor) -> None:
    append_keys(IndexCache(data, page_size, scales), k, slots)


def scores_width(columns: int) -> int:
    """Columns of a buffer for scores whose rows all begin at a multiple of 16 bytes."""
    return -(-columns // WIDEST_STEP) * WIDEST_STEP


def _register() -> None:
    implementations: dict[str, Callable[..., None]] = {
        "index_scores": _index_scores,
        "select_topk": _select_topk,
        "index_topk": _index_topk,
        "index_append": _index_append,
    }
    for name, function in implementations.items():
        torch.library.define(f"openmla::{name}", SCHEMAS[name])
        torch.library.impl(f"openmla::{name}", "CompositeExplicitAutograd", function)
        torch.library.register_fake(f"openmla::{name}", lambda *args, **kwargs: None)


_register()
