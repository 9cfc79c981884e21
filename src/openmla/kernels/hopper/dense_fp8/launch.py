"""Host side of the dense FP8 kernel: from a Plan and its operands to kernel calls.

A launch is what it is for bf16 (dense/launch.py); e4m3 values are upcast first. Nothing here reads
a device tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.kernels.call import Call, scale_arguments, vector
from openmla.kernels.gluon.descriptors import (
    SWIZZLE_BYTES,
    pages,
    ragged,
    rows_of_heads,
    shared_rows,
    tile_layout,
)
from openmla.kernels.hopper.dense.launch import WGMMA_ROWS, Fixed, fixed_of, launches, outputs
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
    if not op.k_nope.shape[0]:
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
        **_descriptors(fixed, config, op, v),
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


def _descriptors(
    fixed: Fixed, config: HopperDenseFp8Config, op: DenseOperands, v: Tensor
) -> dict[str, Any]:
    main, tail, rope = fixed.parts
    BN = config.BN

    def columns(x: Tensor, rows: int, width: int) -> Any:
        return rows_of_heads(x, rows, width, SWIZZLE_BYTES) if width else None

    found: dict[str, Any] = {
        "q_main_desc": columns(op.q, WGMMA_ROWS, main),
        "q_tail_desc": columns(op.q, WGMMA_ROWS, tail),
        "q_rope_desc": columns(op.q, WGMMA_ROWS, rope),
        "k_main_desc": columns(op.k_nope, BN, main),
        "k_tail_desc": columns(op.k_nope, BN, tail),
        "k_rope_desc": None,
        "v_desc": ragged(v, BN),
        "table_ptr": None,
        "table_stride": 0,
    }
    if not rope:
        return found
    if op.rope_cache is not None and op.block_table is not None:
        cached = op.rope_cache.data[..., op.rope_cache.latent :]
        found["k_rope_desc"] = pages(cached, fixed.page_box)
        found |= {
            "table_ptr": vector(op.block_table),
            "table_stride": op.block_table.shape[1],
        }
    elif op.k_rope is not None and op.k_rope.dim() == 2:
        found["k_rope_desc"] = shared_rows(op.k_rope, BN, SWIZZLE_BYTES)
    elif op.k_rope is not None:
        found["k_rope_desc"] = columns(op.k_rope, BN, rope)
    return found


def _upcast(v: Tensor, copy: Tensor) -> Call:
    tokens, heads, d_v = v.shape
    arguments = {
        "v_ptr": v, "out_ptr": copy, "rows": tokens * heads, "heads": heads, "D_V": d_v,
        "v_stride_t": v.stride(0) // VECTOR.value, "v_stride_h": v.stride(1) // VECTOR.value,
        "num_warps": 4,
    }  # fmt: skip
    return Call(upcast_kernel, ceildiv(tokens * heads, ROWS.value), arguments)
