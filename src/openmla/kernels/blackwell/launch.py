"""Host side of the dense Blackwell kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from openmla.kernels.blackwell.dense import dense_kernel
from openmla.kernels.call import Call, vector
from openmla.kernels.descriptors import pages, ragged, rows_of_heads, shared_rows, tile_layout
from openmla.operands import DenseOperands, Results
from openmla.plan import Plan
from openmla.plan.blackwell import MLAConfig
from openmla.problem import Problem

LOG2_E = math.log2(math.e)
VECTOR = 8  # elements in 16 bytes
WIDEST = 128  # columns of a tile of Q or K that is not rope
TMEM_ALLOCATIONS = (32, 64, 128, 256, 512)


def launch(plan: Plan, operands: DenseOperands, results: Results) -> None:
    """Fill every row of `results`."""
    if not operands.k_nope.shape[0]:
        results.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    if not results.out.numel():
        return
    # Triton launches on the current GPU, wherever the tensors are.
    here = torch.cuda.device(operands.q.device) if operands.q.is_cuda else nullcontext()
    with here:
        call_of(plan, operands, results).run()


def call_of(plan: Plan, op: DenseOperands, results: Results) -> Call:
    """What `launch` runs."""
    config: MLAConfig = plan.config
    total_q, heads, _ = op.q.shape
    batch = op.cu_seqlens_q.shape[0] - 1
    out, lse = results.out, results.lse
    arguments = {
        **constexprs_of(plan.problem, config),
        **_descriptors(config, op),
        **_scale(op.weights.scale),
        "out_ptr": out,
        "lse_ptr": lse,
        "sink_ptr": vector(op.weights.sink),
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "table_ptr": vector(op.block_table),
        "batch": batch,
        "total_q": total_q,
        "total_k": op.k_nope.shape[0],
        "heads": heads,
        "table_stride": 0 if op.block_table is None else op.block_table.shape[1],
        "out_stride_t": out.stride(0) // VECTOR,
        "out_stride_h": out.stride(1) // VECTOR,
        "lse_stride_t": 0 if lse is None else lse.stride(0),
        "lse_stride_h": 0 if lse is None else lse.stride(1),
    }
    blocks = (total_q // config.BM + batch + 1) * heads
    return Call(dense_kernel, blocks, arguments)


def parts_of(config: MLAConfig) -> tuple[int, int]:
    """Columns of the main and the tail tile of Q and K: tile widths are powers of two."""
    main = 1 << (config.nope_depth.bit_length() - 1)
    return main, config.nope_depth - main


@lru_cache(maxsize=4096)
def constexprs_of(problem: Problem, config: MLAConfig) -> dict[str, Any]:
    """What the kernel is compiled for."""
    main, tail = parts_of(config)
    size, rope_size = config.qkv_dtype_size, config.rope_mma_dtype_size
    row = config.nope_depth * size + config.rope_depth * rope_size
    ropes = config.num_rope_buffers() or config.num_kv_stages
    switches = config.num_qo == 2 and config.can_switch_to_1q()
    columns = (main, tail or 64, config.rope_depth, config.v_depth, max(main, config.v_depth))
    sizes = (size, size, rope_size, size, size)
    return {
        "QUERIES": 0 if switches else config.num_qo,
        "BN": config.BN,
        "RING": (config.use_fused_kv, config.num_kv_stages, ropes),
        "DIMS": (main, tail, config.rope_depth, config.v_depth),
        "ROPE": (problem.rope, config.page_size),
        "CAUSAL": problem.causal,
        "THRESHOLD": 2.0 if size == 1 else 8.0,
        "TMEM": (
            config.TMEM_S0, config.TMEM_S1, config.TMEM_O0, config.TMEM_O1, config.BN,
            config.v_depth,
        ),
        "TMEM_COLUMNS": next(n for n in TMEM_ALLOCATIONS if n >= config.tmem_used),
        "BYTES": (config.q_tile_rows() * row, config.BN * row),
        "REGISTERS": (184, 96, 48),
        "LAYOUTS": tuple(
            tile_layout(n, 2, e, 128 if e > 1 else 64) for n, e in zip(columns, sizes, strict=True)
        ),
        "num_warps": 4,
    }  # fmt: skip


def _descriptors(config: MLAConfig, op: DenseOperands) -> dict[str, Any]:
    main, tail = parts_of(config)
    rows, BN, rope = config.q_tile_rows(), config.BN, config.rope_depth
    found: dict[str, Any] = {
        "q_main_desc": rows_of_heads(op.q, rows, main),
        "q_tail_desc": rows_of_heads(op.q, rows, tail) if tail else None,
        "q_rope_desc": rows_of_heads(op.q, rows, rope),
        "k_main_desc": rows_of_heads(op.k_nope, BN, main),
        "k_tail_desc": rows_of_heads(op.k_nope, BN, tail) if tail else None,
        "v_desc": ragged(op.v, BN),
    }
    if op.rope_cache is not None:
        box = math.gcd(op.rope_cache.page_size, BN)
        found["k_rope_desc"] = pages(op.rope_cache.data[..., op.rope_cache.latent :], box)
    elif op.k_rope is not None and op.k_rope.dim() == 2:
        found["k_rope_desc"] = shared_rows(op.k_rope, BN)
    elif op.k_rope is not None:
        found["k_rope_desc"] = rows_of_heads(op.k_rope, BN, rope)
    return found


def _scale(scale: float) -> dict[str, Any]:
    """The kernel multiplies by a positive factor; a scale that vanishes in fp32 makes scores 0."""
    factor = abs(scale) * LOG2_E
    vanishes = factor < 2.0**-149
    return {
        "factor": 1.0 if vanishes else factor,
        "SIGN": 0 if vanishes else 1 if scale > 0 else -1,
    }
