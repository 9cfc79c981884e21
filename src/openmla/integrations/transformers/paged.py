"""Attention over the paged cache of Transformers' continuous batching: its pages hold latent rows.

One forward pass serves many requests: their new tokens lie end to end, and two lists of the engine
say in which rows of its cache they are written and which rows every request reads. The form is
chosen for each request by its own lengths, never by its neighbors', so a batch of fresh prompts and
of requests that decode is split: prompts expand their rows, the others attend to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import openmla
from openmla.errors import Unsupported
from openmla.integrations.transformers import forms
from openmla.integrations.transformers.masks import Ragged
from openmla.planning.form import LayerDims, choose_form, keys_per_piece

# What the engine hands to every layer. Those of the second line say what the lists say already.
USED = {"cache", "cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index"}
KNOWN = USED | {"max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k"}
KNOWN |= {"logits_indices", "logits_processor_args", "is_causal"}
ROWS = "openmla_rows"
_BATCH = "openmla_batch"


class Pages(NamedTuple):
    """One layer's part of the engine's cache."""

    rows: Tensor
    """[pages, page size, latent + rope]; pages of other layers may lie between them."""
    stride: int
    """How far the engine's indices of two blocks are apart; a block is one page of each layer."""
    step: int
    """How many pages the two are apart."""

    @staticmethod
    def of(cache: Any, layer: int) -> Pages:
        """As Transformers 5.22 lays them out, and as 5.17 does after `share_rows`."""
        if hasattr(cache, "layer_to_allocator"):
            allocator = cache.layer_to_allocator[layer]
            # Half a row is a key to the engine, half a value, and a page has both, one after
            # the other: as much memory as a page of rows.
            whole = allocator.cache_tensor.view(-1, allocator.tokens_per_page, _width(allocator))
            at, step = allocator.layer_indices.index(layer), allocator.pages_per_block
            # Equally many for every layer, so that one compiled kernel serves them all.
            return Pages(
                whole[at : len(whole) - step + 1 + at], allocator.block_physical_stride, step
            )
        _, at = cache.layer_index_to_group_indices[layer]
        return Pages(getattr(cache, ROWS)[at], cache.block_size, 1)

    @property
    def size(self) -> int:
        """Rows per page."""
        return self.rows.shape[1]

    def flat(self) -> Tensor:
        """[rows, latent + rope], to be indexed by what `physical` returns."""
        return self.rows.view(-1, self.rows.shape[2])

    def physical(self, index: Tensor) -> Tensor:
        """Rows of `flat` for the engine's indices."""
        block = torch.div(index, self.stride, rounding_mode="floor")
        return block * (self.step * self.size) + index % self.stride


def share_rows(cache: Any) -> None:
    """Let keys and values of Transformers 5.17's cache be the halves of one tensor of rows."""
    if hasattr(cache, "layer_to_allocator"):
        return
    rows = []
    for number, (keys, values) in enumerate(zip(cache.key_cache, cache.value_cache, strict=True)):
        both = torch.cat((keys, values), dim=-1)
        half = keys.shape[-1]
        cache.key_cache[number], cache.value_cache[number] = both[..., :half], both[..., half:]
        rows.append(both.view(-1, cache.block_size, 2 * half))
    setattr(cache, ROWS, rows)


def _width(allocator: Any) -> int:
    width: int = 2 * allocator.num_key_value_heads * allocator.head_dim
    return width


class Request(NamedTuple):
    """New tokens first_query.. of a batch, over keys first_key.., the new ones included."""

    first_query: int
    new: int
    first_key: int
    keys: int


class Part(NamedTuple):
    """Requests of one batch that are attended to by one call."""

    form: str
    queries: Tensor | None
    """Which of the batch's queries, int64; None for all, in their order."""
    rows: Tensor
    """Rows of the requests' keys, one request after the other."""
    table: Tensor
    """int32 [requests, pages]."""
    lengths: Tensor
    cu_q: Tensor
    cu_k: Tensor


class Batch(NamedTuple):
    """One forward pass: where its rows go, and its parts. Every layer uses the same."""

    written: Tensor
    parts: tuple[Part, ...]

    @staticmethod
    def of(pages: Pages, options: dict[str, Any], form: str, layer: LayerDims, heads: int) -> Batch:
        """Made for the first layer, and kept beside the engine's offsets for the others."""
        cu_q = options["cu_seq_lens_q"]
        kept: Batch | None = getattr(cu_q, _BATCH, None)
        if kept is None:
            kept = _batch(pages, options, form, layer, heads)
            setattr(cu_q, _BATCH, kept)
        return kept


