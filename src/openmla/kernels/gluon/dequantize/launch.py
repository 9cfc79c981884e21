"""Host side of cache rows: their tensors as the kernels take them, and a workspace.

`addressed_once` lists the kernels that dequantize every row that is named, once, and gives the same
problem over the dequantized rows. How many rows are named is known on the device alone, so a
workspace that might be too small is used and not used by kernels that look (`Addressed.gate`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.call import WORKSPACE, ZEROED, Call, Sources, vector
from openmla.kernels.gluon.dequantize.kernels import (
    MAP_UNITS,
    count_kernel,
    dequantize_kernel,
    mark_kernel,
    place_kernel,
    remap_kernel,
)
from openmla.operands import LatentOperands, SparseOperands
from openmla.planning.dequantize import CacheRead

Operands = SparseOperands | LatentOperands
VECTOR_BYTES = 16  # unit of the strides of rows
SOURCES: Sources = {
    "lists_ptr": ("indices", "block_table"), "lengths_ptr": ("topk_lengths", "cache_lengths"),
    "map_ptr": ZEROED, "data_ptr": ("kv", "cache_data"), "rope_ptr": ("kv", "cache_data"),
    "scale_ptr": ("cache_scales", "kv", "cache_data"),
    **dict.fromkeys(("counts_ptr", "places_ptr", "total_ptr", "out_ptr"), WORKSPACE),
}  # fmt: skip
WIDEN_ROWS = 16
WIDEN_PROGRAMS = 8  # per SM


def rows_of(cache: LatentCache | Tensor) -> dict[str, Any]:
    """Where rows and scales lie; see rows.py for the names. No bytes are copied."""
    rope, scales, block = None, None, 0
    if isinstance(cache, Tensor):
        data = cache[None]
    else:
        data, scales, block = cache.data, cache.field("scales"), cache.layout.block
    if isinstance(cache, LatentCache) and block:
        data, rope = data.view(torch.int32), cache.field("bf16")
    tensors = [x for x in (data, scales) if x is not None]
    apart = data.shape[0] > 1 and any(x.stride(0) != x.shape[1] * x.stride(1) for x in tensors)
    unit = VECTOR_BYTES // data.element_size()
    return {
        "data_ptr": data,
        "scale_ptr": scales,
        "rope_ptr": rope,
        "stride_page": data.stride(0) // unit if apart else 0,
        "stride_row": data.stride(1) // unit,
        "scale_page": 0 if scales is None or not apart else scales.stride(0),
        "scale_row": 0 if scales is None else scales.stride(1),
        "PAGE": data.shape[1] if apart else 0,
        "SCALED": block,
    }


class Addressed(NamedTuple):
    """Operands over a workspace, the launches that fill it, and how many units are named."""

    operands: Operands
    calls: tuple[Call, ...]
    total: Tensor
    capacity: int
    may_overflow: bool

    def gate(self, fits: bool) -> dict[str, Any]:
        """Arguments of an attention kernel that runs if the workspace holds all, or if not."""
        total = self.total if self.may_overflow else None
        return {"total_ptr": total, "capacity": self.capacity, "FITS": fits}


class Lists(NamedTuple):
    """What names units of the pool: see kernels.py."""

    entries: Tensor
    lengths: Tensor | None
    size: int
    units: int


def lists_of(op: Operands) -> Lists:
    """Rows by token, or pages by sequence."""
    if isinstance(op, SparseOperands):
        return Lists(op.indices, op.topk_lengths, 1, op.rows)
    return Lists(op.block_table, op.cache_lengths, op.cache.page_size, op.cache.num_pages)


class Widening(Protocol):
    """What a plan says of rows that are dequantized once."""

    @property
    def cache_read(self) -> CacheRead:
        """Rows that may be named, and those that the workspace holds."""

    @property
    def latent(self) -> int:
        """Columns of a row without rope."""

    @property
    def rope(self) -> int:
        """Columns of rope."""

    @property
    def copy_lanes(self) -> int:
        """Threads that copy neighboring 16 bytes of a row."""

    @property
    def sm_count(self) -> int:
        """Of the chip."""


def addressed_once(config: Widening, op: Operands) -> Addressed:
    """See kernels.py. Allocates; launches nothing."""
    assert isinstance(op.cache, LatentCache)
    entries, lengths, size, units = lists_of(op)
    number, columns = entries.shape
    capacity = min(config.cache_read.capacity // size, units)
    blocks = -(-units // MAP_UNITS.value)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=op.q.device)

    found = torch.zeros(units, dtype=torch.int32, device=op.q.device)
    counts, total, places, lists = ints(blocks), ints(1), ints(capacity), ints(number, columns)
    shape = (capacity, size, op.cache.width)
    wide = torch.empty(shape, dtype=torch.bfloat16, device=op.q.device)
    entries = entries if entries.stride(1) == 1 else entries.contiguous()
    named = {
        "lists_ptr": entries, "lengths_ptr": vector(lengths), "map_ptr": found, "columns": columns,
        "stride": entries.stride(0), "units": units, "SIZE": size, "num_warps": 4,
    }  # fmt: skip
    mapped = {"map_ptr": found, "counts_ptr": counts, "units": units, "num_warps": 4}
    placed = {"places_ptr": places, "total_ptr": total, "capacity": capacity}
    source = rows_of(op.cache)
    dequantizing = {
        **placed, **{n: x for n, x in source.items() if n.islower()}, "out_ptr": wide,
        "DIMS": (config.latent, config.rope), "CACHE": (source["PAGE"], source["SCALED"]),
        "LANES": config.copy_lanes, "SIZE": size, "ROWS": WIDEN_ROWS, "num_warps": 4,
    }  # fmt: skip
    programs = min(-(-capacity * size // WIDEN_ROWS), WIDEN_PROGRAMS * config.sm_count)
    calls = (
        Call(mark_kernel, number, named, SOURCES),
        Call(count_kernel, blocks, mapped, SOURCES),
        Call(place_kernel, blocks, {**mapped, **placed}, SOURCES),
        Call(dequantize_kernel, programs, dequantizing, SOURCES),
        Call(remap_kernel, number, {**named, "out_ptr": lists}, SOURCES),
    )
    most = config.cache_read.rows if size == 1 else units
    return Addressed(_over(op, wide, lists), calls, total, capacity, most > capacity)


def _over(op: Operands, wide: Tensor, lists: Tensor) -> Operands:
    """The same problem over dequantized rows."""
    if isinstance(op, SparseOperands):
        return replace(op, cache=wide[:, 0], indices=lists)
    cache = LatentCache(wide, None, op.cache.latent, op.cache.rope, "bf16")
    return replace(op, cache=cache, block_table=lists)
