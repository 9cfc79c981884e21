"""Host side of the latent CDNA4 kernel (lists or pages): from a Plan and its operands to calls."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from openmla.cache import LatentCache
from openmla.formats import V4
from openmla.kernels.call import Call, angles_of, scale_arguments, strides, vector
from openmla.kernels.cdna4.dense.launch import COMPILER_OPTIONS, PIECE_BYTES, outputs, piece_strides
from openmla.kernels.cdna4.layouts import latent_layouts, rope_layouts, sparse_matrix_layouts
from openmla.kernels.cdna4.sparse.kernel import sparse_kernel
from openmla.kernels.cdna4.sparse.plan import MlaSparse16, RowsVariant
from openmla.kernels.cdna4.sparse.records import RowsBlock, RowsLayouts
from openmla.kernels.cdna4.sparse.sources import attend_kernel
from openmla.kernels.gluon.places import NO_SPANS, places_of
from openmla.kernels.gluon.ranges.launch import merge_call, partial_results
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.operands import AttendOperands, LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.sources import Source, Span

_TYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16}


class Rows(NamedTuple):
    """The parts of rows as tensors [pages, rows of a page, columns]; None where there is none."""

    latent: Tensor
    rope: Tensor | None
    """The tail, of DeepSeek-V4's rows, whose scales are words."""
    scales: Tensor | None
    scale_block: int


def calls(
    plan: Plan, op: SparseOperands | LatentOperands | AttendOperands, results: Results
) -> Iterator[Call]:
    """The kernel calls of a plan; none for an empty output."""
    if not results.out.numel():
        return
    if isinstance(op, AttendOperands):
        yield from _over_sources(plan.config, op, results)
        return
    places = _pages(op, plan.config) if isinstance(op, LatentOperands) else _lists(op, plan.config)
    if not places["rows"]:
        results.clear()  # no row counts, and an empty tensor has no address to copy from
        return
    block = plan.config
    programs = places.pop("programs")
    arguments = {
        **NO_RANGES,
        **sparse_constexprs(block),
        **places,
        "q_ptr": op.q,
        **piece_strides("q", op.q),
        **_rows(parts_of(op.cache, block.latent), places["PAGED"]),
        **outputs(results),
        **scale_arguments(op.weights.scale),
        "logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        "sink_ptr": vector(op.weights.sink),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }
    if isinstance(op, LatentOperands) and plan.variant.ranges.rows:
        yield from _with_ranges(plan.variant, op, arguments, results)
    else:
        yield Call(sparse_kernel, programs, arguments)


def _over_sources(block: MlaSparse16, op: AttendOperands, results: Results) -> Iterator[Call]:
    """One launch over all sources that have rows."""
    sources = [source for source in op.sources if source.has_rows]
    if not sources:
        results.clear()
        return
    constants = sparse_constexprs(block)
    arguments = {
        **{name: constants[name] for name in constants if name != "WIDENED"},
        **_source(sources[0], block),
        **{
            f"second_{name}": value
            for name, value in (_source(sources[1], block) if len(sources) > 1 else NOTHING).items()
        },
        "q_ptr": op.q,
        **piece_strides("q", op.q),
        **outputs(results),
        **scale_arguments(op.weights.scale),
        "logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        "sink_ptr": vector(op.weights.sink),
        **angles_of(op.turn_back),
        "heads": op.q.shape[1],
        "blocks": block.row_blocks,
    }
    arguments["SECOND_PAGE"] = arguments.pop("second_PAGE")
    yield Call(attend_kernel, op.q.shape[0] * block.row_blocks, arguments)


def _source(source: Source, block: MlaSparse16) -> dict[str, Any]:
    """Which rows of a source each token sees, and where they lie."""
    rows = _rows(parts_of(source.rows, block.latent), isinstance(source, Span))
    del rows["SCALE_BLOCK"]
    return {**NO_SPANS, "lengths_ptr": None, "requests": 0, **places_of(source), **rows}


def _with_ranges(
    variant: RowsVariant, op: LatentOperands, arguments: dict[str, Any], results: Results
) -> Iterator[Call]:
    """Ranges of the keys of split sequences, group by group, each with its merge. The launch of the
    first group has the tiles of other sequences too."""
    space, tiles = variant.ranges, arguments["blocks"]
    assert space is not None
    columns, batch = results.out.shape[2], op.cu_seqlens_q.shape[0] - 1
    parts = partial_results(space, columns, results.out.device)
    parts.pop("range_bits")
    for first in range(0, batch, space.group):
        here = min(space.group, batch - first)
        programs = here * variant.slots
        places = {"range_programs": programs, "slots": variant.slots, "first_sequence": first}
        attention = arguments | parts | places
        yield Call(sparse_kernel, programs + (0 if first else tiles), attention)
        group = {
            "cu_ptr": arguments["cu_ptr"][first:],
            "lengths_ptr": arguments["lengths_ptr"][first:],
            "batch": here,
            "rest_q": 0,  # tokens after the last sequence have no keys
            "range_bits": None,
        }
        yield merge_call(columns, space, attention | group, lanes=WAVE, after=False)


NO_RANGES: dict[str, Any] = {
    "part_sums_ptr": None,
    "part_state_ptr": None,
    "part_rows": 0,
    "range_programs": 0,
    "slots": 1,
    "first_sequence": 0,
}


_POINTERS = ("latent", "rope", "scale", "indices", "lengths", "request", "begin")
_STRIDES = ("latent_stride", "rope_stride", "scale_stride")
NOTHING: dict[str, Any] = {
    **{f"{name}_ptr": None for name in _POINTERS},
    **{f"{name}_{step}": 0 for name in _STRIDES for step in ("page", "t")},
    **dict.fromkeys(("indices_stride", "rows", "topk", "requests", "PAGE"), 0),
}
"""A second source that is not there."""


def _lists(op: SparseOperands, block: MlaSparse16) -> dict[str, Any]:
    """Which rows a token sees: those of its list."""
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "PAGED": False,
        "CAUSAL": False,
        "cu_ptr": None,
        "batch": 0,
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "topk": indices.shape[1],
        "lengths_ptr": vector(op.topk_lengths),
        "window": None,
        "rows": op.rows,
        "blocks": block.row_blocks,
        "programs": op.q.shape[0] * block.row_blocks,
    }


