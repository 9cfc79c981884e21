"""Masks: what Transformers hands to an attention function, and what ragged kernels want instead.

Transformers asks the registered `causal_mask` once per forward pass and gives its result to every
layer. Three kinds reach the attention function:

    None                   causal, every key is used
    bool [B, used]         causal, and False where a token is padding. The queries are its last
                           columns. A static cache holds more keys than `used`: the rest are unused
    bool [B, 1, S, T]      anything else, and always for models that select keys (DSA), whose
                           indexer reads it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function, sdpa_mask

_RAGGED = "openmla_ragged"


def causal_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of one forward pass, in the narrowest of the three kinds that says it all."""
    plain = mask_function is causal_mask_function and not kv_offset
    if not plain or hasattr(options.get("config"), "index_topk"):
        exact = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        full: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **(options | exact),
        )
        return full
    used = int(q_offset) + q_length
    if attention_mask is None:
        if kv_length == used:
            return None
        shape = (batch_size, used)
        return torch.ones(shape, dtype=torch.bool, device=options.get("device", "cpu"))
    # A token that the mask does not reach is padding, as for SDPA.
    keep = attention_mask[:, :used].bool()
    keep = pad(keep, (0, used - keep.shape[1]))
    return None if kv_length == used and bool(keep.all()) else keep


@dataclass(frozen=True)
class Ragged:
    """B sequences of S queries and T keys as ragged ones, padding moved to the end.

    Two sequences of three tokens, the first padded on the left, [F T T] and [T T T]: keys are taken
    in the order 1 2 3 4 5 0, cu_k is [0, 2, 5], and row 5 belongs to no sequence. Nothing here
    waits for the GPU: a kernel returns zeros for rows past the last sequence.
    """

    cu_q: Tensor
    cu_k: Tensor
    order_q: Tensor | None
    """Where ragged query i lies among the B * S; None when nothing moves."""
    order_k: Tensor | None
    version: tuple[int, int] = (0, 0)
    """Queries, and the mask's counter of changes, that it was made for."""

    @staticmethod
    def of(keep: Tensor | None, batch: int, queries: int, keys: int, device: Any) -> Ragged:
        """From a mask bool [B, keys], or None when every key is used."""
        if keep is not None:
            return Ragged._padded(keep, queries)
        cu_q = _equal(batch, queries, device)
        cu_k = cu_q if keys == queries else _equal(batch, keys, device)
        return Ragged(cu_q, cu_k, None, None)

    @staticmethod
    def _padded(keep: Tensor, queries: int) -> Ragged:
        """Kept beside the mask, which every layer of a forward pass is given."""
        traced = torch.compiler.is_compiling()
        kept: Ragged | None = None if traced else getattr(keep, _RAGGED, None)
        version = queries, 0 if keep.is_inference() else keep._version
        if kept is not None and kept.version == version:
            return kept
        parts = keep[:, keep.shape[1] - queries :], keep
        (cu_q, order_q), (cu_k, order_k) = ((_cumulative(x), _kept_first(x)) for x in parts)
        found = Ragged(cu_q, cu_k, order_q, order_k, version)
        if not traced:
            setattr(keep, _RAGGED, found)
        return found

    def queries(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [B * S, ...], kept rows first."""
        return _take(x, self.order_q)

    def keys(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B * T, ...], kept rows first."""
        return _take(x, self.order_k)

    def rows(self, x: Tensor) -> Tensor:
        """[B, 1, T, width], as rows are cached, -> [B * T, width], kept rows first."""
        return _take(x, self.order_k, 2)

    def restored(self, out: Tensor, batch: int) -> Tensor:
        """[B * S, ...] -> [B, S, ...], every row where its query was."""
        if self.order_q is not None:
            out = torch.empty_like(out).index_copy_(0, self.order_q, out)
        return out.view(batch, -1, *out.shape[1:])


def full_mask(mask: Tensor | None, queries: int, keys: int, device: Any) -> Tensor:
    """bool [B, 1, S, T], or [1, 1, S, T] without padding, from None or bool [B, used]."""
    used = keys if mask is None else mask.shape[1]
    columns = torch.arange(keys, device=device)
    seen = columns <= torch.arange(used - queries, used, device=device)[:, None]
    if mask is None:
        return seen[None, None]
    return seen & pad(mask, (0, keys - used))[:, None, None]


def selected(indices: Tensor, keys: int) -> Tensor:
    """bool [B, 1, S, T]: the keys that indices [B, S, topk] name, which may hold -1."""
    named = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    named.scatter_(-1, torch.where(indices < 0, keys, indices).long(), True)
    return named[:, None, :, :keys]


def bits(seen: Tensor) -> Tensor:
    """int32 [B * S, words], as a `key_mask` is, of bool [B, 1, S, T].

    >>> bits(torch.tensor([True, False, True] + 29 * [False] + [True]).view(1, 1, 1, 33)).tolist()
    [[5, 1]]
    """
    flat = seen.flatten(0, 2)
    count = -(-flat.shape[1] // 32)
    words = pad(flat, (0, -flat.shape[1] % 32)).view(-1, count, 32).to(torch.int32)
    places = torch.arange(32, dtype=torch.int32, device=seen.device)
    return (words << places).sum(-1, dtype=torch.int32)


def _equal(batch: int, length: int, device: torch.device) -> Tensor:
    """cu_seqlens of sequences of one length: kept, because every layer asks for the same."""
    if _at_once(device):
        # Another stream would not wait until they are written.
        return _kept_equal(batch, length, device, torch.cuda.current_stream(device).cuda_stream)
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _kept_equal(batch: int, length: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


def _at_once(device: torch.device) -> bool:
    """Whether what is computed now is computed by a GPU and lasts: neither traced nor captured."""
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.cuda.is_current_stream_capturing()
    )


def _cumulative(keep: Tensor) -> Tensor:
    return pad(keep.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _kept_first(keep: Tensor) -> Tensor:
    return torch.argsort(~keep.flatten(), stable=True)


def _take(x: Tensor, order: Tensor | None, last: int = 1) -> Tensor:
    """The first dimensions of x, up to `last`, as one, in another order."""
    flat = x.flatten(0, last)
    return flat if order is None else flat.index_select(0, order)
