"""Host side of cache rows: their tensors as the kernels take them, and a workspace.

`dequantized_operands` lists the kernels that dequantize every named row once, and gives the same
problem over the dequantized rows. How many rows are named is known on the device alone. Where the
workspace might be too small, two attention kernels are launched, one over the workspace and one
over the FP8 rows. One of the two exits early (`DequantizedOperands.gate`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.formats import BF16, ELEMENT_BITS, V4, V41, V41_FP4, V41_FP4_SPLIT, V41_SPLIT
from openmla.kernels.call import WORKSPACE, Call, Sources, vector
from openmla.kernels.gluon.dequantize.kernels import (
    IN_LINE,
    LIST_COLUMNS,
    claim_kernel,
    dequantize_kernel,
    place_kernel,
)
from openmla.kernels.gluon.dequantize.records import CacheFormat, RowColumns
from openmla.kernels.gluon.pages import inverse_of
from openmla.operands import AttendOperands, LatentOperands, SparseOperands
from openmla.planning.dequantize import Workspace, map_slots
from openmla.sources import Listed

Operands = SparseOperands | LatentOperands
VECTOR_BYTES = 16  # unit of the strides of rows
SOURCES: Sources = {
    "lists_ptr": ("indices", "block_table"),
    "lengths_ptr": ("topk_lengths", "cache_lengths"),
    "data_ptr": ("kv", "cache_data"),
    "rope_ptr": ("kv", "cache_data"),
    "scale_ptr": ("cache_scales", "kv", "cache_data"),
    **dict.fromkeys(("map_ptr", "places_ptr", "total_ptr", "placed_ptr", "out_ptr"), WORKSPACE),
}
SECOND_SOURCES: Sources = {
    **dict.fromkeys(("data_ptr", "rope_ptr"), "second_kv"),
    "scale_ptr": ("second_scales", "second_kv"),
    "out_ptr": WORKSPACE,
}
CHUNKED = {
    V4.name: V4.name,
    **dict.fromkeys((V41.name, V41_SPLIT.name), V41.name),
    **dict.fromkeys((V41_FP4.name, V41_FP4_SPLIT.name), V41_FP4.name),
}
"""Formats that are read where they lie, chunk by chunk, and what v41_chunks.py calls them."""
WARPS = 4
FILL_ROWS = 16
FILL_PROGRAMS = 8  # per SM


def rows_of(cache: LatentCache | Tensor) -> dict[str, Any]:
    """Where rows and scales lie; see rows.py for the names. No bytes are copied."""
    if isinstance(cache, LatentCache) and cache.format == V4.name:
        return v4_rows_of(cache)
    rope, scales, block = None, None, 0
    if isinstance(cache, Tensor):
        data = cache[None]
    else:
        data, scales, block = cache.data, cache.field("scales"), cache.layout.block
    if isinstance(cache, LatentCache) and block:
        data, rope = data.view(torch.int32), cache.field("bf16")
        if scales is not None and scales.element_size() == 1:
            scales = scales.view(torch.uint8)
            block = block * ELEMENT_BITS[cache.layout.format.element] // 8  # bytes: see v41_rows.py
    tensors = [x for x in (data, scales) if x is not None]
    apart = data.shape[0] > 1 and any(x.stride(0) != x.shape[1] * x.stride(1) for x in tensors)
    unit = VECTOR_BYTES // data.element_size()
    return {
        "data_ptr": data,
        "scale_ptr": scales,
        "rope_ptr": rope,
        "stride_page": data.stride(0) // unit if apart else None,
        "stride_row": data.stride(1) // unit,
        "scale_page": scales.stride(0) if scales is not None and apart else None,
        "scale_row": 0 if scales is None else scales.stride(1),
        **pages_of(cache),
        "page_rows": None,
        "SCALED": block,
    }


def pages_of(cache: LatentCache | Tensor) -> dict[str, int]:
    """`Pages` of a cache, in which positions of sequences and rows of pages with gaps are counted;
    pages of one row for a tensor of rows, in which nothing is counted."""
    size = cache.page_size if isinstance(cache, LatentCache) else 1
    return {"page_size": size, "page_inverse": inverse_of(size)}


def units_of(size: int) -> dict[str, int]:
    """`Pages` of the units that lists name, of so many rows each."""
    return {"unit_rows": size, "unit_inverse": inverse_of(size)}


def scale_type_of(cache: LatentCache | Tensor) -> str | None:
    """Type of the scales where they are bytes beside or behind a row (v41_rows.py); None in rows
    with other readers, DeepSeek-V4's among them."""
    if isinstance(cache, Tensor) or cache.format == V4.name:
        return None
    row = cache.layout.format
    transposed = f" by {row.scale_lanes}" if row.scale_lanes else ""
    return None if row.scale in ("", "fp32") else row.scale + transposed


