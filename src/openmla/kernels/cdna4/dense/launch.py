"""Host side of the CDNA4 kernels: from a Plan and its operands to kernel calls.

`calls` lists what a launch runs, as data. Nothing here reads a device tensor, so nothing waits for
the GPU. The layouts are worked out once per config.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl

from openmla.errors import Unsupported
from openmla.kernels.call import Call, scale_arguments, strides, vector
from openmla.kernels.cdna4.dense.kernel import dense_kernel
from openmla.kernels.cdna4.dense.plan import DenseBlock as DensePlan
from openmla.kernels.cdna4.dense.records import DenseBlock, DenseLayouts, HeadGroups
from openmla.kernels.cdna4.layouts import k_layouts, matrix_layouts, q_layouts, v_layouts
from openmla.kernels.gluon.compat import amd_function_attributes
from openmla.modular.cdna4.layout.k import K_SUB_ROWS
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan

PIECE_BYTES = 16
#: Offsets inside a tile are 32-bit byte offsets from its first row.
OFFSET_LIMIT = 2**31
#: All 256 registers of a lane as ordinary ones. Left alone, the compiler sets half aside for
#: accumulators, and softmax, which cannot work on those, spills. Triton 3.6 has no such option;
#: it does not compile these kernels either (see openmla.dispatch), but the simulator runs them.
COMPILER_OPTIONS = amd_function_attributes("amdgpu-agpr-alloc=0")
_TYPES = {"float8_e4m3fn": gl.float8e4nv, "bfloat16": gl.bfloat16, "float16": gl.float16}


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """The kernel calls of a plan; none for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # no query sees a key, and an empty tensor has no address to copy from
        return
    block = plan.config
    heads = op.q.shape[1]
    batch = op.cu_seqlens_q.shape[0] - 1
    tiles = op.q.shape[0] // block.BM + batch + 1
    arguments = {
        **dense_constexprs(block),
        "CAUSAL": op.causal,
        "q_ptr": op.q,
        **piece_strides("q", op.q, block.BM),
        "k_ptr": op.k_nope,
        **piece_strides("k", op.k_nope, block.KV_BLOCK),
        "v_ptr": op.v,
        **piece_strides("v", op.v, block.KV_BLOCK),
        **_rope(op, block.KV_BLOCK),
        **outputs(results),
        **scale_arguments(op.weights.scale),
        "sink_ptr": vector(op.weights.sink),
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "starts_ptr": vector(op.k_start),
        "q_scale_ptr": vector(op.weights.q_scale),
        "k_scale_ptr": vector(op.weights.k_scale),
        "mask_ptr": op.key_mask,
        "mask_stride": 0 if op.key_mask is None else op.key_mask.stride(0),
        "words": 0 if op.key_mask is None else op.key_mask.shape[1],
        "window": op.window or None,
        "batch": batch,
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": heads,
        "tiles": tiles,
    }
    rope_heads = 1 if op.k_rope is None or op.k_rope.dim() == 2 else op.k_rope.shape[1]
    arguments["GROUPS"] = HeadGroups(kv=heads // op.k_nope.shape[1], rope=heads // rope_heads)
    yield Call(dense_kernel, tiles * heads, arguments)


@lru_cache(maxsize=256)
def dense_constexprs(block: DensePlan) -> dict[str, Any]:
    """Constants and launch options that follow from the config alone."""
    size = block.config.element_bytes
    pv_depth = 64 if block.p_dtype == "float8_e4m3fn" else 16
    matrices = matrix_layouts(
        block.NUM_WARPS, block.across, block.mma.MMA_K, pv_depth, block.mma.ROWL_STRIDE
    )
    strip = K_SUB_ROWS * block.across
    parts = [*block.k_widths, *([block.D_ROPE] if block.D_ROPE else [])]
    k = tuple(k_layouts(block.KV_BLOCK, width, size, block.NUM_WARPS, strip) for width in parts)
    q = q_layouts(block.BM, block.NUM_WARPS) if block.q_bytes else None
    v = v_layouts(block.v_slot, block.v_slot.element_bytes)
    [part_width] = set(block.k_widths)
    return {
        "BLOCK": DenseBlock(
            queries=block.BM,
            keys=block.KV_BLOCK,
            part_width=part_width,
            nope_parts=len(block.k_widths),
            d_rope=block.D_ROPE,
            d_v=block.DEPTH,
            k_slots=block.k_slots,
            v_slots=block.v_slots,
            frag_columns=block.frag_columns,
            across=block.across,
            q_frags=block.D_QK // block.frag_columns,
        ),
        "P_DTYPE": _TYPES[block.p_dtype],
        "Q_IN_LDS": bool(block.q_bytes),
        "LAYOUTS": DenseLayouts(matrices=matrices, q=q, k=k, v=v),
        "num_warps": block.NUM_WARPS,
        **COMPILER_OPTIONS,
    }


def piece_strides(name: str, x: Tensor, rows: int = 0) -> dict[str, int]:
    """Token and head strides in pieces of 16 bytes; tiles of so many rows are copied to LDS."""
    piece = PIECE_BYTES // x.element_size()
    if rows * x.stride(0) * x.element_size() >= OFFSET_LIMIT:
        raise Unsupported(
            f"{name}: {rows} rows of stride {x.stride(0)} span 2 GiB or more, which the copies of "
            "one tile cannot address",
            nearest="a tensor whose rows lie closer together, or backend='portable'",
        )
    return strides(name, x, piece)


def _rope(op: DenseOperands, keys: int) -> dict[str, Any]:
    """Where rope comes from: the rope columns of a paged cache, or a tensor (shared or not)."""
    found: dict[str, Any] = {
        "table_ptr": None,
        "table_stride": 0,
        "last_page": 0,
        "rope_stride_h": 0,
        "rope_stride_page": 0,
        "ROPE_AT": 0,
        "PAGE": 0,
    }
    if op.rope_cache is not None and op.block_table is not None:
        data = op.rope_cache.data
        piece = PIECE_BYTES // data.element_size()
        return found | {
            "rope_ptr": data,
            "rope_stride_page": data.stride(0) // piece,
            "rope_stride_t": data.stride(1) // piece,
            "table_ptr": vector(op.block_table),
            "table_stride": op.block_table.shape[1],
            "last_page": op.rope_cache.num_pages - 1,
            "ROPE_AT": op.rope_cache.latent,
            "PAGE": op.rope_cache.page_size,
        }
    if op.k_rope is None:
        return found | {"rope_ptr": op.k_nope, "rope_stride_t": 0}
    rope = op.k_rope if op.k_rope.dim() == 3 else op.k_rope[:, None]
    return found | {"rope_ptr": rope} | piece_strides("rope", rope, keys)


def outputs(results: Results) -> dict[str, Any]:
    """Where rows and their lse go."""
    out, lse = results.out, results.lse
    return {"out_ptr": out, "lse_ptr": lse, **piece_strides("out", out), **strides("lse", lse)}
