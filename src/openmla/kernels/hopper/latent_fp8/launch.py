"""Host side of the latent FP8 kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.call import (
    Call,
    Extent,
    LaunchNumbers,
    Sources,
    launch_counter,
    scale_arguments,
    vector,
)
from openmla.kernels.gluon.dequantize.launch import rows_of
from openmla.kernels.gluon.dequantize.records import RowColumns
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.gluon.ranges.launch import group_of
from openmla.kernels.hopper.latent.launch import SOURCES as LATENT_SOURCES
from openmla.kernels.hopper.latent.launch import (
    WGMMA_ROWS,
    heads_of_tokens,
    list_counts,
    list_programs,
    lists,
    outputs,
    sequences,
)
from openmla.kernels.hopper.latent.plan import RowsLaunch
from openmla.kernels.hopper.latent.records import TileLayouts
from openmla.kernels.hopper.latent_fp8.kernel import latent_fp8_kernel
from openmla.kernels.hopper.latent_fp8.plan import HopperLatentFp8Config
from openmla.kernels.hopper.latent_fp8.records import Registers
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.problem import Problem

Operands = SparseOperands | LatentOperands
SOURCES: Sources = {
    **LATENT_SOURCES,
    "q_latent_desc": "q",
    "q_scale_ptr": "q_scale",
    "scale_ptr": ("cache_scales", "k_scale"),
}
NARROWEST = 64  # columns of the tile that stands for one that is not there


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs; without keys nothing, and results are cleared."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()
        return
    config: HopperLatentFp8Config = plan.config
    [rows] = plan.variant.rows
    arguments = _arguments(config, rows, op, results)
    programs = list_programs(config, plan.problem)
    if isinstance(op, LatentOperands):
        batch, total = op.cu_seqlens_q.shape[0] - 1, op.q.shape[0] * op.q.shape[1]
        arguments |= group_of(op, arguments["indices_ptr"], slice(0, batch))
        programs = min(total // WGMMA_ROWS + batch + 1, config.sm_count)
    yield Call(latent_fp8_kernel, programs, arguments, SOURCES)


def numbers(plan: Plan, problem: Problem) -> list[LaunchNumbers] | None:
    """What the number of tokens decides of a launch over lists; sequences are planned anew."""
    if problem.form != "sparse":
        return None
    config: HopperLatentFp8Config = plan.config
    described = dict.fromkeys(("q_latent_desc", "q_rope_desc"), Extent(0, problem.total_q))
    arguments: dict[str, int | Extent] = {**list_counts(config, problem.total_q), **described}
    return [LaunchNumbers(list_programs(config, problem), arguments)]


def _arguments(
    config: HopperLatentFp8Config, rows: RowsLaunch, op: Operands, results: Results
) -> dict[str, Any]:
    packed = isinstance(op, LatentOperands)
    places = sequences(op) if isinstance(op, LatentOperands) else lists(config, op)
    return {
        **constexprs(config),
        **places,
        **_rows(op),
        "counter_ptr": launch_counter(op.q.device) if rows.dynamic else None,
        "CHUNK": rows.chunk,
        **outputs(results),
        **scale_arguments(op.weights.scale),
        **_queries(config, op.q.reshape(1, -1, op.q.shape[2]) if packed else op.q),
        "sink_ptr": vector(op.weights.sink),
        "q_scale_ptr": vector(op.weights.q_scale),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }


@lru_cache(maxsize=4096)
def constexprs(config: HopperLatentFp8Config) -> dict[str, Any]:
    """What is compiled in, besides the page size and the sign of the scale."""
    registers = config.registers
    return {
        "ST": config.num_kv_stages,
        "DIMS": RowColumns(config.latent, config.rope),
        "REGISTERS": Registers(registers.consumer, registers.scores, registers.producer),
        "LAYOUTS": TileLayouts(
            latent=tile_layout(config.latent, element=1),
            rope=tile_layout(config.rope or NARROWEST, element=1),
            p=tile_layout(64),
        ),
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
    del found["rope_ptr"], found["SCALED"], found["page_rows"]
    return found | {"data_ptr": data.view(torch.bfloat16), "SCALED_VALUES": cached}


def _queries(config: HopperLatentFp8Config, q: Tensor) -> dict[str, Any]:
    """Descriptors of Q: 64 heads of one token; zeros past the last head."""
    return {
        "q_latent_desc": heads_of_tokens(q, config.latent),
        "q_rope_desc": heads_of_tokens(q, config.rope) if config.rope else None,
    }