def _pages(op: LatentOperands, block: MlaSparse16) -> dict[str, Any]:
    """Which rows a sequence's tokens see: those of its pages."""
    batch, table = op.cu_seqlens_q.shape[0] - 1, vector(op.block_table)
    tiles = op.q.shape[0] * op.q.shape[1] // block.BM + batch + 1
    return {
        "PAGED": True,
        "CAUSAL": op.causal,
        "cu_ptr": vector(op.cu_seqlens_q),
        "batch": batch,
        "indices_ptr": table,
        "indices_stride": op.block_table.shape[1],
        "topk": op.block_table.shape[1] * op.cache.page_size,
        "lengths_ptr": vector(op.cache_lengths),
        "window": op.window or None,
        "blocks": tiles,
        "programs": tiles,
        "rows": op.cache.rows if op.block_table.numel() else 0,
    }


def parts_of(cache: LatentCache | Tensor, latent: int) -> Rows:
    """Views of a cache or of plain rows."""
    if isinstance(cache, Tensor):
        rows = cache[None]
        return Rows(rows[..., :latent], _rope(rows, latent), None, 0)
    rows, plain = cache.field("e4m3"), cache.field("bf16")
    if cache.format == V4.name:
        assert rows is not None and cache.scales is not None
        return Rows(rows, plain, cache.scales.view(torch.int32), cache.layout.block)
    if rows is None:
        rows, plain = cache.data, None
    rope = _rope(rows, latent) if plain is None else plain
    return Rows(rows[..., :latent], rope, cache.field("scales"), cache.layout.block)


def _rope(rows: Tensor, latent: int) -> Tensor | None:
    return rows[..., latent:] if rows.shape[-1] > latent else None


@lru_cache(maxsize=64)
def sparse_constexprs(block: MlaSparse16) -> dict[str, Any]:
    """Constants and launch options that follow from the config alone."""
    latent = latent_layouts(block.latent_slot)
    rope = rope_layouts(block.B_TOPK, block.num_warps)
    return {
        "BLOCK": RowsBlock(
            queries=block.BM,
            keys=block.B_TOPK,
            slots=block.num_kv_stages,
            latent=block.latent,
            rope=block.rope,
        ),
        "DTYPE": _TYPES[block.dtype],
        "WIDENED": block.dequantized,
        "LAYOUTS": RowsLayouts(matrices=sparse_matrix_layouts(), latent=latent, rope=rope),
        "num_warps": block.num_warps,
        **COMPILER_OPTIONS,
    }


def _rows(parts: Rows, paged: bool) -> dict[str, Any]:
    """Pointers and strides; those of rows in pieces of 16 bytes."""
    present = [x for x in (parts.latent, parts.rope, parts.scales) if x is not None]
    end_to_end = all(x.stride(0) == x.shape[1] * x.stride(1) for x in present)
    one = not paged and (end_to_end or parts.latent.shape[0] == 1)
    found: dict[str, Any] = {
        "PAGE": 0 if one else parts.latent.shape[1],
        "SCALE_BLOCK": parts.scale_block,
    }
    for name, x in (("latent", parts.latent), ("rope", parts.rope), ("scale", parts.scales)):
        unit = 1 if x is None or name == "scale" else PIECE_BYTES // x.element_size()
        found[f"{name}_ptr"] = x
        found[f"{name}_stride_page"] = 0 if x is None else x.stride(0) // unit
        found[f"{name}_stride_t"] = 0 if x is None else x.stride(1) // unit
    return found
