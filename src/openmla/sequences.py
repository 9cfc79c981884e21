"""Ragged and paged sequences: how positions of a request map to rows of tensors.

Ragged. A batch of sequences lies end to end in one tensor; `cu_seqlens` holds where each begins.
Three requests of 2, 0 and 3 tokens:

    cu_seqlens = [0, 2, 2, 5]      row:       0  1 | 2  3  4
                                   sequence:  0  0 | 2  2  2

Bottom-right causal. The last query always sees the last key. With q_len 2 and k_len 5, query i sits
at position k_len - q_len + i:

    keys        0 1 2 3 4
    query 0     x x x x .      visible_keys(0, q_len=2, k_len=5) == 4
    query 1     x x x x x      visible_keys(1, q_len=2, k_len=5) == 5

and with q_len 3, k_len 1 the first two queries see nothing at all.

Window. A query sees the last `window` of those keys. With window 3, in the first example:

    keys        0 1 2 3 4
    query 0     . x x x .      first_key(visible=4, window=3) == 1
    query 1     . . x x x      first_key(visible=5, window=3) == 2

Shared. With `k_start`, sequence i has the keys k_start[i] … k_start[i] + k_len - 1; cu_seqlens_k
says only how many. Two parts of one prompt of 8 tokens, queries 0-1 and 6-7, share its first keys:

    cu_seqlens_q = [0, 2, 4]     cu_seqlens_k = [0, 2, 10]     k_start = [0, 0]

Paged. `block_table[b, p]` is the page that holds keys p*page_size … of sequence b. With page_size 4
and block_table[b] = [7, 2], key 5 of the sequence is physical row 2*4 + 1 = 9. Table entries past a
sequence's last page may hold anything; they are never read.

Everything here reads values of CPU tensors; on a GPU the kernels do the same arithmetic.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceSpan(NamedTuple):
    """One sequence of a ragged batch: its rows of queries and, for ragged keys, of keys."""

    number: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int


def ragged_spans(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, k_start: Tensor | None = None
) -> Iterator[SequenceSpan]:
    """Walk a batch whose keys are ragged too, or begin where `k_start` says."""
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    starts = k if k_start is None else k_start.tolist()
    for i in range(len(q) - 1):
        yield SequenceSpan(i, q[i], q[i + 1] - q[i], starts[i], k[i + 1] - k[i])


def paged_spans(cu_seqlens_q: Tensor, cache_lengths: Tensor) -> Iterator[SequenceSpan]:
    """Walk a batch whose keys are in a cache; key rows come from `page_rows`."""
    q, k = cu_seqlens_q.tolist(), cache_lengths.tolist()
    for i in range(len(q) - 1):
        yield SequenceSpan(i, q[i], q[i + 1] - q[i], 0, k[i])


def visible_keys(query: int, q_len: int, k_len: int, causal: bool = True) -> int:
    """How many keys, counted from the first, query number `query` of a sequence sees."""
    if not causal:
        return k_len
    return min(max(k_len - q_len + query + 1, 0), k_len)


def first_key(visible: int, window: int) -> int:
    """The first key that a query sees, of the `visible` ones that causal allows it. Window 0: no
    window, all of them."""
    return max(visible - window, 0) if window else 0


def first_key_of(span: SequenceSpan, window: int) -> int:
    """The first key of a sequence that any of its queries sees; those before it are never read."""
    return first_key(visible_keys(0, span.q_len, span.k_len), window)


def page_rows(pages: Tensor, page_size: int, start: int, stop: int) -> Tensor:
    """Physical rows of keys start … stop-1 of a sequence whose pages are `pages`."""
    keys = torch.arange(start, stop, dtype=torch.int64, device=pages.device)
    return pages[keys // page_size].to(torch.int64) * page_size + keys % page_size
