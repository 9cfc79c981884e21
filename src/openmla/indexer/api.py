"""The indexer's public calls: check, allocate, hand over. Nothing else happens here.

    indexer_scores   scores of the keys in each query's window
    select_topk      the best columns of each row of scores
    index_topk       both, in chunks: from queries and a cache to the rows of sparse attention

Equal scores go to the smaller position, -0.0 equals +0.0, NaN comes after -inf; positions are
written in ascending order, then -1. A selection is a function of the row's scores alone: it is the
same on every rank and in every batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from openmla import cached
from openmla.cached import MADE, wanted, with_extras
from openmla.checks import backend as known_backend
from openmla.checks import flag, last_dim_contiguous, no_gradients, tensor
from openmla.errors import InvalidArgument
from openmla.indexer import checks, ops
from openmla.indexer.cache import IndexCache
from openmla.planning import BACKENDS
from openmla.problem import Backend

__all__ = ["index_topk", "indexer_scores", "select_topk"]

SCORES_LIMIT = 496 << 20  # with the lists of the selection, less than 512 MiB


def indexer_scores(
    q: Tensor,
    keys: IndexCache | tuple[Tensor, Tensor],
    weights: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_lengths: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Scores k_scale[s] * sum over heads of weights[t, h] * relu(q[t, h] . k[s]), fp32.

    Returns [total_q, width]. Over an IndexCache, columns count from the sequence's first key, and
    query i of a sequence sees keys up to its own, cache_lengths - q_len + i. Over a pair of
    tensors, query t sees keys starts[t] … ends[t] - 1. Columns outside a query's window are not
    written.

    Args:
        q: e4m3 [total_q, H, 128].
        keys: an IndexCache, or a pair of e4m3 [keys, 128] and their scales, fp32 [keys].
        weights: fp32 [total_q, H], with q's scale and all factors inside.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin; with an IndexCache.
        block_table: int32 [batch, max_pages], the pages of each sequence; with an IndexCache.
        cache_lengths: int32 [batch], the new tokens among them; with an IndexCache.
        starts: int32 [total_q], the first key of each window, 0 if None; with a pair.
        ends: int32 [total_q], the key after the last; an empty window: ends <= starts. With an
            IndexCache, how many keys each query sees, where a key stands for several tokens:
            (position + 1) // 4 in DeepSeek-V4; cache_lengths counts keys then.
        out: where to write, fp32, of any width; on a GPU, keys past it have no score.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> q, keys = torch.ones(2, 4, 128).to(torch.float8_e4m3fn), torch.ones(3, 128)
    >>> pair = keys.to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0, 3.0])
    >>> indexer_scores(q, pair, torch.ones(2, 4))  # 4 heads, 128 products of 1
    tensor([[ 512., 1024., 1536.],
            [ 512., 1024., 1536.]])
    """
    if cached.any_kept():
        done = cached.run(
            "index_scores",
            (
                q,
                *_key_parts(keys),
                weights,
                cu_seqlens_q,
                block_table,
                cache_lengths,
                starts,
                ends,
                backend,
                MADE if out is None else out,
            ),
        )
        if done is not None:
            made: Tensor = done[0]
            return made
    q = checks.queries(q)
    weights = checks.head_weights(weights, q)
    pool = checks.keys(keys, q.device)
    total_q = q.shape[0]
    if isinstance(pool, IndexCache):
        checks.only_with("keys is a pair of tensors", starts=starts)
        ends = checks.window("ends", ends, total_q, q.device)
        paging = checks.paged_tensors(cu_seqlens_q, block_table, cache_lengths, q.device)
        cu_seqlens_q, block_table, cache_lengths = paging
        width = block_table.shape[1] * pool.page_size
        parts: tuple[Tensor, Tensor | None, int] = pool.data, None, pool.page_size
    else:
        paging_names = {"block_table": block_table, "cache_lengths": cache_lengths}
        checks.only_with("keys is an IndexCache", cu_seqlens_q=cu_seqlens_q, **paging_names)
        starts = checks.window("starts", starts, total_q, q.device)
        ends = checks.window("ends", ends, total_q, q.device)
        width = pool[0].shape[0]
        parts = *pool, 0
    scores = checks.scores_out(out, total_q, q.device)
    no_gradients(q=q, keys=parts[0], weights=weights, out=scores, **{"keys[1]": parts[1]})
    if scores is None:
        rows = q.new_empty((total_q, ops.scores_width(width)), dtype=torch.float32)
        scores = rows[:, :width]
    torch.ops.openmla.index_scores(
        q,
        *parts,
        weights,
        cu_seqlens_q,
        block_table,
        cache_lengths,
        starts,
        ends,
        known_backend(backend, BACKENDS),
        scores,
    )
    return scores


