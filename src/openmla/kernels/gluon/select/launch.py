"""Host side of the selection: from a plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from openmla.indexer.operands import SelectOperands, SelectResults
from openmla.kernels.call import WORKSPACE, Call, Sources, vector
from openmla.kernels.gluon.compat import amd_function_attributes
from openmla.kernels.gluon.pages import inverse_of
from openmla.kernels.gluon.select.kernel import select_kernel
from openmla.kernels.gluon.select.plan import GluonSelectConfig
from openmla.kernels.gluon.select.records import SelectConfig
from openmla.planning import Plan

REGISTERS_OF_A_SIMD = 512
"""Registers of a lane of a CDNA4 SIMD, which its waves divide."""
NO_ACCUMULATORS = amd_function_attributes("amdgpu-agpr-alloc=0")
"""All registers as ordinary ones: left alone, the compiler sets some aside for matrix products."""
SELECT_SOURCES: Sources = {
    "scores_ptr": "scores",
    "starts_ptr": "starts",
    "ends_ptr": "ends",
    "table_ptr": "block_table",
    "out_ptr": "out",
    "counts_ptr": "counts",
    "mask_ptr": "mask",
    "lists_ptr": WORKSPACE,
}


def calls(plan: Plan, op: SelectOperands, results: SelectResults) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    if op.scores.shape[0]:
        yield _select(plan.config, op, results)


def _select(config: GluonSelectConfig, op: SelectOperands, results: SelectResults) -> Call:
    scores, windows = op.scores, op.windows
    table, mask = vector(op.block_table), results.mask
    programs = min(scores.shape[0], config.sm_count * config.blocks_per_sm)
    page_size = op.page_size if table is not None else 1
    arguments = {
        "scores_ptr": scores,
        "starts_ptr": vector(windows.starts),
        "ends_ptr": vector(windows.ends),
        "sequences_ptr": None if table is None else windows.sequences,
        "table_ptr": table,
        "out_ptr": results.out,
        "counts_ptr": results.counts,
        "mask_ptr": mask,
        "lists_ptr": scores.new_empty(programs * 2 * config.list_size, dtype=torch.int32),
        "rows": scores.shape[0],
        "width": scores.shape[1],
        "k": op.topk,
        "words": 0 if mask is None else mask.shape[1],
        "pages": 0 if table is None else table.shape[1],
        "stride": scores.stride(0) // 4,
        "out_stride": results.out.stride(0),
        "table_stride": 0 if table is None else table.shape[1],
        "page_size": page_size,
        "page_inverse": inverse_of(page_size),
        "CFG": SelectConfig(
            warps=config.warps,
            chunk_vectors=config.chunk_vectors,
            list_vectors=config.list_vectors,
            stages=config.stages,
            lanes=config.lanes,
            loads_to_lds=config.loads_to_lds,
            recomputes=not config.loads_to_lds,
        ),
        "ADD": op.add_starts,
        "LONG": config.long_rows,
        "num_warps": config.warps,
        **_registers(config),
    }
    return Call(select_kernel, programs, arguments, SELECT_SOURCES)


def _registers(config: GluonSelectConfig) -> dict[str, Any]:
    """The compiler's options for them: a number, or so few waves on a SIMD that each has it."""
    if config.loads_to_lds:
        waves = REGISTERS_OF_A_SIMD // config.max_registers
        return {"waves_per_eu": waves, **NO_ACCUMULATORS}
    return {"maxnreg": config.max_registers}
