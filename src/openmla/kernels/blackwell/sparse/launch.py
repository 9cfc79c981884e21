"""Host side of the sparse Blackwell kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.cache import LatentCache
from openmla.errors import Unsupported
from openmla.kernels.blackwell.sparse.kernel import sparse_kernel
from openmla.kernels.blackwell.sparse.plan import SparseConfig, SparseKernel
from openmla.kernels.blackwell.sparse.records import (
    Fp8Cache,
    How,
    Indexing,
    QSplit,
    RegisterLayouts,
    Registers,
    TmemLayouts,
    TmemMap,
)
from openmla.kernels.call import Call, angles_of, strides, vector
from openmla.kernels.gluon.compat import tmem_reg_layout
from openmla.kernels.gluon.descriptors import box_strides, fitting_strides, tile_layout
from openmla.kernels.gluon.places import NO_SPANS, places_of
from openmla.kernels.gluon.upcast.launch import upcast
from openmla.operands import AttendOperands, LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.sources import Source, Span

LOG2_E = math.log2(math.e)
WARP_LANES = 32
GATHERED = 64  # columns of a tile
ELEMENT = 2  # bytes of a 16-bit column
MOST_KEYS = 2**31 - 1
SECOND_ARGUMENTS = (
    *("raw_desc", "plain_desc", "scale_ptr", "page_step", "row_step", "scale_page", "scale_row"),
    *("indices_ptr", "lengths_ptr", "request_ptr", "begin_ptr", "requests", "topk", "rows"),
    "indices_stride",
)
NO_SECOND: dict[str, Any] = {f"second_{name}": None for name in SECOND_ARGUMENTS}
Operands = SparseOperands | LatentOperands | AttendOperands
AnyRows = TypeVar("AnyRows", SparseOperands, LatentOperands, Operands)


class Rows(NamedTuple):
    """Cache rows as the kernel addresses them: by steps from page to page and from row to row."""

    tensor: Tensor | None
    page_size: int
    """0 where rows lie evenly, page after page."""
    page_step: int
    row_step: int
    number: int = 0
    """Rows of the TMA descriptor."""
    stride: int = 0
    """Elements from one row of the descriptor to the next."""


class RowsOfSource(NamedTuple):
    """Where the rows come from."""

    data: Rows
    plain: Tensor | None
    """The rows as 16-bit values, where a part of them is."""
    scales: Rows
    cache: Fp8Cache | None
    """None for rows without dequantizing."""


class Table(NamedTuple):
    """How the lists of tokens are given, which is compiled in."""

    page_size: int
    """Keys of a page of the block table; 0: every token has a list of indices."""
    is_causal: bool


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """The kernel calls of a launch; none for an empty output."""
    if not results.out.numel():
        return
    config, kernel = plan.config, SparseKernel(plan.config, plan.problem)
    placed = _sources(config, op) if isinstance(op, AttendOperands) else _listed(config, op)
    if placed is None:
        results.clear()  # there are no keys, and a descriptor cannot describe an empty tensor
        return
    op, copies = widened(op)
    yield from copies
    tokens, heads, _ = op.q.shape
    blocks = -(-heads // config.padded_num_q_heads)
    source = placed.source
    arguments = {
        **constexprs_of(kernel, source.cache, placed.indexing),
        **_descriptors(config, op, source, results),
        **placed.arguments,
        "lse_ptr": results.lse,
        **strides("lse", results.lse),
        "max_logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        "sink_ptr": vector(op.weights.sink),
        "q_scale_ptr": vector(op.weights.q_scale),
        "tokens": tokens,
        "factor": op.weights.scale * LOG2_E,
        "heads": heads,
        "head_blocks": blocks,
        "page_step": source.data.page_step,
        "row_step": source.data.row_step,
        "scale_ptr": source.scales.tensor,
        "scale_stride_page": source.scales.page_step,
        "scale_stride_row": source.scales.row_step,
        **angles_of(op.turn_back),
    }
    yield Call(sparse_kernel, tokens * blocks, arguments)


class Placed(NamedTuple):
    """Which rows each token sees, and where they lie."""

    source: RowsOfSource
    arguments: dict[str, Any]
    indexing: Indexing


def _listed(config: SparseConfig, op: SparseOperands | LatentOperands) -> Placed | None:
    """The lists of the tokens, or the pages of their sequences; None where there are no keys."""
    keys, table = lists_of(op)
    if not min(keys["rows"], keys["topk"]):
        return None
    source = source_of(op.cache, config.qk_depth, config.v_depth)
    indexing = Indexing(
        page_size=source.data.page_size,
        table_page_size=table.page_size,
        is_causal=table.is_causal,
        ctas=1,
        is_span=False,
        second=None,
    )
    return Placed(source, {**keys, **NO_SPANS, **NO_SECOND}, indexing)


def _sources(config: SparseConfig, op: AttendOperands) -> Placed | None:
    """Lists and spans of one source or of two that have rows; None where none has."""
    there = [source for source in op.sources if source.has_rows]
    if not there:
        return None
    rows = [source_of(source.rows, config.qk_depth, config.v_depth) for source in there]
    places = [{**NO_SPANS, "lengths_ptr": None, **places_of(source)} for source in there]
    indexed = [
        indexing_of(source, placed.data.page_size, ctas=1)
        for source, placed in zip(there, rows, strict=True)
    ]
    first, indexing = rows[0], indexed[0]
    arguments = {**places[0], "cu_ptr": None, "batch": 0, "window": None, **NO_SECOND}
    if len(there) > 1:
        second = rows[1]
        assert first.cache is not None and second.plain is not None
        first = first._replace(cache=first.cache._replace(second=second.cache))
        indexing = indexing._replace(second=indexed[1])
        more = {
            **places[1],
            "raw_desc": gather_box(second.data, config.k_gather_box),
            "plain_desc": gather_box(rows_of(second.plain), config.k_gather_box),
            "scale_ptr": second.scales.tensor,
            "page_step": second.data.page_step,
            "row_step": second.data.row_step,
            "scale_page": second.scales.page_step,
            "scale_row": second.scales.row_step,
        }
        arguments |= {f"second_{name}": value for name, value in more.items()}
    return Placed(first, arguments, indexing)


def indexing_of(source: Source, page_size: int, ctas: int) -> Indexing:
    """How positions in a list or a span become rows of a pool with pages of `page_size` rows."""
    span = isinstance(source, Span)
    return Indexing(
        page_size=page_size,
        table_page_size=source.cache.page_size if isinstance(source, Span) else 0,
        is_causal=False,
        ctas=ctas,
        is_span=span,
        second=None,
    )


def widened(op: AnyRows) -> tuple[AnyRows, list[Call]]:
    """The operands with queries of 16 bits, and the launch that makes them of e4m3 ones."""
    if op.q.element_size() > 1:
        return op, []
    tokens, heads, columns = op.q.shape
    q = torch.empty(op.q.shape, dtype=torch.bfloat16, device=op.q.device)
    pieces = (tokens, heads * columns // GATHERED, GATHERED)
    copy = upcast(op.q.reshape(pieces), q.view(pieces))
    return replace(op, q=q), [replace(copy, sources={})]


@lru_cache(maxsize=64)
def constexprs_of(
    kernel: SparseKernel, cache: Fp8Cache | None, indexing: Indexing
) -> dict[str, Any]:
    """The constants that follow from the plan and from how the cache is laid out."""
    config = kernel.config
    keys, span, rows = config.B_TOPK, config.k_gather_box, config.padded_num_q_heads
    layouts = TmemLayouts(
        output=TensorMemoryLayout((rows, config.SV_ATOM_MMA_N), col_stride=1),
        scores=TensorMemoryLayout((rows, keys), col_stride=1),
        q=TensorMemoryLayout((rows, span), col_stride=1),
        q_copy=TensorMemoryLayout((128, span // 2), col_stride=1),
        whole=TensorMemoryLayout((128, config.sm100_tmem_cols), col_stride=1),
    )
    return {
        "HOW": How(
            b_topk=keys,
            num_mbars=config.num_mbars,
            v_atoms=config.v_depth // config.SV_ATOM_MMA_N,
            indexing=indexing,
        ),
        "SPLIT": QSplit(*kernel.q_split),
        "CACHE": cache,
        "MAP": TmemMap(output=config.O_TMEM_ADDR, scores=config.P_TMEM_ADDR, q=config.Q_TMEM_ADDR),
        "TMEM": layouts,
        "REGS": RegisterLayouts(
            scores=tmem_reg_layout(gl.float32, (rows, keys), layouts.scores, 4),
            output=tmem_reg_layout(gl.float32, (rows, span), layouts.q, 4),
            output_columns=span,
        ),
        "TILE": tile_layout(span),
        "V_TILE": tile_layout(config.SV_ATOM_MMA_N),
        "WORDS": tile_layout(span // 2, element=4),
        "BYTES": tile_layout(span, element=1),
        "REGISTERS": Registers(*kernel.registers),
        "num_warps": 4,
    }


def source_of(rows: LatentCache | Tensor, width: int, v_width: int) -> RowsOfSource:
    """The tensors behind a cache format of rows of `width` columns, the first `v_width` of them V;
    see rows_fp8.py for FP8 ones."""
    tiles = width // GATHERED
    data = rows.data if isinstance(rows, LatentCache) else rows
    none = Rows(None, 0, 0, 0)
    if data.element_size() == 2:
        return RowsOfSource(rows_of(data), None, none, None)
    if not isinstance(rows, LatentCache):
        cache = Fp8Cache(
            scale_columns=0,
            raw_tiles=tiles,
            v_tiles=v_width // GATHERED,
            plain_column=0,
            has_exponents=False,
            scale_page_size=0,
            second=None,
        )
        return RowsOfSource(rows_of(data), None, none, cache)
    layout, stored = rows.layout, rows.field("scales")
    assert stored is not None
    scales = scales_of(stored)
    plain = layout.field("bf16")
    cache = Fp8Cache(
        scale_columns=layout.block,
        raw_tiles=layout.quantized // GATHERED,
        v_tiles=min(v_width, layout.quantized) // GATHERED,
        plain_column=plain.offset // ELEMENT if plain else 0,
        has_exponents=stored.element_size() == 1,
        scale_page_size=scales.page_size,
        second=None,
    )
    halves = data.view(torch.bfloat16) if plain else None
    return RowsOfSource(rows_of(data.view(torch.float8_e4m3fn)), halves, scales, cache)


def rows_of(data: Tensor) -> Rows:
    """Rows of a tensor [rows, columns] or of pages [pages, page_size, columns], for gather4.

    gather4 counts rows of one stride. Pages that do not follow one another at a whole number of
    rows need a stride that divides both steps: with 200 elements from page to page and 80 from row
    to row it is 40, and five pages of two rows end at descriptor row 4 * 5 + 2.

    >>> pages = torch.zeros(1000).as_strided((5, 2, 80), (200, 80, 1))
    >>> rows_of(pages)[1:]
    (2, 5, 2, 23, 40)
    """
    if data.dim() == 2:
        return Rows(data, 0, 0, 1, data.shape[0], fitting_strides(data)[0])
    pages, page_size, _ = data.shape
    row = fitting_strides(data)[1]
    stride = math.gcd(data.stride(0), data.stride(1)) if pages > 1 else row
    page_step, row_step = data.stride(0) // stride, data.stride(1) // stride
    number = (pages - 1) * page_step + (page_size - 1) * row_step + 1
    if number >= 1 << 31:
        raise Unsupported(
            f"{number} descriptor rows of {stride} elements: gather4 counts up to 2^31",
            nearest="pages whose rows lie evenly",
        )
    even = pages == 1 or page_step == page_size * row_step
    return Rows(data, 0 if even else page_size, page_step, row_step, number, stride)


def scales_of(scales: Tensor) -> Rows:
    """Scales [pages, page_size, blocks], in elements from the first."""
    pages, page_size, _ = scales.shape
    page_step, row_step = scales.stride(0), scales.stride(1)
    even = pages == 1 or page_step == page_size * row_step
    return Rows(scales, 0 if even else page_size, page_step, row_step)


def gather_box(rows: Rows, columns: int, layout: Any = None) -> Any:
    """A descriptor of single rows, for gather4."""
    assert rows.tensor is not None
    shape = [rows.number, rows.tensor.shape[-1]]
    layout = layout or tile_layout(columns, 2, rows.tensor.element_size())
    return TensorDescriptor(rows.tensor, shape, [rows.stride, 1], [1, columns], layout)


def head_box(x: Tensor, heads: int, columns: int, layout: Any = None) -> Any:
    """Boxes of `heads` heads and `columns` columns of one token of x [tokens, heads, columns]."""
    box, layout = [1, heads, columns], layout or tile_layout(columns, 3)
    return TensorDescriptor(x, list(x.shape), box_strides(x), box, layout)


def _descriptors(
    config: SparseConfig, op: Operands, source: RowsOfSource, results: Results
) -> dict[str, Any]:
    span, atom, rows = config.k_gather_box, config.SV_ATOM_MMA_N, source.data
    padded = config.padded_num_q_heads
    return {
        "q_desc": head_box(op.q, padded, span),
        "q_warp_desc": head_box(op.q, WARP_LANES, span),
        "k_desc": gather_box(rows, span),
        "plain_desc": None if source.plain is None else gather_box(rows_of(source.plain), span),
        "v_desc": gather_box(rows, span if source.cache else atom),
        "out_desc": head_box(results.out, padded, span),
    }


def lists_of(op: SparseOperands | LatentOperands) -> tuple[dict[str, Any], Table]:
    """Arguments that say which rows a token attends to, and what is compiled in for them."""
    return _pages(op) if isinstance(op, LatentOperands) else _lists(op)


def _lists(op: SparseOperands) -> tuple[dict[str, Any], Table]:
    """Every token has its own list of rows."""
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "topk": indices.shape[1],
        "lengths_ptr": vector(op.topk_lengths),
        "cu_ptr": None,
        "batch": 0,
        "window": None,
        "rows": op.rows,
    }, Table(page_size=0, is_causal=False)


def _pages(op: LatentOperands) -> tuple[dict[str, Any], Table]:
    """Every token has the rows of its sequence."""
    table = op.block_table if op.block_table.stride(1) == 1 else op.block_table.contiguous()
    return {
        "indices_ptr": table,
        "indices_stride": table.stride(0),
        "topk": min(table.shape[1] * op.cache.page_size, MOST_KEYS),
        "lengths_ptr": vector(op.cache_lengths),
        "cu_ptr": vector(op.cu_seqlens_q),
        "batch": table.shape[0],
        "window": op.window or None,
        "rows": op.cache.rows,
    }, Table(page_size=op.cache.page_size, is_causal=op.causal)