def select_topk(
    scores: Tensor,
    topk: int,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_size: int | None = None,
    add_starts: bool = False,
    out: Tensor | None = None,
    return_counts: bool = False,
    return_mask: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """The min(topk, n) largest of the n scores in each row's window: int32 [total_q, topk].

    Returns positions in ascending order, counted from the window's start, then -1; with more than
    one result a tuple in the order indices, counts, mask. A row of at most topk scores is selected
    whole and not read.

    Args:
        scores: fp32 [total_q, width].
        topk: how many, at least 1.
        starts: int32 [total_q], the first column of each window; 0 if None.
        ends: int32 [total_q], the column after the last; all columns if None.
        block_table: int32 [batch, max_pages]; with it, cu_seqlens_q and page_size, the physical
            rows of the positions are written, as mla_prefill_sparse takes them.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin; with block_table.
        page_size: rows per page; with block_table.
        add_starts: write columns of `scores` instead of positions in the window.
        out: where to write the indices; made if None.
        return_counts: also return how many were selected, int32 [total_q].
        return_mask: also return the selection as bits, int32 [total_q, words], as mla_prefill's
            key_mask; rows are a multiple of 16 bytes long, as bulk copies need them.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> select_topk(torch.tensor([[0.5, 3.0, 3.0, 1.0]]), 2)  # equal scores: smaller positions
    tensor([[1, 2]], dtype=torch.int32)
    >>> select_topk(torch.tensor([[0.5, 3.0, 3.0, 1.0]]), 3, ends=torch.tensor([2]).int())
    tensor([[ 0,  1, -1]], dtype=torch.int32)
    """
    if cached.any_kept():
        done = cached.run(
            "select_topk",
            (
                scores,
                topk,
                starts,
                ends,
                block_table,
                cu_seqlens_q,
                0 if page_size is None else page_size or ...,
                add_starts,
                backend,
                MADE if out is None else out,
                wanted(return_counts),
                wanted(return_mask),
            ),
        )
        if done is not None:
            return with_extras(*done)
    scores = tensor("scores", scores, ("total_q", "width"), (torch.float32,))
    last_dim_contiguous("scores", scores)
    total_q, width = scores.shape
    topk = checks.count("topk", topk, 1)
    starts = checks.window("starts", starts, total_q, scores.device)
    ends = checks.window("ends", ends, total_q, scores.device)
    if block_table is None:
        checks.only_with("block_table is given", cu_seqlens_q=cu_seqlens_q, page_size=page_size)
    else:
        _check_table(block_table, cu_seqlens_q, page_size, scores.device)
    if flag("add_starts", add_starts) and block_table is not None:
        raise InvalidArgument("add_starts", "False with a block_table", "True")
    no_gradients(scores=scores)
    indices = checks.index_out(out, total_q, topk, scores.device)
    results = _selection(scores, total_q, topk, width, indices, (return_counts, return_mask))
    torch.ops.openmla.select_topk(
        scores,
        topk,
        starts,
        ends,
        block_table,
        cu_seqlens_q,
        page_size or 0,
        add_starts,
        known_backend(backend, BACKENDS),
        *results,
    )
    return with_extras(*results)


def index_topk(
    q: Tensor,
    keys: IndexCache,
    weights: Tensor,
    topk: int,
    *,
    cu_seqlens_q: Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    ends: Tensor | None = None,
    rows: Literal["physical", "relative"] = "physical",
    keep_first: int = 0,
    keep_last: int = 0,
    scores_limit: int = SCORES_LIMIT,
    out: Tensor | None = None,
    return_counts: bool = False,
    return_mask: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """The topk best keys of every query: int32 [total_q, topk].

    indexer_scores and select_topk over a cache, a bounded part of the scores at a time. Returns
    the indices; with more than one result a tuple in the order indices, counts, mask, as
    select_topk.

    Args:
        q: e4m3 [total_q, H, 128].
        keys: an IndexCache.
        weights: fp32 [total_q, H], with q's scale and all factors inside.
        topk: how many, at least 1.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin.
        block_table: int32 [batch, max_pages], the pages of each sequence. Scores are as wide as
            it, so give no wider one than the longest sequence needs.
        cache_lengths: int32 [batch], keys of each sequence, the new tokens among them.
        ends: int32 [total_q], how many keys each query sees, where a key stands for several tokens:
            (position + 1) // 4 in DeepSeek-V4; cache_lengths counts keys then.
        rows: "physical" rows of the cache, as mla_prefill_sparse takes them, or "relative"
            positions in the sequence.
        keep_first: this many first keys that a query sees are selected whatever they score; they
            count inside topk.
        keep_last: this many last keys likewise.
        scores_limit: bytes of scores and of selecting them at a time; one row at least.
        out: where to write the indices; made if None.
        return_counts: also return how many were selected, int32 [total_q].
        return_mask: also return the selection as bits, as mla_prefill's key_mask.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> cache = IndexCache.allocate(num_pages=2, page_size=64)
    >>> cache.append(torch.randn(70, 128), slot_mapping=torch.arange(70))
    >>> q, cu = torch.randn(3, 64, 128).to(torch.float8_e4m3fn), torch.tensor([0, 3]).int()
    >>> pages, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([70]).int()
    >>> paging = {"cu_seqlens_q": cu, "block_table": pages, "cache_lengths": lengths}
    >>> index_topk(q, cache, torch.ones(3, 64), 16, **paging).shape
    torch.Size([3, 16])
    """
    if cached.any_kept():
        data, _, page_size = _key_parts(keys)
        done = cached.run(
            "index_topk",
            (
                q,
                data,
                page_size,
                weights,
                cu_seqlens_q,
                block_table,
                cache_lengths,
                ends,
                topk,
                {"physical": True, "relative": False}.get(rows) if type(rows) is str else ...,
                keep_first,
                keep_last,
                scores_limit,
                backend,
                MADE if out is None else out,
                wanted(return_counts),
                wanted(return_mask),
            ),
        )
        if done is not None:
            return with_extras(*done)
    q = checks.queries(q)
    weights = checks.head_weights(weights, q)
    pool = checks.cache(keys, q.device)
    topk = checks.count("topk", topk, 1)
    paging = checks.paged_tensors(cu_seqlens_q, block_table, cache_lengths, q.device)
    if not isinstance(rows, str) or rows not in checks.ROWS:
        raise InvalidArgument("rows", "one of " + ", ".join(checks.ROWS), repr(rows))
    ends = checks.window("ends", ends, q.shape[0], q.device)
    keep = checks.kept(keep_first, keep_last, topk)
    limit = checks.count("scores_limit", scores_limit, 1)
    no_gradients(q=q, weights=weights)
    indices = checks.index_out(out, q.shape[0], topk, q.device)
    width = block_table.shape[1] * pool.page_size
    results = _selection(q, q.shape[0], topk, width, indices, (return_counts, return_mask))
    torch.ops.openmla.index_topk(
        q,
        pool.data,
        pool.page_size,
        weights,
        *paging,
        ends,
        topk,
        rows == "physical",
        *keep,
        limit,
        known_backend(backend, BACKENDS),
        *results,
    )
    return with_extras(*results)


def _check_table(
    block_table: object, cu_seqlens_q: object, page_size: object, device: torch.device
) -> None:
    checks.needed("block_table is given", cu_seqlens_q=cu_seqlens_q, page_size=page_size)
    cu = tensor("cu_seqlens_q", cu_seqlens_q, ("batch+1",), (torch.int32,), device)
    if not cu.shape[0]:
        raise InvalidArgument("cu_seqlens_q", "at least one entry (batch+1)", "none")
    tensor("block_table", block_table, (cu.shape[0] - 1, "max_pages"), (torch.int32,), device)
    checks.count("page_size", page_size, 1)


def _selection(
    like: Tensor,
    total_q: int,
    topk: int,
    width: int,
    out: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Indices, counts and mask, allocated as asked for."""
    counts, mask = flag("return_counts", wanted[0]), flag("return_mask", wanted[1])
    return (
        like.new_empty((total_q, topk), dtype=torch.int32) if out is None else out,
        like.new_empty((total_q,), dtype=torch.int32) if counts else None,
        like.new_empty((total_q, -(-width // 128) * 4), dtype=torch.int32) if mask else None,
    )


def _key_parts(keys: object) -> tuple[object, object, object]:
    """Values, scales and page size as the operator takes them, unchecked."""
    if type(keys) is IndexCache:
        return keys.data, None, keys.page_size
    if type(keys) is tuple and len(keys) == 2:
        return *keys, 0
    return ..., None, 0