def v4_rows_of(cache: LatentCache) -> dict[str, Any]:
    """Arguments of a kernel that reads DeepSeek-V4's or V4.1's rows as words, in pages of any size
    (see v4_rows.py and v41_chunks.py)."""
    stored = cache.field("scales") if cache.scales is None else cache.scales
    assert stored is not None
    data, scales = cache.data.view(torch.int32), stored.view(torch.int32)
    unit = VECTOR_BYTES // data.element_size()
    return {
        "data_ptr": data,
        "scale_ptr": scales,
        "rope_ptr": cache.field("bf16"),
        "stride_page": data.stride(0) // unit,
        "stride_row": data.stride(1) // unit,
        "scale_page": scales.stride(0),
        "scale_row": scales.stride(1),
        **pages_of(cache),
        "page_rows": cache.page_size,
        "SCALED": cache.layout.block,
    }


def stored_rows_of(cache: LatentCache | Tensor) -> dict[str, Any]:
    """Kernel arguments for the rows of the only source, as they are stored, and its format where
    it is DeepSeek-V4's or V4.1's."""
    if isinstance(cache, LatentCache) and cache.format in CHUNKED:
        return {**v4_rows_of(cache), "STORED": CHUNKED[cache.format]}
    return {**rows_of(cache), "STORED": None}


def source_rows_of(cache: LatentCache | Tensor) -> dict[str, Any]:
    """Kernel arguments for the rows of one of several sources, and their format: rows of
    DeepSeek-V4 or V4.1, or bf16 rows as words. Pages have any size."""
    if isinstance(cache, LatentCache) and cache.format in CHUNKED:
        return stored_rows_of(cache)
    data = (cache[None] if isinstance(cache, Tensor) else cache.data).view(torch.int32)
    unit = VECTOR_BYTES // data.element_size()
    return {
        "data_ptr": data,
        "scale_ptr": None,
        "rope_ptr": None,
        "stride_page": data.stride(0) // unit,
        "stride_row": data.stride(1) // unit,
        "scale_page": 0,
        "scale_row": 0,
        **pages_of(cache),
        "page_rows": max(data.shape[1], 1),
        "SCALED": 0,
        "STORED": BF16.name,
    }


class DequantizedOperands(NamedTuple):
    """Operands over a workspace, and the launches that fill it."""

    operands: Operands
    calls: tuple[Call, ...]
    total: Tensor | None
    """One int32 on the device: how many units are named. None if all fit the capacity anyway."""
    capacity: int

    def gate(self, fits: bool) -> dict[str, Any]:
        """Arguments of an attention kernel that exits early unless the workspace holds all named
        units (fits), or unless it does not."""
        return {"total_ptr": self.total, "capacity": self.capacity, "FITS": fits}


class Lists(NamedTuple):
    """The lists that name units of the pool, rows or pages: see kernels.py."""

    entries: Tensor
    lengths: Tensor | None
    size: int
    """Rows of a unit."""
    units: int
    """Units of the pool."""


def lists_of(op: Operands) -> Lists:
    """Rows by token, or pages by sequence."""
    if isinstance(op, SparseOperands):
        return Lists(op.indices, op.topk_lengths, 1, op.rows)
    return Lists(op.block_table, op.cache_lengths, op.cache.page_size, op.cache.num_pages)


