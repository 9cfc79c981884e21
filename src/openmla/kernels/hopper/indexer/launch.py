"""Host side of the indexer's scores on Hopper: from a plan and its operands to kernel calls.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from openmla.indexer.operands import ScoresOperands
from openmla.kernels.call import WORKSPACE, Call, Sources, vector
from openmla.kernels.gluon.indexer_operands import (
    SOURCES,
    WINDOW_POINTERS,
    counted,
    scores_arguments,
    window_arguments,
)
from openmla.kernels.gluon.indexer_records import ScoresConfig
from openmla.kernels.hopper.indexer.decode_scores import decode_scores_kernel
from openmla.kernels.hopper.indexer.plan import ConvertingRegisters, HopperScoresConfig
from openmla.kernels.hopper.indexer.records import DecodeScoresConfig, Registers
from openmla.kernels.hopper.indexer.scores import scores_kernel
from openmla.planning import Plan

DECODE_SOURCES: Sources = {
    **{name: source for name, source in SOURCES.items() if name != "counter_ptr"},
    "cu_ptr": "cu_seqlens_q",
    "lengths_ptr": "cache_lengths",
    **dict.fromkeys(WINDOW_POINTERS, WORKSPACE),
}


def calls(plan: Plan, op: ScoresOperands, out: Tensor) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    if op.columns(out) and op.q.shape[0]:
        yield _scores(plan.config, op, out)


def _scores(config: HopperScoresConfig, op: ScoresOperands, out: Tensor) -> Call:
    arguments = {
        **scores_arguments(op, out, config.box_rows, config.tile_queries),
        "REGISTERS": registers_of(config),
        "FP4": config.fp4,
        "num_warps": 4,
    }
    if config.shared_queries:
        return _decode_scores(config, op, arguments)
    arguments |= {
        **window_arguments(op.windows),
        **counted(op, out, config.chunk),
        "CFG": ScoresConfig(
            tiles=config.consumers,
            block_keys=config.BN,
            key_stages=config.stages,
            query_stages=config.query_stages,
            chunk=config.chunk,
        ),
    }
    work_items = -(-op.q.shape[0] // config.block_queries) * arguments["chunks"]
    return Call(scores_kernel, min(work_items, config.sm_count), arguments, SOURCES)


def registers_of(config: HopperScoresConfig) -> Registers:
    """Registers of the partitions."""
    chosen = config.registers
    converter = chosen.converter if isinstance(chosen, ConvertingRegisters) else 0
    return Registers(chosen.consumer, chosen.producer, converter)


def _decode_scores(
    config: HopperScoresConfig, op: ScoresOperands, arguments: dict[str, Any]
) -> Call:
    """Queries over pages, whose windows follow from the requests."""
    requests = op.windows.requests
    assert requests is not None
    # What lengths are, only the device knows: the most blocks there can be.
    blocks = arguments["total_q"] * -(-arguments["columns"] // config.BN)
    programs = min(blocks, config.sm_count)
    batch = requests.cache_lengths.shape[0]
    arguments |= {
        "cu_ptr": vector(requests.cu_seqlens_q),
        "lengths_ptr": vector(requests.cache_lengths),
        **window_arguments(op.seen or op.windows),
        "batch": batch,
        "reach": 1 << batch.bit_length() >> 1,
        "first_query": requests.first,
        "least": requests.least,
        "part": 1.0 / programs,
        "CFG": DecodeScoresConfig(
            consumers=config.consumers,
            queries=config.shared_queries,
            block_keys=config.BN,
            key_stages=config.stages,
            query_stages=config.query_stages,
            group=config.group,
        ),
        "launch_pdl": True,  # may begin before the launch in front has ended
    }
    return Call(decode_scores_kernel, programs, arguments, DECODE_SOURCES)
