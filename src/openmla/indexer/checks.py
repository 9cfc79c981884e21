"""Argument checks of the indexer. They look at metadata only, unless they say "CPU only"."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from openmla.cache import plain_memory
from openmla.checks import describe, last_dim_contiguous, paging, ragged_values, tensor
from openmla.errors import InvalidArgument
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import Keys, Windows
from openmla.indexer.problem import DIM
from openmla.problem import MAX_HEADS

E4M3 = torch.float8_e4m3fn
ROWS = ("physical", "relative")


def queries(q: object) -> Tensor:
    """q: e4m3 [total_q, heads, 128], 1 to 128 heads."""
    checked = tensor("q", q, ("total_q", "heads", DIM), (E4M3,))
    if not 1 <= checked.shape[1] <= MAX_HEADS:
        raise InvalidArgument("q", f"1 to {MAX_HEADS} heads in dimension 1", checked.shape[1])
    last_dim_contiguous("q", checked)
    return checked


def head_weights(weights: object, q: Tensor) -> Tensor:
    """weights: fp32 [total_q, heads]; q's scales and all factors are inside."""
    return tensor("weights", weights, tuple(q.shape[:2]), (torch.float32,), q.device)


def cache(keys: object, device: torch.device) -> IndexCache:
    """keys must be an IndexCache that lives where q does."""
    if not isinstance(keys, IndexCache):
        raise InvalidArgument("keys", "an IndexCache", describe(keys))
    if keys.device != device:
        raise InvalidArgument("keys", f"a cache on {device}, where q is", f"one on {keys.device}")
    return keys


def keys(value: object, device: torch.device) -> Keys:
    """An IndexCache, or a pair: values e4m3 [keys, 128] and scales fp32 [keys]."""
    if not isinstance(value, tuple):
        return cache(value, device)
    if len(value) != 2:
        raise InvalidArgument("keys", "an IndexCache or a pair (values, scales)", len(value))
    values = tensor("keys[0]", value[0], ("keys", DIM), (E4M3,), device)
    last_dim_contiguous("keys[0]", values)
    return values, tensor("keys[1]", value[1], (values.shape[0],), (torch.float32,), device)


def only_with(what: str, **given: object) -> None:
    """These arguments make no sense here: they must be None."""
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(name, f"None, unless {what}", describe(value))


def needed(why: str, **given: object) -> None:
    """These arguments must not be None."""
    for name, value in given.items():
        if value is None:
            raise InvalidArgument(name, f"a value: {why}", "None")


def window(name: str, value: object, total_q: int, device: torch.device) -> Tensor | None:
    """starts or ends: int32 [total_q], or None."""
    return None if value is None else tensor(name, value, (total_q,), (torch.int32,), device)


def count(name: str, value: object, least: int) -> int:
    """An int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(name, f"an int of at least {least}", describe(value))
    return value


def kept(keep_first: object, keep_last: object, topk: int) -> tuple[int, int]:
    """Keys that are selected whatever they score: at most topk together."""
    first, last = count("keep_first", keep_first, 0), count("keep_last", keep_last, 0)
    if first + last > topk:
        expected = f"at most topk = {topk} together with keep_first"
        raise InvalidArgument("keep_last", expected, f"{first} + {last}")
    return first, last


def scores_out(out: object, total_q: int, device: torch.device) -> Tensor | None:
    """out: fp32 [total_q, width], rows contiguous and apart."""
    if out is None:
        return None
    checked = tensor("out", out, (total_q, "width"), (torch.float32,), device)
    _rows_apart("out", checked)
    return checked


def index_out(out: object, total_q: int, topk: int, device: torch.device) -> Tensor | None:
    """out: int32 [total_q, topk], rows contiguous and apart."""
    if out is None:
        return None
    checked = tensor("out", out, (total_q, topk), (torch.int32,), device)
    _rows_apart("out", checked)
    return checked


def _rows_apart(name: str, out: Tensor) -> None:
    last_dim_contiguous(name, out)
    plain_memory(name, out)
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        got = f"strides {list(out.stride())} for shape {list(out.shape)}"
        raise InvalidArgument(name, "memory of its own for every element", got)


def separate(out: Tensor, **inputs: Tensor | None) -> None:
    """Writing `out` while reading an input in the same memory would give a wrong result."""
    first, last = _range(out)
    for name, value in inputs.items():
        if value is not None and value.numel() and out.numel():
            start, stop = _range(value)
            if start < last and first < stop:
                raise InvalidArgument("out", f"memory of its own, apart from {name}", "an overlap")


def _range(t: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def paged_tensors(
    cu_seqlens_q: object, block_table: object, cache_lengths: object, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that say where the keys of a query lie."""
    cu = tensor("cu_seqlens_q", cu_seqlens_q, ("batch+1",), (torch.int32,), device)
    if not cu.shape[0]:
        raise InvalidArgument("cu_seqlens_q", "at least one entry (batch+1)", describe(cu))
    paging(block_table, cache_lengths, cu.shape[0] - 1, device)
    assert isinstance(block_table, Tensor) and isinstance(cache_lengths, Tensor)
    return cu, block_table, cache_lengths


def paged_values(
    cu_seqlens_q: Tensor, total_q: int, pool: IndexCache, block_table: Tensor, lengths: Tensor
) -> None:
    """CPU only: offsets rise inside q, and every key of every sequence has a page in the pool."""
    ragged_values("cu_seqlens_q", cu_seqlens_q, total_q, "q")
    most = block_table.shape[1] * pool.page_size
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            limit = f"0 to {block_table.shape[1]} pages x {pool.page_size} rows = {most}"
            raise InvalidArgument("cache_lengths", limit, f"{length} for sequence {b}")
        table_values(block_table, b, -(-length // pool.page_size), pool.num_pages)


def ends_in_cache(ends: Tensor | None, cu_seqlens_q: Tensor, lengths: Tensor) -> None:
    """CPU only: no query sees more keys than its sequence has, one of no sequence none."""
    if ends is None:
        return
    new = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    most = torch.repeat_interleave(lengths, new)
    most = pad(most, (0, ends.shape[0] - most.shape[0]))
    wrong = ends > most
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        expected = f"at most the {int(most[at])} keys of its sequence"
        raise InvalidArgument("ends", expected, f"{int(ends[at])} for query {at}")


def table_values(block_table: Tensor, line: int, used: int, pages: int) -> None:
    """CPU only: the first `used` entries of a line name pages that exist."""
    entries = block_table[line, :used]
    wrong = (entries < 0) | (entries >= pages)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        got = f"page {int(entries[at])} for sequence {line}, entry {at}"
        raise InvalidArgument("block_table", f"pages 0 to {pages - 1}", got)


def table_reaches(block_table: Tensor, page_size: int, windows: Windows, width: int) -> None:
    """CPU only: the table has an entry for every position that may be selected."""
    most = block_table.shape[1] * page_size
    for row in range(windows.starts.shape[0]):
        start, end = windows.of_row(row, width)
        if end - start > most:
            limit = f"{block_table.shape[1]} pages x {page_size} rows = {most}"
            got = f"a window of {end - start} in row {row}"
            raise InvalidArgument("block_table", f"windows of at most {limit}", got)


def fits(lengths: Tensor, width: int) -> None:
    """CPU only: no sequence is longer than `out` is wide."""
    if lengths.numel() and int(lengths.max()) > width:
        longest = int(lengths.max())
        raise InvalidArgument("out", f"{longest} columns, as the longest sequence has keys", width)
