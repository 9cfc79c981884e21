"""Host side of the latent FP8 kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.call import (
    Call,
    Counted,
    Sources,
    launch_counter,
    scale_arguments,
    vector,
)
from openmla.kernels.gluon.dequantize.launch import rows_of
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.latent.launch import SOURCES as LATENT_SOURCES
from openmla.kernels.hopper.latent.launch import (
    WGMMA_ROWS,
    group_of,
    has_keys,
    heads_of_tokens,
    lists,
    outputs,
    sequences,
)
from openmla.kernels.hopper.sparse_fp8.kernel import sparse_fp8_kernel
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.planning.hopper import HopperSparseFp8Config

Operands = SparseOperands | LatentOperands
SOURCES: Sources = {
    **LATENT_SOURCES,
    "q_latent_desc": "q",
    "q_scale_ptr": "q_scale",
    "scale_ptr": ("cache_scales", "k_scale"),
}
NARROWEST = 64  # columns of the tile that stands for one that is not there


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs; nothing where nobody sees a key, and results are cleared."""
    if not results.out.numel():
        return
    if not has_keys(op):
        results.clear()
        return
    config: HopperSparseFp8Config = plan.config
    arguments = _arguments(config, op, results)
    if isinstance(op, SparseOperands):
        programs = min(arguments["tiles"], config.sm_count)
    else:
        batch, rows = op.cu_seqlens_q.shape[0] - 1, op.q.shape[0] * op.q.shape[1]
        arguments |= group_of(op, arguments["indices_ptr"], slice(0, batch))
        programs = min(rows // WGMMA_ROWS + batch + 1, config.sm_count)
    yield Call(sparse_fp8_kernel, programs, arguments, SOURCES)


def counted(plan: Plan, args: Mapping[str, Any]) -> tuple[object, Counted] | None:
    """What follows from the number of tokens, for openmla.cached: of lists of rows."""
    if "indices" not in args:
        return None
    config: HopperSparseFp8Config = plan.config
    tokens = args["q"].shape[0]
    tiles = tokens * config.row_blocks
    described = dict.fromkeys(("q_latent_desc", "q_rope_desc"), (0, tokens))
    return None, [(min(tiles, config.sm_count), {"tiles": tiles, "total_q": tokens, **described})]


def _arguments(config: HopperSparseFp8Config, op: Operands, results: Results) -> dict[str, Any]:
    packed = isinstance(op, LatentOperands)
    places = sequences(op) if isinstance(op, LatentOperands) else lists(config, op)
    return {
        **constexprs(config),
        **places,
        **_rows(op),
        "counter_ptr": launch_counter(op.q.device) if config.draws else None,
        **outputs(results),
        **scale_arguments(op.weights.scale),
        **_queries(config, op.q.reshape(1, -1, op.q.shape[2]) if packed else op.q),
        "sink_ptr": vector(op.weights.sink),
        "q_scale_ptr": vector(op.weights.q_scale),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }


@lru_cache(maxsize=4096)
def constexprs(config: HopperSparseFp8Config) -> dict[str, Any]:
    """What is compiled in, besides the page size and the sign of the scale."""
    registers = config.registers
    rope = config.rope or NARROWEST
    rows = (tile_layout(width, element=1) for width in (config.latent, rope))
    return {
        "ST": config.num_kv_stages,
        "DIMS": (config.latent, config.rope),
        "REGISTERS": (registers.consumer, registers.scores, registers.producer),
        "LAYOUTS": (*rows, tile_layout(64)),
        "num_warps": 4,
    }


def _rows(op: Operands) -> dict[str, Any]:
    """Where rows and their scales lie. Rows are copied as pairs of bytes."""
    cached = isinstance(op.cache, LatentCache)
    found = rows_of(op.cache)
    data = op.cache.data if isinstance(op.cache, LatentCache) else op.cache[None]
    keys = op.weights.k_scale
    if not cached and keys is not None:
        found |= {"scale_ptr": vector(keys), "scale_row": 1}
    del found["rope_ptr"], found["SCALED"]
    return found | {"data_ptr": data.view(torch.bfloat16), "SCALED_VALUES": cached}


def _queries(config: HopperSparseFp8Config, q: Tensor) -> dict[str, Any]:
    """Descriptors of Q: 64 heads of one token; zeros past the last head."""
    return {
        "q_latent_desc": heads_of_tokens(q, config.latent),
        "q_rope_desc": heads_of_tokens(q, config.rope) if config.rope else None,
    }
