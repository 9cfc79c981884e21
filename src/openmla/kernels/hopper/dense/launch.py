"""Host side of the dense Hopper kernel: from a Plan and its operands to kernel calls.

`calls` lists what a launch runs, as data: the plan's variant says which kernels, `numbers` what
token counts decide of them. Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.kernels.call import (
    COUNTER,
    WORKSPACE,
    Call,
    Extent,
    LaunchNumbers,
    Sources,
    launch_counter,
    scale_arguments,
    strides,
    vector,
)
from openmla.kernels.gluon.descriptors import (
    SWIZZLE_BYTES,
    pages,
    ragged,
    rows_of_heads,
    shared_rows,
    tile_layout,
    words,
)
from openmla.kernels.hopper.dense.kernel import dense_kernel
from openmla.kernels.hopper.dense.merge import merge_kernel
from openmla.kernels.hopper.dense.one_block import one_block_kernel
from openmla.kernels.hopper.dense.plan import PARTIAL_STATE, HopperDenseConfig, SplitSpace
from openmla.kernels.hopper.dense.records import Columns, Registers, Rope, TileLayouts
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.problem import Problem

WGMMA_ROWS = 64
MERGE_ROWS = 16
VECTOR = 8  # elements in 16 bytes
SOURCES: Sources = {
    **dict.fromkeys(("q_main_desc", "q_tail_desc", "q_rope_desc"), "q"),
    **dict.fromkeys(("k_main_desc", "k_tail_desc"), "k_nope"),
    "k_rope_desc": ("k_rope", "cache_data"),
    "v_desc": "v",
    "out_ptr": "out",
    "lse_ptr": "lse",
    "q_scale_ptr": "q_scale",
    "k_scale_ptr": "k_scale",
    "sink_ptr": "sink",
    "cu_q_ptr": "cu_seqlens_q",
    "cu_k_ptr": "cu_seqlens_k",
    "starts_ptr": "k_start",
    "table_ptr": "block_table",
    "counter_ptr": COUNTER,
    "part_sums_ptr": WORKSPACE,
    "part_state_ptr": WORKSPACE,
}


class Fixed(NamedTuple):
    """What follows from a Problem without its token counts."""

    constexprs: dict[str, Any]
    columns: Columns
    page_box: int
    """Rows of a page copied at once."""


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # no query sees a key, and a descriptor cannot describe an empty tensor
        return
    fixed = fixed_of(plan.problem, plan.config)
    arguments = {
        **fixed.constexprs,
        **descriptors(fixed, plan.config.BN, op, op.v),
        **outputs(op, results),
        **scale_arguments(op.weights.scale),
        "heads": op.q.shape[1],
        "mask_desc": None if op.key_mask is None else words(op.key_mask, WGMMA_ROWS),
        "window": op.window or None,
    }
    if plan.variant.one_block:
        arguments |= _requests(op, arguments["table_ptr"], plan.problem, 0, 1)
        here = {n: arguments[n] for n in (*one_block_kernel.arg_names, "num_warps")}
        yield Call(one_block_kernel, one_block_programs(plan.problem), here, SOURCES)
    else:
        yield from launches(dense_kernel, plan, op, arguments)


def launches(
    kernel: Any, plan: Plan, op: DenseOperands, arguments: dict[str, Any]
) -> Iterator[Call]:
    """One launch of a kernel, or one per group of requests that may be split, with its merge."""
    config, problem, space = plan.config, plan.problem, plan.variant.split
    parts: dict[str, Any] = {"part_sums_ptr": None, "part_state_ptr": None, "SPLIT": 0}
    if space is not None:
        sums, state = partial_results(space, config.d_v, op.q.device)
        least = config.split.min_keys
        parts = {"part_sums_ptr": sums, "part_state_ptr": state, "SPLIT": least}
    for first, stop in groups(problem, space):
        here = arguments | parts | _requests(op, arguments["table_ptr"], problem, first, stop)
        here |= {"counter_ptr": launch_counter(op.q.device)}
        yield Call(kernel, programs_of(config, problem, stop - first, space), here, SOURCES)
        if space is not None:
            shared = {name: here[name] for name in _MERGED}
            shared["window"] = op.window or None
            rest = {"D_V": config.d_v, "BLOCK_ROWS": MERGE_ROWS, "num_warps": 4}
            yield Call(merge_kernel, merge_programs(config, space), shared | rest, SOURCES)


def numbers(plan: Plan, problem: Problem) -> list[LaunchNumbers] | None:
    """What a problem's token counts decide of the launches of a plan; None for several groups of
    requests, which are planned anew."""
    config, variant, space = plan.config, plan.variant, plan.variant.split
    if space is not None and not space.is_one_launch:
        return None
    arguments: dict[str, int | Extent] = {
        **request_counts(problem, 0, problem.batch),
        **dict.fromkeys(("q_main_desc", "q_tail_desc", "q_rope_desc"), Extent(0, problem.total_q)),
        **dict.fromkeys(("k_main_desc", "k_tail_desc"), Extent(0, problem.total_k)),
    }
    if problem.rope in ("shared", "per_head"):
        arguments["k_rope_desc"] = Extent(0, problem.total_k)
    if variant.one_block:
        return [LaunchNumbers(one_block_programs(problem), arguments)]
    found = [LaunchNumbers(programs_of(config, problem, problem.batch, space), arguments)]
    if space is not None:
        found.append(LaunchNumbers(merge_programs(config, space), arguments))
    return found


def one_block_programs(problem: Problem) -> int:
    """One for each 64 rows of a head."""
    return -(-problem.total_q // WGMMA_ROWS) * problem.heads


@lru_cache(maxsize=4096)
def fixed_of(problem: Problem, config: HopperDenseConfig) -> Fixed:
    """Worked out once per Problem."""
    main, tail = config.nope_tiles
    columns = Columns(main=main, tail=tail, rope=config.d_rope, v=config.d_v)
    paged = problem.rope == "cache" and config.d_rope > 0
    constexprs = {
        "NC": config.num_qo,
        "BN": config.BN,
        "ST": config.num_kv_stages,
        "DIMS": columns,
        "CAUSAL": problem.causal,
        "ROPE": Rope(problem.rope, config.page_size if paged else 0),
        "GROUP_KEYS": config.group_keys,
        "SM_COUNT": config.sm_count,
        "REGISTERS": Registers(config.registers.consumer, config.registers.producer),
        "LAYOUTS": tile_layouts(columns, element=2, rope_element=2),
        "num_warps": 4,
    }
    return Fixed(constexprs, columns, config.page_box)


def tile_layouts(columns: Columns, element: int, rope_element: int) -> TileLayouts:
    """Layouts of tiles of Q and K, in elements of so many bytes, of K's rope, and of 16-bit V."""

    def layout(width: int, element: int) -> Any:
        return tile_layout(width, element=element) if width else None

    return TileLayouts(
        main=layout(columns.main, element),
        tail=layout(columns.tail, element),
        rope=layout(columns.rope, element),
        v=layout(columns.v, 2),
        k_rope=layout(columns.rope, rope_element),
    )


