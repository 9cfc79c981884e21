"""Host side of the indexer's scores on Blackwell: from a plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from openmla.indexer.operands import ScoresOperands
from openmla.kernels.blackwell.indexer.plan import COLUMNS, PART, BlackwellScoresConfig
from openmla.kernels.blackwell.indexer.scores import scores_kernel
from openmla.kernels.call import Call
from openmla.kernels.gluon.compat import tmem_reg_layout
from openmla.kernels.gluon.indexer_operands import (
    SOURCES,
    counted,
    scores_arguments,
    window_arguments,
)
from openmla.kernels.gluon.indexer_records import ScoresConfig
from openmla.planning import Plan


def calls(plan: Plan, op: ScoresOperands, out: Tensor) -> Iterator[Call]:
    """What a launch runs; nothing where there is nothing to write."""
    config: BlackwellScoresConfig = plan.config
    if not op.columns(out) or not op.q.shape[0]:
        return
    arguments = {
        **scores_arguments(op, out, config.box_rows, COLUMNS // config.heads),
        **window_arguments(op.windows),
        **counted(op, out, config.chunk),
        **_constexprs(config),
    }
    work_items = -(-op.q.shape[0] // config.block_queries) * arguments["chunks"]
    yield Call(scores_kernel, min(work_items, config.sm_count), arguments, SOURCES)


def _constexprs(config: BlackwellScoresConfig) -> dict[str, Any]:
    product = TensorMemoryLayout((config.BN, COLUMNS), col_stride=1)
    part = TensorMemoryLayout((config.BN, PART), col_stride=1)
    return {
        "CFG": ScoresConfig(
            tiles=config.tiles,
            block_keys=config.BN,
            key_stages=config.stages,
            query_stages=config.query_stages,
            chunk=config.chunk,
        ),
        "REGISTERS": config.registers,
        "TMEM": product,
        "REGS": tmem_reg_layout(gl.float32, (config.BN, PART), part, 4),
        "num_warps": 4,
    }
