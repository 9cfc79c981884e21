"""Host side of the latent Hopper kernel: from a Plan and its operands to a kernel call.

`calls` lists what a launch runs, as data. Nothing here reads a device tensor, so nothing waits for
the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.kernels.call import Call, Counted, Sources, scale_arguments, vector
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.dequantize.launch import addressed_once, rows_of
from openmla.kernels.hopper.latent.kernel import sparse_kernel
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.planning.hopper import HopperSparseConfig

WGMMA_ROWS = 64
VECTOR = 8  # elements in 16 bytes
MOST_ROWS = 2**31 - 1  # no index names more
Operands = SparseOperands | LatentOperands
SOURCES: Sources = {
    "q_half_desc": "q", "q_rope_desc": "q", "out_ptr": "out", "lse_ptr": "lse",
    "logits_ptr": "max_logits", "sink_ptr": "sink", "data_ptr": ("kv", "cache_data"),
    "rope_ptr": ("kv", "cache_data"), "scale_ptr": ("cache_scales", "kv", "cache_data"),
    "indices_ptr": ("indices", "block_table"), "lengths_ptr": ("topk_lengths", "cache_lengths"),
    "cu_ptr": "cu_seqlens_q",
}  # fmt: skip


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing where nobody sees a key, and results are cleared."""
    if not results.out.numel():
        return
    if not _has_keys(op):
        results.clear()
        return
    config: HopperSparseConfig = plan.config
    if config.cache_read.mode != "workspace":
        yield _attention(config, op, results)
        return
    space = addressed_once(config, op)
    yield from space.calls
    yield _attention(config, space.operands, results, space.gate(fits=True))
    if space.may_overflow:
        yield _attention(config, op, results, space.gate(fits=False))


def _has_keys(op: Operands) -> bool:
    if isinstance(op, LatentOperands):
        return bool(op.cache.rows and op.block_table.numel())
    return bool(op.rows and op.indices.shape[1])


NO_GATE: dict[str, Any] = {"total_ptr": None, "capacity": 0, "FITS": True}


def _attention(
    config: HopperSparseConfig, op: Operands, results: Results, gate: dict[str, Any] = NO_GATE
) -> Call:
    """The attention kernel over the rows of `op` as they are stored."""
    places = _sequences(op) if isinstance(op, LatentOperands) else _lists(config, op)
    rows = rows_of(op.cache)
    registers = config.registers_of(dequantizes=rows["SCALED"] > 0)
    arguments = {
        **constexprs(config),
        **places,
        **rows,
        "REGISTERS": (registers.consumer, registers.producer),
        **_outputs(results),
        **scale_arguments(op.weights.scale),
        **gate,
        **_queries(config, op.q, packed=isinstance(op, LatentOperands)),
        "sink_ptr": vector(op.weights.sink),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }
    return Call(sparse_kernel, min(arguments["tiles"], config.sm_count), arguments, SOURCES)


def counted(plan: Plan, args: Mapping[str, Any]) -> tuple[object, Counted] | None:
    """What follows from the number of tokens, for openmla.cached: of lists of rows that are read as
    they are. Over pages, and whether FP8 rows are worth a workspace, other counts are planned."""
    config: HopperSparseConfig = plan.config
    if config.cache_read.mode != "plain" or "indices" not in args:
        return None
    tokens = args["q"].shape[0]
    tiles = tokens * config.row_blocks
    described = dict.fromkeys(("q_half_desc", "q_rope_desc"), (0, tokens))
    return None, [(min(tiles, config.sm_count), {"tiles": tiles, "total_q": tokens, **described})]


def _lists(config: HopperSparseConfig, op: SparseOperands) -> dict[str, Any]:
    """Every token with its own list of rows: a tile is 64 of its heads."""
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "indices_ptr": indices,
        "lengths_ptr": vector(op.topk_lengths),
        "cu_ptr": None,
        "topk": indices.shape[1],
        "rows": min(op.rows, MOST_ROWS),
        "tiles": op.q.shape[0] * config.row_blocks,
        "head_blocks": config.row_blocks,
        "batch": 0,
        "indices_stride": indices.stride(0),
        "PAGE_SIZE": 0,
        "MASK": 0,
    }


def _sequences(op: LatentOperands) -> dict[str, Any]:
    """Sequences over pages: a tile is 64 rows, heads of tokens (see pages.py)."""
    table = op.block_table if op.block_table.stride(1) == 1 else op.block_table.contiguous()
    batch, size = op.cu_seqlens_q.shape[0] - 1, op.cache.page_size
    return {
        "indices_ptr": table,
        "lengths_ptr": vector(op.cache_lengths),
        "cu_ptr": vector(op.cu_seqlens_q),
        "topk": min(table.shape[1] * size, MOST_ROWS),
        "rows": min(op.cache.rows, MOST_ROWS),
        "tiles": op.q.shape[0] * op.q.shape[1] // WGMMA_ROWS + batch + 1,
        "head_blocks": 1,
        "batch": batch,
        "indices_stride": table.stride(0),
        "PAGE_SIZE": size,
        "MASK": 2 if op.causal else 1,
    }


@lru_cache(maxsize=4096)
def constexprs(config: HopperSparseConfig) -> dict[str, Any]:
    """What is compiled in, besides the page size and the sign of the scale."""
    half = config.latent // 2
    return {
        "ST": config.num_kv_stages,
        "DIMS": (half, config.rope),
        "OVERLAY": config.p_overlays_rope,
        "LANES": config.copy_lanes,
        "LAYOUTS": tuple(tile_layout(width) for width in (half, config.rope or 16, 64)),
        "num_warps": 4,
    }


def _queries(config: HopperSparseConfig, q: Tensor, packed: bool) -> dict[str, Any]:
    """Descriptors of Q. `packed`: tiles hold heads of several tokens, so these must follow one
    another as the heads of one do."""
    rope = config.rope
    if packed:
        q = q.reshape(1, -1, q.shape[2])  # a copy only where heads and tokens have gaps
    return {
        "q_half_desc": heads_of_tokens(q, config.latent // 2),
        "q_rope_desc": heads_of_tokens(q, rope) if rope else None,
    }


def heads_of_tokens(q: Tensor, columns: int) -> Any:
    """Boxes of 64 heads of one token of q [tokens, heads, width]; zeros past the last head."""
    strides = list(q.stride())
    if q.shape[1] == 1:
        strides[1] = strides[0]  # of one head: may be anything, and is never used
    box = [1, WGMMA_ROWS, columns]
    return TensorDescriptor(q, list(q.shape), strides, box, tile_layout(columns, 3))


def _outputs(results: Results) -> dict[str, Any]:
    out, lse, logits = results.out, results.lse, results.max_logits
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "logits_ptr": logits,
        "out_stride_t": out.stride(0) // VECTOR,
        "out_stride_h": out.stride(1) // VECTOR,
        "lse_stride_t": 0 if lse is None else lse.stride(0),
        "lse_stride_h": 0 if lse is None else lse.stride(1),
        "logits_stride_t": 0 if logits is None else logits.stride(0),
        "logits_stride_h": 0 if logits is None else logits.stride(1),
    }