class Filling(NamedTuple):
    """How a workspace of dequantized rows is filled."""

    space: Workspace
    columns: tuple[int, int]
    """Columns of a row: latent, rope."""
    sm_count: int
    lanes: int = 8
    """Threads that take neighboring columns of a row."""

    def call(
        self,
        cache: LatentCache | Tensor,
        found: dict[str, Any],
        rows: int,
        named: Sources = SOURCES,
    ) -> Call:
        """The launch that dequantizes `rows` rows of a cache or fewer."""
        source = rows_of(cache)
        arguments = {
            **found,
            **{n: x for n, x in source.items() if n.islower()},
            "DIMS": RowColumns(*self.columns),
            "CACHE": CacheFormat(scale_block=source["SCALED"]),
            "SCALES": scale_type_of(cache),
            "LANES": self.lanes,
            "ROWS": FILL_ROWS,
            "num_warps": WARPS,
        }
        programs = min(-(-rows // FILL_ROWS), FILL_PROGRAMS * self.sm_count)
        return Call(dequantize_kernel, programs, arguments, named)


def dequantized_operands(filling: Filling, op: Operands) -> DequantizedOperands:
    """The operands over a workspace of bf16 rows, and the launches that dequantize each named row
    into it once. The workspace is allocated; nothing is launched here."""
    return _named(filling, op) if filling.space.names else _whole(filling, op)


def _whole(filling: Filling, op: Operands) -> DequantizedOperands:
    """The pass over every row of the pool, each at its own place."""
    _, _, size, units = lists_of(op)
    wide = _workspace(op, units, size)
    call = filling.call(op.cache, _every(units, size, wide), units * size)
    return DequantizedOperands(_over(op, wide), (call,), None, units)


def _every(units: int, size: int, wide: Tensor) -> dict[str, Any]:
    """Arguments of the pass over all units of a pool."""
    nowhere = ("lists_ptr", "lengths_ptr", "map_ptr", "places_ptr", "total_ptr", "placed_ptr")
    found = {**dict.fromkeys(nowhere), **dict.fromkeys(("columns", "stride", "lines", "blocks"), 0)}
    return found | {"units": units, "capacity": units, **units_of(size), "out_ptr": wide}


class DequantizedSources(NamedTuple):
    """A call over sources whose pools are dequantized, and the launches that do so."""

    operands: AttendOperands
    calls: tuple[Call, ...]


def dequantized_sources(filling: Filling, op: AttendOperands) -> DequantizedSources:
    """Every quantized pool once, each row at its own place, so that lists and tables stay."""
    sources, calls = list(op.sources), []
    for number, source in enumerate(op.sources):
        pool = source.rows
        if not isinstance(pool, LatentCache) or not pool.layout.block or not pool.rows:
            continue
        shape = (pool.num_pages, pool.page_size, pool.width)
        wide = torch.empty(shape, dtype=torch.bfloat16, device=op.q.device)
        named = SECOND_SOURCES if number else SOURCES
        calls.append(filling.call(pool, _every(pool.rows, 1, wide), pool.rows, named))
        plain = LatentCache(wide, None, pool.latent, pool.rope, "bf16")
        if isinstance(source, Listed):
            sources[number] = replace(source, rows=plain)
        else:
            sources[number] = replace(source, cache=plain)
    return DequantizedSources(replace(op, sources=tuple(sources)), tuple(calls))


class JoinedSources(NamedTuple):
    """The rows of several pools in one, and the launches that dequantize them."""

    rows: Tensor
    """[rows, width], bf16: those of each source after those of the one before."""
    bases: tuple[int, ...]
    """The first row of each source."""
    calls: tuple[Call, ...]


def joined_sources(filling: Filling, op: AttendOperands | SparseOperands) -> JoinedSources:
    """Every pool whole, each row at its own place behind the pools before: a list keeps its
    numbers. Rows of bf16 are copied."""
    counts = [source.count for source in op.sources]
    width = op.q.shape[2]
    wide = torch.empty((sum(counts), width), dtype=torch.bfloat16, device=op.q.device)
    bases = tuple(accumulate(counts, initial=0))
    calls = []
    for number, (source, base) in enumerate(zip(op.sources, bases, strict=False)):
        pool, here = source.rows, wide[base : base + source.count]
        if not source.count:
            continue
        if isinstance(pool, LatentCache) and pool.layout.block:
            named = SECOND_SOURCES if number else SOURCES
            calls.append(filling.call(pool, _every(pool.rows, 1, here), pool.rows, named))
        else:
            data = pool.data if isinstance(pool, LatentCache) else pool
            here.view(data.shape).copy_(data)
    return JoinedSources(wide, bases[:-1], tuple(calls))


def _named(filling: Filling, op: Operands) -> DequantizedOperands:
    """The passes over the units that lists name, at the places that these get."""
    entries, lengths, size, units = lists_of(op)
    number, columns = entries.shape
    capacity = filling.space.units
    blocks = number * -(-columns // LIST_COLUMNS.value)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=op.q.device)

    lines = -(-map_slots(units, entries.numel()) // IN_LINE.value)
    claims = torch.empty(lines, IN_LINE.value, dtype=torch.int64, device=op.q.device)
    total, places, lists = ints(1), ints(capacity), ints(number, columns)
    wide = _workspace(op, capacity, size)
    entries = entries if entries.stride(1) == 1 else entries.contiguous()
    claiming: dict[str, Any] = {
        "lists_ptr": entries,
        "lengths_ptr": vector(lengths),
        "map_ptr": claims,
        "total_ptr": total,
        "columns": columns,
        "stride": entries.stride(0),
        "units": units,
        "lines": lines,
        **units_of(size),
        "num_warps": WARPS,
    }
    placing = {**claiming, "places_ptr": places, "placed_ptr": lists, "capacity": capacity}
    placing |= {"launch_pdl": True}
    calls = (
        Call(claim_kernel, blocks, claiming, SOURCES),
        Call(place_kernel, blocks, placing, SOURCES),
        filling.call(op.cache, {**placing, "blocks": blocks, "out_ptr": wide}, capacity * size),
    )
    gate = total if filling.space.may_overflow else None
    return DequantizedOperands(_over(op, wide, lists), calls, gate, capacity)


def _workspace(op: Operands, units: int, size: int) -> Tensor:
    shape = (units, size, op.cache.width)  # type: ignore[union-attr]
    return torch.empty(shape, dtype=torch.bfloat16, device=op.q.device)


def _over(op: Operands, wide: Tensor, lists: Tensor | None = None) -> Operands:
    """The problem of `op` over its dequantized rows."""
    if isinstance(op, SparseOperands):
        rows = wide.view(-1, wide.shape[2])
        return replace(op, cache=rows, indices=op.indices if lists is None else lists)
    cache = LatentCache(wide, None, op.cache.latent, op.cache.rope, "bf16")
    return replace(op, cache=cache, block_table=op.block_table if lists is None else lists)
