"""Host side of the dense FP8 kernel: from a Plan and its operands to kernel calls.

With V of 16 bits a launch is what it is for bf16 (dense/launch.py); e4m3 values are transposed
first. Nothing here reads a device tensor.
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
    ragged_columns,
    rows_of_heads,
    shared_rows,
    tile_layout,
)
from openmla.kernels.hopper.dense.launch import WGMMA_ROWS, Fixed, fixed_of, launches, outputs
from openmla.kernels.hopper.dense_fp8.kernel import dense_fp8_kernel
from openmla.kernels.hopper.dense_fp8.transpose import transpose_kernel
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.planning.arithmetic import ceildiv
from openmla.planning.hopper import HopperDenseFp8Config

GROUP = 16  # keys, and bytes: see transpose.py
TRANSPOSED_BYTES = 4 * 32 * 32 * 4  # of a program of 4 warps: 32 keys and 4 bytes a thread
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
    copy = _room_for_columns(op) if config.v_bytes == 1 else None
    arguments = {
        **fixed.constexprs,
        **_fp8_constexprs(config),
        **_descriptors(fixed, config, op, copy),
        **outputs(op, results),
        **scale_arguments(op.weights.scale),
        "q_scale_ptr": vector(op.weights.q_scale),
        "k_scale_ptr": vector(op.weights.k_scale),
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": op.q.shape[1],
    }
    for call in launches(dense_fp8_kernel, plan, fixed, op, arguments):
        if call.kernel is dense_fp8_kernel and copy is not None:
            yield _transposed(op.v, copy, call)
        yield call


def _fp8_constexprs(config: HopperDenseFp8Config) -> dict[str, Any]:
    main, tail = config.nope_tiles
    rope, BN = config.d_rope or NARROWEST, config.BN
    narrow = (tile_layout(width, element=1) for width in (main, tail or NARROWEST, rope))
    values = tile_layout(BN, element=1) if config.v_bytes == 1 else tile_layout(config.d_v)
    return {
        "LAYOUTS": (*narrow, values, tile_layout(rope, element=config.rope_bytes)),
        "PART": config.part_columns,
    }


def _descriptors(
    fixed: Fixed, config: HopperDenseFp8Config, op: DenseOperands, copy: Tensor | None
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
        "v_desc": ragged(op.v, BN) if copy is None else ragged_columns(copy, BN),
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


def _room_for_columns(op: DenseOperands) -> Tensor:
    """[heads, d_v, columns], for the keys of every request from a multiple of 16 columns on."""
    keys, heads, d_v = op.v.shape
    columns = GROUP * (ceildiv(keys, GROUP) + op.cu_seqlens_k.shape[0] - 1)
    return torch.empty(heads, d_v, columns, dtype=op.v.dtype, device=op.v.device)


def _transposed(v: Tensor, copy: Tensor, launch: Call) -> Call:
    """The call that fills the columns of a launch's requests."""
    keys, heads, d_v = v.shape
    batch = launch.arguments["batch"]
    tiles = ceildiv(copy.shape[2], TRANSPOSED_BYTES // max(d_v, 128))
    return Call(
        transpose_kernel,
        tiles * heads,
        {
            "v_ptr": v.view(torch.uint8),
            "out_ptr": copy.view(torch.uint8),
            "cu_k_ptr": launch.arguments["cu_k_ptr"],
            "tokens": keys,
            "heads": heads,
            "batch": batch,
            "reach": (1 << (batch - 1).bit_length()) // 2 if batch > 1 else 0,
            "groups": copy.shape[2] // GROUP,
            "v_stride_t": v.stride(0) // GROUP,
            "v_stride_h": v.stride(1) // GROUP,
            "D_V": d_v,
            "num_warps": 4,
        },
    )
