"""Host side of the latent Hopper kernel: from a Plan and its operands to a kernel call.

`calls` lists what a launch would run, as data; `launch` runs it. Nothing here reads a device
tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.cache import LatentCache
from openmla.kernels.call import Call, scale_arguments, vector
from openmla.kernels.descriptors import tile_layout
from openmla.kernels.hopper.fp8_launch import addressed_once, fp8_rows
from openmla.kernels.hopper.sparse import sparse_kernel
from openmla.operands import Results, SparseOperands
from openmla.plan import Plan
from openmla.plan.hopper import HopperSparseConfig
from openmla.plan.hopper_cache import PLAIN

WGMMA_ROWS = 64
VECTOR = 8  # elements in 16 bytes
MOST_ROWS = 2**31 - 1  # no index names more


def launch(plan: Plan, operands: SparseOperands, results: Results) -> None:
    """Fill every row of `results`."""
    if not operands.rows or not operands.indices.shape[1]:
        results.clear()  # nobody sees a key
        return
    # Triton launches on the current GPU, wherever the tensors are.
    here = torch.cuda.device(operands.q.device) if operands.q.is_cuda else nullcontext()
    with here:
        for call in calls(plan, operands, results):
            call.run()


def calls(plan: Plan, op: SparseOperands, results: Results) -> Iterator[Call]:
    """What `launch` runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    config: HopperSparseConfig = plan.config
    if config.cache_read.mode != "workspace":
        yield _attention(config, op, results)
        return
    space = addressed_once(config, op)
    yield from space.calls
    plain = replace(config, cache_read=PLAIN)
    yield _attention(plain, space.operands, results, space.gate(fits=True))
    if config.cache_read.may_overflow:
        widening = replace(config, cache_read=replace(config.cache_read, mode="in_kernel"))
        yield _attention(widening, op, results, space.gate(fits=False))


NO_GATE: dict[str, Any] = {"total_ptr": None, "capacity": 0, "FITS": True}


def _attention(
    config: HopperSparseConfig, op: SparseOperands, results: Results, gate: dict[str, Any] = NO_GATE
) -> Call:
    """The attention kernel over the rows of `op` as they are stored."""
    total_q, heads, _ = op.q.shape
    tiles = total_q * config.row_blocks
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    arguments = {
        **constexprs(config),
        **_queries(config, op.q),
        **_rows(op.cache),
        **_outputs(results),
        **scale_arguments(op.weights.scale),
        **gate,
        "indices_ptr": indices,
        "lengths_ptr": vector(op.topk_lengths),
        "sink_ptr": vector(op.weights.sink),
        "topk": indices.shape[1],
        "rows": min(op.rows, MOST_ROWS),
        "tiles": tiles,
        "head_blocks": config.row_blocks,
        "heads": heads,
        "indices_stride": indices.stride(0),
    }
    return Call(sparse_kernel, min(tiles, config.sm_count), arguments)


@lru_cache(maxsize=4096)
def constexprs(config: HopperSparseConfig) -> dict[str, Any]:
    """What is compiled in, besides the page size and the sign of the scale."""
    half = config.latent // 2
    return {
        "ST": config.num_kv_stages,
        "DIMS": (half, config.rope),
        "OVERLAY": config.p_overlays_rope,
        "LANES": config.copy_lanes,
        "REGISTERS": (config.registers.consumer, config.registers.producer),
        "LAYOUTS": tuple(tile_layout(width) for width in (half, config.rope or 16, 64)),
        "num_warps": 4,
    }


def _queries(config: HopperSparseConfig, q: Tensor) -> dict[str, Any]:
    rope = config.rope
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


def _rows(cache: LatentCache | Tensor) -> dict[str, Any]:
    """Where rows lie. Strides of data are in units of 16 bytes."""
    if isinstance(cache, LatentCache) and cache.format != "bf16":
        return fp8_rows(cache)
    data = cache.data if isinstance(cache, LatentCache) else cache
    page, row = (0, data.stride(0)) if data.dim() == 2 else data.stride()[:2]
    end_to_end = data.dim() == 2 or data.shape[0] == 1 or page == data.shape[1] * row
    return {
        "data_ptr": data,
        "scale_ptr": None,
        "rope_ptr": None,
        "stride_page": 0 if end_to_end else page // VECTOR,
        "stride_row": row // VECTOR,
        "scale_page": 0,
        "scale_row": 0,
        "PAGE": 0 if end_to_end else data.shape[1],
        "SCALED": 0,
    }


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
