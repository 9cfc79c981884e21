"""Attention over the paged cache of Transformers' continuous batching: its pages hold latent rows.

One forward pass serves many requests: their new tokens lie end to end, and `scheduled` has their
lengths and blocks. The form is chosen for each request by its own lengths, never by its neighbors',
so a batch of fresh prompts and of requests that decode is split: prompts expand their rows, the
others attend to the pages. Nothing here waits for the device, and what follows from the lengths is
made once in a forward pass, not in every layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import openmla
from openmla.arithmetic import ceildiv, round_up
from openmla.dispatch import device_target
from openmla.errors import Unsupported
from openmla.integrations.transformers import forms, scheduled
from openmla.integrations.transformers.masks import Ragged
from openmla.integrations.transformers.scheduled import Request
from openmla.planning.form import LayerDims, keys_per_piece, least_latent_keys
from openmla.planning.registry import least_table_keys

# What the engine hands to every layer. Those of the second line say what `scheduled` has already.
USED = {"cache", "write_index"}
KNOWN = USED | {"cu_seq_lens_q", "cu_seq_lens_k", "read_index", "max_length_q", "max_length_k"}
KNOWN |= {"max_seqlen_q", "max_seqlen_k", "logits_indices", "logits_processor_args", "is_causal"}
ROWS = "openmla_rows"
HOST = "cpu"
# Columns of a table come in steps: a launch like one before, of a table as wide, is not planned
# again, and the longest request of a batch has another page after every few tokens.
TABLE_STEP = 16


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
        """Pages as Transformers 5.22 lays them out, and as 5.17 does after `share_rows`."""
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


@dataclass(frozen=True, eq=False)
class Part:
    """Requests of one batch that are attended to by one call."""

    form: str
    queries: Tensor | None
    """Which of the batch's queries, int64; None for all, in their order."""
    page: int
    """Rows of a page."""
    table: Tensor
    """int32 [requests, pages]."""
    lengths: Tensor
    cu_q: Tensor
    cu_k: Tensor
    keys: int
    """Keys of all requests together."""

    @cached_property
    def rows(self) -> Tensor:
        """Rows of the requests' keys, one request after the other, for calls that gather them."""
        request = torch.repeat_interleave(self.lengths.long(), output_size=self.keys)
        keys = torch.arange(self.keys, device=self.table.device)
        position = keys - self.cu_k[:-1][request]
        page = torch.div(position, self.page, rounding_mode="floor")
        return self.table[request, page].long() * self.page + position % self.page


class Batch(NamedTuple):
    """One forward pass: where its rows go, and its parts. Every layer uses the same."""

    written: Tensor
    parts: tuple[Part, ...]

    @staticmethod
    def of(pages: Pages, options: dict[str, Any], form: str, layer: LayerDims, heads: int) -> Batch:
        """Made for the first layer, and kept for the others."""
        now = scheduled.of(options["cache"])
        if now.batch is None:
            now.batch = _batch(pages, now.requests, options, form, layer, heads)
        made: Batch = now.batch
        return made


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


def _batch(
    pages: Pages,
    requests: Sequence[Request],
    options: dict[str, Any],
    form: str,
    dims: LayerDims,
    heads: int,
) -> Batch:
    (written,) = options["write_index"]
    most = keys_per_piece(dims, heads, 1, pages.rows.element_size())
    parts = _split(requests, form, dims, most)
    least = least_table_keys(device_target(pages.rows.device), heads, dims.latent)
    made = tuple(_part(name, chosen, len(requests), pages, least) for name, chosen in parts)
    return Batch(pages.physical(written), made)


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
            is_latent = request.keys >= _least_latent_keys(dims, request.new)
            chosen = "latent" if is_latent or request.keys > most else "expanded"
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


_least_latent_keys = lru_cache(maxsize=8192)(least_latent_keys)


def _part(form: str, chosen: Sequence[Request], of: int, pages: Pages, least_keys: int = 0) -> Part:
    """One of the parts of a batch of so many requests; made on the host, then copied. Its table has
    room for so many keys at least."""
    device = pages.rows.device

    def there(numbers: Tensor) -> Tensor:
        # The driver copies so few bytes to memory of its own, and the host goes on. It may wait for
        # the stream first, where they are many: no API promises more of memory that is not pinned.
        return numbers.to(device, non_blocking=True)

    def int32(numbers: Sequence[int]) -> Tensor:
        return there(_listed(numbers, torch.int32))

    new, keys = [r.new for r in chosen], [r.keys for r in chosen]
    queries = None
    if len(chosen) < of:
        queries = there(_ranges([r.first_query for r in chosen], new))
    return Part(
        form,
        queries,
        pages.size,
        there(_table(chosen, pages, least_keys)),
        int32(keys),
        int32([0, *accumulate(new)]),
        int32([0, *accumulate(keys)]),
        sum(keys),
    )


def _table(requests: Sequence[Request], pages: Pages, least_keys: int) -> Tensor:
    """int32 [requests, pages]: each request's pages, then zeros."""
    counts = [ceildiv(r.keys, pages.size) for r in requests]
    listed = array("i")
    for request, count in zip(requests, counts, strict=True):
        listed.extend(request.blocks[:count])
    width = round_up(max(*counts, ceildiv(least_keys, pages.size)), TABLE_STEP)
    table = torch.zeros(len(requests), width, dtype=torch.int32, device=HOST)
    used = torch.arange(width, device=HOST) < _listed(counts)[:, None]
    table[used] = torch.frombuffer(listed, dtype=torch.int32) * pages.step
    return table


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Numbers start .. start + length, for every start and its length.

    >>> _ranges([4, 0], [2, 3]).tolist()
    [4, 5, 0, 1, 2]
    """
    first, counts = _listed(starts), _listed(lengths)
    before = counts.cumsum(0) - counts
    numbers = torch.arange(sum(lengths), device=HOST)
    return numbers + (first - before).repeat_interleave(counts)


def _listed(numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=dtype, device=HOST)
