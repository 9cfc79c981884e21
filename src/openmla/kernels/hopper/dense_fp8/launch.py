"""Host side of the dense FP8 kernel: from a Plan and its operands to kernel calls.

A launch is what it is for bf16 (dense/launch.py); e4m3 values are upcast first. Nothing here reads
a device tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from openmla.kernels.call import COPY, Call, Counted, Sources, scale_arguments, strides, vector
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.dense.launch import counted as dense_counted
from openmla.kernels.hopper.dense.launch import descriptors, fixed_of, launches, outputs
from openmla.kernels.hopper.dense_fp8.kernel import dense_fp8_kernel
from openmla.kernels.hopper.dense_fp8.upcast import ROWS, VECTOR, upcast_kernel
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.planning.arithmetic import ceildiv
from openmla.planning.hopper import HopperDenseFp8Config

NARROWEST = 32  # columns of the tile that stands for one that is not there


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    config: HopperDenseFp8Config = plan.config
    fixed = fixed_of(plan.problem, config)
    v = op.v
    if config.v_bytes == 1:
        v = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)
        yield _upcast(op.v, v)
    arguments = {
        **fixed.constexprs,
        **_fp8_constexprs(config),
        **descriptors(fixed, config.BN, op, v),
        **outputs(op, results),
        **scale_arguments(op.weights.scale),
        "q_scale_ptr": vector(op.weights.q_scale),
        "k_scale_ptr": vector(op.weights.k_scale),
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": op.q.shape[1],
    }
    yield from launches(dense_fp8_kernel, plan, fixed, op, arguments)


def _fp8_constexprs(config: HopperDenseFp8Config) -> dict[str, Any]:
    main, tail = config.nope_tiles
    rope = config.d_rope or NARROWEST
    narrow = (tile_layout(width, element=1) for width in (main, tail or NARROWEST, rope))
    wide = (tile_layout(config.d_v), tile_layout(rope, element=config.rope_bytes))
    return {"LAYOUTS": (*narrow, *wide)}


def _upcast(v: Tensor, copy: Tensor) -> Call:
    tokens, heads, d_v = v.shape
    arguments = {
        "v_ptr": v, "out_ptr": copy, "rows": tokens * heads, "heads": heads, "D_V": d_v,
        **strides("v", v, VECTOR.value), "num_warps": 4,
    }  # fmt: skip
    sources: Sources = {"v_ptr": "v", "out_ptr": COPY}
    return Call(upcast_kernel, upcast_programs(tokens * heads), arguments, sources)


def upcast_programs(rows: int) -> int:
    """One for each 64 rows of all tokens and heads."""
    return ceildiv(rows, ROWS.value)


def counted(plan: Plan, args: Mapping[str, Any]) -> tuple[object, Counted] | None:
    """What follows from token counts, for openmla.cached: as for bf16, and of the copy of V."""
    found = dense_counted(plan, args)
    if found is None or plan.config.v_bytes != 1:
        return found
    tokens, heads, d_v = args["v"].shape
    rows = tokens * heads
    upcast = {"rows": rows, COPY: rows * d_v * torch.bfloat16.itemsize}
    return found[0], [(upcast_programs(rows), upcast), *found[1]]
