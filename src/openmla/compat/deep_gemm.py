"""DeepGEMM's index scores, served by openmla.

Same signatures, shapes and conventions as `deep_gemm.fp8_mqa_logits` and
`deep_gemm.fp8_paged_mqa_logits`; any number of heads, any page size, and CPU tensors work too.
What differs from openmla's own call:

| | DeepGEMM, here | openmla.indexer_scores |
|---|---|---|
| keys | (values, scales), or uint8 [pages, rows, 1, 132] | the pair, or an IndexCache |
| window of a query | start and end, or its own context length | starts, ends, or causal |
| columns outside of it | -inf with clean_logits, else anything | not written |
| compressed rows | max_seqlen_k > 0: column 0 is the window's first key | never |

The schedule that DeepGEMM's paged call is given is not needed and not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla import checks
from openmla.arithmetic import round_up
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer import checks as index_checks
from openmla.indexer.api import indexer_scores
from openmla.indexer.cache import ROW_BYTES, IndexCache

ROW_SCORES = 256

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """float32 [tokens, keys], or [tokens, max_seqlen_k] with each window moved to column 0.

    Args:
        q: e4m3 [tokens, heads, 128]; 1 to 128 heads.
        kv: a pair of values e4m3 [keys, 128] and their scales float32 [keys].
        weights: float32 [tokens, heads], with q's scale and all factors inside.
        cu_seq_len_k_start: int32 [tokens], the first key that each query sees.
        cu_seq_len_k_end: int32 [tokens], the key after the last one it sees.
        clean_logits: write -inf to columns outside of a query's window; otherwise they are
            anything.
        max_seqlen_k: columns of the result, where a window begins at column 0; 0: a column per key.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.
    """
    wide = index_checks.count("max_seqlen_k", max_seqlen_k, 0)
    q = index_checks.queries(q)
    pair = index_checks.keys(kv, q.device)
    if isinstance(pair, IndexCache):
        raise InvalidArgument("kv", "a pair (values, scales)", "an IndexCache")
    keys = pair[1].shape[0]
    logits = _logits(q, q.shape[0], keys, clean_logits)
    indexer_scores(q, kv, weights, starts=cu_seq_len_k_start, ends=cu_seq_len_k_end, out=logits)
    if not wide:
        return logits
    column = torch.arange(wide, device=q.device)
    start = cu_seq_len_k_start.long()[:, None]
    if not keys:
        return _logits(q, q.shape[0], wide, clean_logits)
    moved = logits.gather(1, (start + column).clamp(0, keys - 1))
    if checks.flag("clean_logits", clean_logits):
        inside = column < (cu_seq_len_k_end.long()[:, None] - start)
        moved = torch.where(inside, moved, -torch.inf)
    return moved


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """float32 [batch * next_n, max_context_len]: scores of queries over keys in pages.

    Args:
        q: e4m3 [batch, next_n, heads, 128]; 1 to 128 heads.
        kv_cache: uint8 [pages, rows, 1, 132], a page being the values of all its rows and then
            their scales.
        weights: float32 [batch * next_n, heads], with q's scale and all factors inside.
        context_lens: int32 [batch, next_n]: query (b, i) sees the first context_lens[b, i] keys of
            request b.
        block_table: int32 [batch, max_pages], the pages of each request.
        schedule_meta: not looked at; openmla plans by itself.
        max_context_len: columns of the result.
        clean_logits: write -inf to columns past a query's keys; otherwise they are anything.
        indices: None; anything else is refused.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: indices are given, or no kernel serves such a call.
    """
    if indices is not None:
        raise Unsupported("fp8_paged_mqa_logits with indices", "indices=None")
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise InvalidArgument("q", "[batch, next_n, heads, 128]", checks.describe(q))
    batch, queries = q.shape[:2]
    shape = (batch, queries)
    checks.tensor("context_lens", context_lens, shape, (torch.int32,), q.device)
    checks.tensor("block_table", block_table, (batch, "max_pages"), (torch.int32,), q.device)
    pool = checks.tensor(
        "kv_cache", kv_cache, ("pages", "rows", 1, ROW_BYTES), (torch.uint8,), q.device
    )
    width = index_checks.count("max_context_len", max_context_len, 0)
    # Every query is a request of its own: then it may see as many keys as it likes.
    logits = _logits(q, batch * queries, width, clean_logits)
    indexer_scores(
        q.flatten(0, 1),
        IndexCache(pool.flatten(1), pool.shape[1]),
        weights,
        cu_seqlens_q=torch.arange(batch * queries + 1, dtype=torch.int32, device=q.device),
        block_table=block_table.repeat_interleave(queries, 0),
        cache_lengths=context_lens.flatten(),
        out=logits,
    )
    return logits


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """int32 [num_sms + 1, 2] of zeros: what `schedule_meta` may be, since nothing looks at it.

    Args:
        context_lens: a tensor; the result is made where it is.
        block_kv: not looked at.
        num_sms: rows of the result but one, at least 1.
        indices: not looked at.

    Raises:
        InvalidArgument: num_sms is no int of at least 1.
    """
    del block_kv, indices
    shape = (index_checks.count("num_sms", num_sms, 1) + 1, 2)
    return torch.zeros(shape, dtype=torch.int32, device=context_lens.device)


def _logits(q: Tensor, rows: int, columns: int, clean: bool) -> Tensor:
    """Rows to write scores into: -inf everywhere, or whatever is there.

    As DeepGEMM's, they begin at multiples of 1024 bytes: selections load several scores at once.
    """
    shape = (rows, round_up(columns, ROW_SCORES))
    if checks.flag("clean_logits", clean):
        wide = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    else:
        wide = torch.empty(shape, dtype=torch.float32, device=q.device)
    return wide[:, :columns]