def attend(
    module: Any,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    form: str,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    """[1, S, H, v] of queries [1, H, S, nope + rope] over the pages, after their rows are written.

    rows are those of the new tokens: latent [1, 1, S, latent] and rope [1, 1, S, rope].
    """
    _check(options)
    heads, pages = forms.Heads.of(module), Pages.of(options["cache"], module.layer_idx)
    dims = LayerDims(rows[0].shape[3], heads.nope, rows[1].shape[3], heads.v)
    if heads.why_not_latent() or (form == "auto" and query.dtype == torch.float16):
        form = "expanded"  # as elsewhere: pages of rows are bf16, and float16 would lose bits
    batch = Batch.of(pages, options, form, dims, query.shape[1])
    pages.flat().index_copy_(0, batch.written, torch.cat(rows, dim=-1)[0, 0])
    out = query.new_empty(1, query.shape[2], query.shape[1], heads.v)
    for part in batch.parts:
        if part.queries is None:
            return _attend_part(query, heads, pages, part, dims, form, scale)
        chosen = query.index_select(2, part.queries)
        out[:, part.queries] = _attend_part(chosen, heads, pages, part, dims, form, scale)
    return out


def _check(options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - KNOWN)
    if unknown:
        raise Unsupported(f"the keyword {unknown[0]} in continuous batching")
    if len(options["write_index"]) != 1:
        raise Unsupported("continuous batching of several kinds of layers")


def _attend_part(
    query: Tensor,
    heads: forms.Heads,
    pages: Pages,
    part: Part,
    dims: LayerDims,
    form: str,
    scale: float | None,
) -> Tensor:
    ragged = Ragged(part.cu_q, part.cu_k, None, None)
    if part.form == "latent" and query.dtype == torch.bfloat16:
        try:
            return _paged(query, heads, pages, part, dims, scale)
        except Unsupported:  # raised before anything ran: this device has no latent kernel for it
            if form == "latent":
                raise
    rows = pages.flat().index_select(0, part.rows)
    latent, rope = rows[:, : dims.latent], rows[:, dims.latent :]
    if part.form == "latent" and query.dtype != torch.bfloat16:
        # Pages of other types have no kernel: one row stands for every head instead, uncopied.
        shared = latent[:, None].expand(-1, query.shape[1], -1)
        absorbed = heads.absorb(query).transpose(1, 2)
        return heads.release(forms.prefilled(absorbed, shared, rope, shared, ragged, scale=scale))
    k_nope, v = heads.expand(latent)
    return forms.prefilled(query, k_nope, rope, v, ragged, scale=scale)


def _paged(
    query: Tensor,
    heads: forms.Heads,
    pages: Pages,
    part: Part,
    dims: LayerDims,
    scale: float | None,
) -> Tensor:
    cache = openmla.LatentCache(pages.rows, None, dims.latent, dims.rope, "bf16")
    out = openmla.mla_prefill_latent(
        heads.absorb(query)[0],
        cache,
        part.table,
        part.lengths,
        cu_seqlens_q=part.cu_q,
        scale=scale,
    )
    assert isinstance(out, Tensor)
    return heads.release(out[None])


def _batch(pages: Pages, options: dict[str, Any], form: str, dims: LayerDims, heads: int) -> Batch:
    """The host learns the lengths here: once in a forward pass, not in every layer."""
    cu_k = options["cu_seq_lens_k"]
    cu_k = cu_k["full_attention"] if isinstance(cu_k, dict) else cu_k
    starts_q, starts_k = options["cu_seq_lens_q"].tolist(), cu_k.tolist()
    requests = [
        Request(q, next_q - q, k, next_k - k)
        for q, next_q, k, next_k in zip(
            starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True
        )
    ]
    (written,), (read,) = options["write_index"], options["read_index"]
    written = pages.physical(written)
    # Where no request has a context, the engine lists no rows to read: those written are all.
    rows = pages.physical(read) if read.numel() else written
    most = keys_per_piece(dims, heads, 1, pages.rows.element_size())
    parts = _split(requests, form, dims, most)
    made = tuple(_part(*part, requests, rows, pages.size) for part in parts)
    return Batch(written, made)


def _split(
    requests: Sequence[Request], form: str, dims: LayerDims, most: int
) -> list[tuple[str, list[Request]]]:
    """Requests by form; those that expand in parts of at most `most` keys, to bound the memory.

    With "auto", a request that alone has more is not expanded: its pages are read where they lie.
    """
    latent: list[Request] = []
    expanded: list[list[Request]] = []
    room = 0
    for request in requests:
        chosen = form
        if form == "auto":
            chosen = _form(dims, request.new, request.keys)
            chosen = "latent" if request.keys > most else chosen
        if chosen == "latent":
            latent.append(request)
            continue
        if request.keys > room:
            expanded.append([])
            room = most
        expanded[-1].append(request)
        room -= request.keys
    found = [("latent", latent)] if latent else []
    return found + [("expanded", part) for part in expanded]


@lru_cache(maxsize=4096)
def _form(dims: LayerDims, new: int, keys: int) -> str:
    """`choose_form` for one request."""
    return choose_form(dims, [new], [keys]).form


def _part(
    form: str, chosen: list[Request], everyone: list[Request], rows: Tensor, page: int
) -> Part:
    device, whole = rows.device, len(chosen) == len(everyone)
    queries = None if whole else _ranges([(r.first_query, r.new) for r in chosen], device)
    if not whole:
        rows_of = _ranges([(r.first_key, r.keys) for r in chosen], device)
        rows = rows.index_select(0, rows_of)
    cu_k = [0, *accumulate(r.keys for r in chosen)]
    most = max((r.keys for r in chosen), default=0)
    first = [
        [at + min(p * page, r.keys - 1) for p in range(-(-most // page))]
        for at, r in zip(cu_k, chosen, strict=False)
    ]
    table = rows[torch.tensor(first, device=device)] // page

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    lengths, cu_q = int32([r.keys for r in chosen]), int32([0, *accumulate(r.new for r in chosen)])
    return Part(form, queries, rows, table.int(), lengths, cu_q, int32(cu_k))


def _ranges(starts: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Numbers start .. start + length of every pair."""
    return torch.cat([torch.arange(start, start + length) for start, length in starts]).to(device)
