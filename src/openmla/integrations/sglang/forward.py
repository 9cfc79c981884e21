"""What the backend computes, in openmla's terms; nothing here needs SGLang.

SGLang keeps latent rows in a pool, [slots, 1, latent + rope] for each layer, and the slot of every
token of a request in `req_to_token`. Slots are given out by pages, so every page_size-th of them
names a page: that is openmla's block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla import LatentCache, mla_prefill, mla_prefill_latent


class Requests(NamedTuple):
    """Whose tokens a batch has, and where their rows are."""

    cu_seqlens_q: Tensor
    """int32 [requests + 1]: offsets of the requests' new tokens."""
    lengths: Tensor
    """int32 [requests]: rows of a request, those of its new tokens included."""
    block_table: Tensor
    """int32 [requests, pages]"""


def requests_of(
    new_tokens: Tensor | int, lengths: Tensor, slots: Tensor, requests: Tensor, page_size: int
) -> Requests:
    """The requests of a batch; every shape follows from those of the arguments.

    new_tokens of each request, or one number for all; lengths [requests] with the new ones; slots
    [pool of requests, tokens], of which `requests` names the batch's rows.

    >>> slots = torch.tensor([[0, 0, 0, 0], [8, 9, 4, 5]])
    >>> batch = requests_of(1, torch.tensor([3]), slots, torch.tensor([1]), page_size=2)
    >>> batch.cu_seqlens_q.tolist(), batch.lengths.tolist(), batch.block_table.tolist()
    ([0, 1], [3], [[4, 2]])
    """
    if isinstance(new_tokens, int):
        offsets = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        offsets = offsets * new_tokens
    else:
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(new_tokens, 0, dtype=torch.int32, out=offsets[1:])
    pages = slots[:, ::page_size][requests.long()] // page_size
    return Requests(offsets, lengths.int(), pages.int())


def attend_latent(
    q: Tensor,
    rows: Tensor,
    requests: Requests,
    page_size: int,
    d_v: int,
    scale: float,
    invariant: bool = False,
    range_keys: int | None = None,
) -> Tensor:
    """New tokens to all rows of their requests, themselves included: [tokens, heads, d_v].

    q [tokens, heads, latent + rope], absorbed; rows the pool of a layer, [slots, 1, latent + rope],
    where the new tokens' rows have been written. With `invariant`, a token's bits do not depend on
    how many others of its request are new; range_keys is what `mla_prefill_latent` has.
    """
    rows = rows.flatten(1)
    count = len(rows) // page_size
    pages = rows[: count * page_size].view(count, page_size, -1)
    cache = LatentCache(pages, None, d_v, rows.shape[1] - d_v, "bf16")
    return mla_prefill_latent(
        q,
        cache,
        requests.block_table,
        requests.lengths,
        cu_seqlens_q=requests.cu_seqlens_q,
        scale=scale,
        invariant=invariant,
        range_keys=range_keys,
    )


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, requests: Requests, d_nope: int, scale: float
) -> Tensor:
    """New tokens of requests that have no others, in expanded form: [tokens, heads, d_v].

    k [tokens, heads, d_nope + d_rope] has the same rope columns in every head, which are read once.
    """
    rope = k[:, 0, d_nope:] if k.shape[2] > d_nope else None
    return mla_prefill(q, k[..., :d_nope], rope, v, cu_seqlens_q=requests.cu_seqlens_q, scale=scale)