def descriptors(fixed: Fixed, BN: int, op: DenseOperands, v: Tensor) -> dict[str, Any]:
    """TMA descriptors of Q, K and rope (128-byte swizzle) and of V, and the block table."""
    main, tail, rope, _v = fixed.columns

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
    if rope and op.rope_cache is not None and op.block_table is not None:
        cached = op.rope_cache.data[..., op.rope_cache.latent :]
        found["k_rope_desc"] = pages(cached, fixed.page_box)
        found |= {"table_ptr": vector(op.block_table), "table_stride": op.block_table.shape[1]}
    elif rope and op.k_rope is not None:
        shared = op.k_rope.dim() == 2
        found["k_rope_desc"] = (
            shared_rows(op.k_rope, BN, SWIZZLE_BYTES) if shared else columns(op.k_rope, BN, rope)
        )
    return found


def outputs(op: DenseOperands, results: Results) -> dict[str, Any]:
    """Arguments of the epilogue."""
    out, lse = results.out, results.lse
    vectors = {"out_ptr": out, "lse_ptr": lse, "sink_ptr": vector(op.weights.sink)}
    return {**vectors, **strides("out", out, VECTOR), **strides("lse", lse)}


def groups(problem: Problem, space: SplitSpace | None) -> Iterator[tuple[int, int]]:
    """Requests first … stop - 1 of each launch; one launch where there are none."""
    step = problem.batch if space is None or space.is_one_launch else space.group
    for first in range(0, max(problem.batch, 1), max(step, 1)):
        yield first, min(first + step, problem.batch)


def request_counts(problem: Problem, first: int, stop: int) -> dict[str, int]:
    """Integers of requests first … stop - 1; the last also own the rows after them."""
    return {
        "batch": stop - first,
        "total_q": problem.total_q,
        "rest_q": problem.total_q if stop == problem.batch else 0,
        "total_k": problem.total_k,
    }


def _requests(
    op: DenseOperands, table: Tensor | None, problem: Problem, first: int, stop: int
) -> dict[str, Any]:
    """Arguments of requests first … stop - 1."""
    requests = slice(first, stop + 1)
    starts = vector(op.k_start)
    return {
        "cu_q_ptr": vector(op.cu_seqlens_q)[requests],  # type: ignore[index]
        "cu_k_ptr": vector(op.cu_seqlens_k)[requests],  # type: ignore[index]
        "starts_ptr": None if starts is None else starts[first:stop],
        "table_ptr": None if table is None else table[first:],
        **request_counts(problem, first, stop),
    }


def programs_of(
    config: HopperDenseConfig, problem: Problem, requests: int, space: SplitSpace | None
) -> int:
    """One per SM, or one per tile if those are fewer; splits make any number of work items."""
    tiles = (problem.total_q // config.BM + requests + 1) * config.heads
    return config.sm_count if space is not None else min(tiles, config.sm_count)


def merge_programs(config: HopperDenseConfig, space: SplitSpace) -> int:
    """Enough for the tiles of all requests of a launch that can be split."""
    tiles = min(space.requests, space.group) * (config.sm_count // 2)
    return tiles * (config.BM // MERGE_ROWS)


def partial_results(space: SplitSpace, d_v: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sums [rows, d_v], and behind them row_max and row_sum of each row."""
    memory = torch.empty(space.rows * (d_v + PARTIAL_STATE), dtype=torch.float32, device=device)
    return memory, memory[space.rows * d_v :]


_MERGED = (
    "part_sums_ptr",
    "part_state_ptr",
    "out_ptr",
    "lse_ptr",
    "sink_ptr",
    "cu_q_ptr",
    "cu_k_ptr",
    "starts_ptr",
    "batch",
    "total_q",
    "total_k",
    "heads",
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
    "NC",
    "GROUP_KEYS",
    "SPLIT",
    "SM_COUNT",
)
