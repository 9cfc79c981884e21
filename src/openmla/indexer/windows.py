"""The windows of queries whose keys are in a paged cache, bottom-right causal, in torch.

Two requests of 2 queries over 5 keys and of 1 query over 1 key, and one query of no request:

>>> cu, lengths = torch.tensor([0, 2, 3]), torch.tensor([5, 1])
>>> windows = paged_windows(cu, lengths, total_q=4)
>>> windows.ends.tolist(), windows.sequences.tolist()
([4, 5, 1, 0], [0, 0, 1, 0])
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.indexer.operands import Requests, Windows


def paged_windows(cu_seqlens_q: Tensor, cache_lengths: Tensor, total_q: int) -> Windows:
    """Query i of a request sees keys 0 … length - q_len + i."""
    query = torch.arange(total_q, device=cu_seqlens_q.device)
    zeros = torch.zeros(total_q, dtype=torch.int32, device=query.device)
    batch, requests = cache_lengths.shape[0], Requests(cu_seqlens_q, cache_lengths)
    if not batch:
        return Windows(zeros, zeros, zeros, zeros.new_zeros(1), requests)
    place = torch.searchsorted(cu_seqlens_q.long(), query, right=True) - 1
    sequence = place.clamp(0, batch - 1)
    end = cache_lengths.long()[sequence] - cu_seqlens_q.long()[sequence + 1] + query + 1
    end = torch.where((place < batch) & (end > 0), end, 0)
    longest = cache_lengths.amax().clamp_min(0).reshape(1)
    line = torch.where(place < batch, sequence, 0).int()
    return Windows(zeros, end.int(), line, longest.int(), requests)
