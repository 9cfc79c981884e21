"""Host side of the dense Blackwell kernel: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl

from openmla.cache import LatentCache
from openmla.kernels.blackwell.dense.kernel import dense_kernel
from openmla.kernels.blackwell.dense.plan import Q_ROWS, RESCALE_AT, DenseConfig
from openmla.kernels.blackwell.dense.records import (
    Columns,
    RawRope,
    Registers,
    Ring,
    Rope,
    RopeScales,
    TileBytes,
    TileLayouts,
    TmemMap,
)
from openmla.kernels.blackwell.dense.resources import DenseKernel
from openmla.kernels.call import Call, scale_arguments, strides, vector
from openmla.kernels.gluon.descriptors import (
    pages,
    ragged,
    rows_of_heads,
    shared_rows,
    tile_layout,
)
from openmla.kernels.gluon.upcast.launch import room_for, upcast
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.problem import Problem

VECTOR_BYTES = 16  # which the strides of out come in units of
_DTYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16, "float8_e4m3fn": gl.float8e4nv}


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """The kernel calls of a launch; none for an empty output."""
    if not op.has_keys:
        results.clear()  # there are no keys, and a descriptor cannot describe an empty tensor
        return
    if not results.out.numel():
        return
    config = plan.config
    if DenseKernel(config, plan.problem).upcasts:
        v = room_for(op.v)
        yield upcast(op.v, v)
        op = replace(op, v=v)
    total_q, heads, _ = op.q.shape
    batch = op.cu_seqlens_q.shape[0] - 1
    arguments = {
        **constexprs_of(plan.problem, plan.config),
        **_descriptors(config, op),
        "out_ptr": results.out,
        **strides("out", results.out, VECTOR_BYTES // results.out.element_size()),
        "lse_ptr": results.lse,
        **strides("lse", results.lse),
        "sink_ptr": vector(op.weights.sink),
        "q_scale_ptr": vector(op.weights.q_scale),
        **scale_arguments(op.weights.scale),
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "starts_ptr": vector(op.k_start),
        "mask_ptr": op.key_mask,
        "mask_stride": 0 if op.key_mask is None else op.key_mask.stride(0),
        "mask_words": 0 if op.key_mask is None else op.key_mask.shape[1],
        # No window is wider than all keys.
        "window": min(op.window, op.k_nope.shape[0]) or None,
        "table_ptr": vector(op.block_table),
        "table_stride": 0 if op.block_table is None else op.block_table.shape[1],
        "batch": batch,
        "total_q": total_q,
        "total_k": op.k_nope.shape[0],
        "heads": heads,
    }
    rows = config.BM * (2 if config.pair_cta else 1)
    blocks = (total_q // rows + batch + 1) * heads
    yield Call(dense_kernel, blocks, arguments)


@lru_cache(maxsize=4096)
def constexprs_of(problem: Problem, config: DenseConfig) -> dict[str, Any]:
    """The constants that the kernel is compiled for."""
    kernel = DenseKernel(config, problem)
    rope = kernel.rope
    main, tail = kernel.parts
    size, rope_size = config.qkv_dtype_size, config.rope_dtype_size or config.qkv_dtype_size
    q_raw, k_raw = kernel.q_raw, kernel.k_raw
    rope_bytes = rope * rope_size
    row = config.nope_depth * size
    pair = config.pair_cta
    return {
        "QUERIES": kernel.queries,
        "GROUPS": 1 if config.single_o else 2,
        "KEY_GROUP": problem.group,
        "BN": config.BN,
        "RING": Ring(
            is_fused=config.use_fused_kv,
            stages=config.num_kv_stages,
            rope_buffers=kernel.ropes,
        ),
        "DIMS": Columns(main=main, tail=tail, rope=rope, v=config.ov_depth),
        "ROPE": Rope(source=problem.rope, page_size=config.page_size),
        "ROPE_DTYPE": _DTYPES[config.rope_dtype or config.qkv_dtype],
        "RAW": RawRope(
            q=q_raw, k=k_raw, layout=tile_layout(rope, 2, 1, 64) if q_raw or k_raw else None
        ),
        "CAUSAL": problem.causal,
        "THRESHOLD": RESCALE_AT,
        "TMEM": TmemMap(
            scores=(config.TMEM_S0, config.TMEM_S1),
            outputs=(config.TMEM_O0, config.TMEM_O1),
            keys=config.BN,
            d_v=config.ov_depth,
            ctas=kernel.ctas,
        ),
        "TMEM_COLUMNS": kernel.tmem_columns,
        "BYTES": TileBytes(
            q=Q_ROWS * (row + (0 if q_raw else rope_bytes)),
            k=config.BN * (row + (0 if k_raw else rope_bytes)) // kernel.ctas,
            v=config.BN * config.ov_depth * config.pv_dtype_size // kernel.ctas,
        ),
        "REGISTERS": Registers(*kernel.registers),
        # A pair divides the rows of Q and the keys of K, and the columns of V.
        "LAYOUTS": TileLayouts(
            main=_tile(main, size, pair),
            tail=_tile(tail, size, pair),
            rope=_tile(rope, rope_size, pair),
            v=_tile(config.ov_depth, config.pv_dtype_size, pair, divided_axis=1),
            fused=_tile(max(main, config.ov_depth), size, pair),
        ),
        "num_warps": 4,
        "num_ctas": kernel.ctas,
    }


def _tile(columns: int, element: int, pair: bool, divided_axis: int = 0) -> Any:
    """Shared memory layout of a tile, in a pair divided along an axis; None without columns."""
    if not columns:
        return None
    layout = tile_layout(columns, 2, element, 128 if element > 1 else 64)
    return halved(layout, divided_axis) if pair else layout


def rope_scales(cache: LatentCache | None) -> RopeScales:
    """The scales that the rope columns of a cache row need.

    512 + 64 columns, a scale per 32: (2, 32, 32). A scale per 128: (1, 128, 128), since the last
    64 columns are one block, if half a one.
    """
    if cache is None or cache.scales is None:
        return RopeScales(number=0, second_column=0, columns=0)
    width = cache.layout.block
    first = cache.latent // width
    return RopeScales(
        number=cache.scales.shape[2] - first,
        second_column=(first + 1) * width - cache.latent,
        columns=width,
    )


def _descriptors(config: DenseConfig, op: DenseOperands) -> dict[str, Any]:
    main, tail = config.parts
    rows, BN, rope = Q_ROWS * (2 if config.pair_cta else 1), config.BN, config.rope_depth
    found: dict[str, Any] = {
        "q_main_desc": rows_of_heads(op.q, rows, main),
        "q_tail_desc": rows_of_heads(op.q, rows, tail) if tail else None,
        "q_rope_desc": rows_of_heads(op.q, rows, rope) if rope else None,
        "k_rope_desc": None,
        "k_main_desc": rows_of_heads(op.k_nope, BN, main),
        "k_tail_desc": rows_of_heads(op.k_nope, BN, tail) if tail else None,
        "v_desc": ragged(op.v, BN),
        "k_scale_ptr": vector(op.weights.k_scale),
        "ROPE_SCALES": rope_scales(op.rope_cache),
        "rope_scales_ptr": None,
        "scales_stride_p": 0,
        "scales_stride_r": 0,
        "last_page": 0,
    }
    cache = op.rope_cache
    if cache is not None:
        box = math.gcd(cache.page_size, BN)
        found["k_rope_desc"] = pages(rope_rows(cache), box, rope)
        if cache.scales is not None:
            first = cache.latent // cache.layout.block
            found |= {
                "rope_scales_ptr": cache.scales[..., first:],
                "last_page": cache.num_pages - 1,
            }
            found["scales_stride_p"], found["scales_stride_r"], _ = cache.scales.stride()
    elif op.k_rope is not None and op.k_rope.dim() == 2:
        found["k_rope_desc"] = shared_rows(op.k_rope, BN, columns=rope)
    elif op.k_rope is not None:
        found["k_rope_desc"] = rows_of_heads(op.k_rope, BN, rope)
    if config.pair_cta:
        boxes = {name: box for name, box in found.items() if name.endswith("desc") and box}
        found |= {name: _divided(box, 4 if name == "v_desc" else 0) for name, box in boxes.items()}
    return found


def halved(layout: Any, axis: int) -> Any:
    """The layout of a tile of which each CTA of a pair holds half, along `axis`."""
    return replace(layout, cga_layout=[[int(i == axis) for i in range(layout.rank)]])


def _divided(box: Any, axis: int) -> Any:
    """A descriptor whose boxes fill tiles that `halved` divides among the CTAs of a pair."""
    return replace(box, layout=halved(box.layout, axis))


def rope_rows(cache: LatentCache) -> Tensor:
    """The rope columns of a cache as they are stored, [pages, page_size, rope]."""
    plain = cache.field("bf16")
    return (cache.data if plain is None else plain)[..., -cache.rope :]
