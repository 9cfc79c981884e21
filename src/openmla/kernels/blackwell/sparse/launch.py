"""Host side of the sparse Blackwell kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.cache import LatentCache
from openmla.errors import Unsupported
from openmla.kernels.blackwell.sparse.kernel import sparse_kernel
from openmla.kernels.call import Call, strides, vector
from openmla.kernels.gluon.compat import tmem_reg_layout
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.planning.blackwell.sparse import MLAPrefillSparse
from openmla.planning.blackwell.sparse.kernel import SparseKernel

LOG2_E = math.log2(math.e)
WARP_LANES = 32
GATHERED = 64  # columns of a tile
MOST_KEYS = 2**31 - 1
Operands = SparseOperands | LatentOperands


class Rows(NamedTuple):
    """Cache rows as the kernel counts them: `page_step` and `row_step` apart."""

    tensor: Tensor | None
    page_size: int
    """0 where rows lie evenly, page after page."""
    page_step: int
    row_step: int
    number: int = 0
    """Of a descriptor: its rows, and the elements from one to the next."""
    stride: int = 0


class Source(NamedTuple):
    """Where the rows come from."""

    data: Rows
    rope: Tensor | None
    """The rows as 16-bit values, where a part of them is."""
    scales: Rows
    cache: tuple[int, int] | None
    """None for rows without dequantizing, else columns that share a scale, and 64-column tiles."""


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs; nothing for an empty output."""
    if not results.out.numel():
        return
    keys, table = lists_of(op)
    if not min(keys["rows"], keys["topk"]):
        results.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    source = source_of(op.cache, plan.config.qk_depth)
    config, kernel = plan.config, SparseKernel(plan.config, plan.problem)
    tokens, heads, _ = op.q.shape
    blocks = -(-heads // config.padded_num_q_heads)
    arguments = {
        **constexprs_of(
            kernel, source.cache, source.data.page_size, source.scales.page_size, table
        ),
        **_descriptors(config, op, source, results), **keys,
        "lse_ptr": results.lse, **strides("lse", results.lse),
        "max_logits_ptr": results.max_logits, **strides("logits", results.max_logits),
        "sink_ptr": vector(op.weights.sink), "tokens": tokens,
        "factor": op.weights.scale * LOG2_E, "heads": heads, "head_blocks": blocks,
        "page_step": source.data.page_step, "row_step": source.data.row_step,
        "scale_ptr": source.scales.tensor, "scale_stride_page": source.scales.page_step,
        "scale_stride_row": source.scales.row_step,
    }  # fmt: skip
    yield Call(sparse_kernel, tokens * blocks, arguments)


@lru_cache(maxsize=64)
def constexprs_of(
    kernel: SparseKernel,
    cache: tuple[int, int] | None,
    page: int,
    scale_page: int,
    table: tuple[int, bool],
) -> dict[str, Any]:
    """What follows from the plan and from how the cache is laid out."""
    config = kernel.config
    keys, span, rows = config.B_TOPK, config.k_gather_box, config.padded_num_q_heads
    output, scores, part, copy, whole = (
        TensorMemoryLayout(block, col_stride=1)
        for block in (
            (rows, config.SV_ATOM_MMA_N), (rows, keys), (rows, span), (128, span // 2),
            (128, config.sm100_tmem_cols),
        )
    )  # fmt: skip
    return {
        "HOW": (keys, config.num_mbars, page, scale_page, 1, *table),
        "SPLIT": kernel.q_split,
        "CACHE": cache,
        "MAP": (config.O_TMEM_ADDR, config.P_TMEM_ADDR, config.Q_TMEM_ADDR),
        "TMEM": (output, scores, part, copy, whole),
        "REGS": (
            tmem_reg_layout(gl.float32, (rows, keys), scores, 4),
            tmem_reg_layout(gl.float32, (rows, span), part, 4),
            span,
        ),
        "TILE": tile_layout(span),
        "V_TILE": tile_layout(config.SV_ATOM_MMA_N),
        "WORDS": tile_layout(span // 2, element=4),
        "BYTES": tile_layout(span, element=1),
        "REGISTERS": kernel.registers,
        "num_warps": 4,
    }


def source_of(rows: LatentCache | Tensor, width: int) -> Source:
    """The tensors behind a cache format; see rows_fp8.py for `cache`."""
    tiles = width // GATHERED
    data = rows.data if isinstance(rows, LatentCache) else rows
    none = Rows(None, 0, 0, 0)
    if data.element_size() == 2:
        return Source(rows_of(data), None, none, None)
    if not isinstance(rows, LatentCache):
        return Source(rows_of(data), None, none, (0, tiles))
    layout, scales = rows.layout, rows.field("scales")
    assert scales is not None
    rope = data.view(torch.bfloat16) if layout.field("bf16") else None
    cache = (layout.block, layout.quantized // GATHERED)
    return Source(rows_of(data.view(torch.float8_e4m3fn)), rope, scales_of(scales), cache)


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
        return Rows(data, 0, 0, 1, data.shape[0], data.stride(0))
    pages, page_size, _ = data.shape
    stride = math.gcd(data.stride(0), data.stride(1)) if pages > 1 else data.stride(1)
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
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def _descriptors(
    config: MLAPrefillSparse, op: Operands, source: Source, results: Results
) -> dict[str, Any]:
    span, atom, rows = config.k_gather_box, config.SV_ATOM_MMA_N, source.data
    padded = config.padded_num_q_heads
    return {
        "q_desc": head_box(op.q, padded, span), "q_warp_desc": head_box(op.q, WARP_LANES, span),
        "k_desc": gather_box(rows, span),
        "rope_desc": None if source.rope is None else gather_box(rows_of(source.rope), span),
        "v_desc": gather_box(rows, span if source.cache else atom),
        "out_desc": head_box(results.out, padded, span),
    }  # fmt: skip


def lists_of(op: Operands) -> tuple[dict[str, Any], tuple[int, bool]]:
    """Where the rows of a token are said, and what is compiled in for that."""
    return _pages(op) if isinstance(op, LatentOperands) else _lists(op)


def _lists(op: SparseOperands) -> tuple[dict[str, Any], tuple[int, bool]]:
    """Every token with its own list of rows."""
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "indices_ptr": indices, "indices_stride": indices.stride(0), "topk": indices.shape[1],
        "lengths_ptr": vector(op.topk_lengths), "cu_ptr": None, "batch": 0, "rows": op.rows,
    }, (0, False)  # fmt: skip


def _pages(op: LatentOperands) -> tuple[dict[str, Any], tuple[int, bool]]:
    """Every token with the rows of its sequence."""
    table = op.block_table if op.block_table.stride(1) == 1 else op.block_table.contiguous()
    return {
        "indices_ptr": table, "indices_stride": table.stride(0),
        "topk": min(table.shape[1] * op.cache.page_size, MOST_KEYS),
        "lengths_ptr": vector(op.cache_lengths), "cu_ptr": vector(op.cu_seqlens_q),
        "batch": table.shape[0], "rows": op.cache.rows,
    }, (op.cache.page_size, op.causal)  # fmt: skip
