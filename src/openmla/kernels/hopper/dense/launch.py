"""Host side of the dense Hopper kernel: from a Plan and its operands to kernel calls.

`calls` lists what a launch runs, as data. Nothing here reads a device tensor, so nothing waits for
the GPU. The rest is worked out once per Problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.kernels.call import (
    COUNTER,
    WORKSPACE,
    Call,
    Counted,
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
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.planning.hopper import HopperDenseConfig
from openmla.planning.split import WORKSPACE_CAP
from openmla.problem import Problem

WGMMA_ROWS = 64
MERGE_ROWS = 16
VECTOR = 8  # elements in 16 bytes
SOURCES: Sources = {
    **dict.fromkeys(("q_main_desc", "q_tail_desc", "q_rope_desc"), "q"),
    **dict.fromkeys(("k_main_desc", "k_tail_desc"), "k_nope"),
    "k_rope_desc": ("k_rope", "cache_data"), "v_desc": "v", "out_ptr": "out", "lse_ptr": "lse",
    "q_scale_ptr": "q_scale", "k_scale_ptr": "k_scale", "sink_ptr": "sink",
    "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k", "starts_ptr": "k_start",
    "table_ptr": "block_table", "counter_ptr": COUNTER,
    "part_sums_ptr": WORKSPACE, "part_state_ptr": WORKSPACE,
}  # fmt: skip


class Fixed(NamedTuple):
    """What follows from a Problem without its token counts."""

    constexprs: dict[str, Any]
    parts: tuple[int, int, int]
    """Columns of the main, tail and rope tiles of Q and K."""
    page_box: int
    """Rows of a page copied at once."""
    min_keys: int
    """Fewest keys of a range; 0 where no request can be split."""
    longest_chunk: int
    """Most queries of a request that can be split."""
    slots: int
    """Workspace slots (64 rows of partial sums) a split request may need."""


class SplitSpace(NamedTuple):
    """Room for the partial sums of split requests."""

    requests: int
    """Most requests of the call that can be split."""
    group: int
    """Most of them in one launch."""
    rows: int
    d_v: int

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sums [rows, d_v], and behind them row_max and row_sum of each row."""
        space = torch.empty(self.rows * (self.d_v + 2), dtype=torch.float32, device=device)
        return space, space[self.rows * self.d_v :]


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    fixed = fixed_of(plan.problem, plan.config)
    arguments = {
        **fixed.constexprs, **descriptors(fixed, plan.config.BN, op, op.v),
        **outputs(op, results), **scale_arguments(op.weights.scale), "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0], "heads": op.q.shape[1],
        "mask_desc": None if op.key_mask is None else words(op.key_mask, WGMMA_ROWS),
    }  # fmt: skip
    if plan.config.one_block(op.cu_seqlens_q.shape[0] - 1, op.k_nope.shape[0]):
        arguments |= _requests(op, arguments["table_ptr"], 0, 1)
        here = {n: arguments[n] for n in (*one_block_kernel.arg_names, "num_warps")}
        yield Call(one_block_kernel, one_block_programs(plan.config, op.q.shape[0]), here, SOURCES)
        return
    yield from launches(dense_kernel, plan, fixed, op, arguments)


def one_block_programs(config: HopperDenseConfig, total_q: int) -> int:
    """One for each 64 rows of a head."""
    return -(-total_q // WGMMA_ROWS) * config.heads


def launches(
    kernel: Any, plan: Plan, fixed: Fixed, op: DenseOperands, arguments: dict[str, Any]
) -> Iterator[Call]:
    """One launch of a kernel, or one per group of requests that may be split, with its merge."""
    space = split_space(fixed, plan.config, vars(op))
    if space is not None:
        yield from _in_groups(kernel, plan, fixed, space, op, arguments)
    else:
        first = {"part_sums_ptr": None, "part_state_ptr": None, "SPLIT": 0}
        batch = op.cu_seqlens_q.shape[0] - 1
        yield _group(kernel, plan, op, {**arguments, **first}, 0, batch)


@lru_cache(maxsize=4096)
def fixed_of(problem: Problem, config: HopperDenseConfig) -> Fixed:
    """Worked out once per Problem."""
    main, tail = config.nope_tiles
    parts = (main, tail, config.d_rope)
    rule = config.split
    paged = problem.rope == "cache" and config.d_rope > 0
    widths = (main, tail or 16, config.d_rope or 16, config.d_v)
    constexprs = {
        "NC": config.num_qo, "BN": config.BN, "ST": config.num_kv_stages,
        "DIMS": (*parts, config.d_v), "CAUSAL": problem.causal,
        "ROPE": (problem.rope, config.page_size if paged else 0),
        "HG": config.heads_per_l2_group, "SM_COUNT": config.sm_count,
        "REGISTERS": (config.registers.consumer, config.registers.producer),
        "LAYOUTS": tuple(tile_layout(width) for width in widths), "num_warps": 4,
    }  # fmt: skip
    chunk, slots = rule.longest_split_chunk, 2 * config.sm_count * config.num_qo
    return Fixed(constexprs, parts, config.page_box, rule.min_keys if chunk else 0, chunk, slots)


def descriptors(fixed: Fixed, BN: int, op: DenseOperands, v: Tensor) -> dict[str, Any]:
    """Of Q, K and rope in swizzled rows of 128 bytes, whatever their type; of V as `v` is."""
    main, tail, rope = fixed.parts

    def columns(x: Tensor, rows: int, width: int) -> Any:
        return rows_of_heads(x, rows, width, SWIZZLE_BYTES) if width else None

    found: dict[str, Any] = {
        "q_main_desc": columns(op.q, WGMMA_ROWS, main),
        "q_tail_desc": columns(op.q, WGMMA_ROWS, tail),
        "q_rope_desc": columns(op.q, WGMMA_ROWS, rope),
        "k_main_desc": columns(op.k_nope, BN, main),
        "k_tail_desc": columns(op.k_nope, BN, tail),
        "k_rope_desc": None, "v_desc": ragged(v, BN), "table_ptr": None, "table_stride": 0,
    }  # fmt: skip
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


def _group(
    kernel: Any, plan: Plan, op: DenseOperands, arguments: dict[str, Any], first: int, stop: int
) -> Call:
    """Requests first … stop - 1 in one launch."""
    here = _requests(op, arguments["table_ptr"], first, stop)
    here |= {"counter_ptr": launch_counter(op.q.device)}
    programs = programs_of(plan.config, op.q.shape[0], stop - first, bool(arguments["SPLIT"]))
    return Call(kernel, programs, arguments | here, SOURCES)


def _requests(op: DenseOperands, table: Tensor | None, first: int, stop: int) -> dict[str, Any]:
    """Arguments of requests first … stop - 1; the last also own the rows after them."""
    requests, batch = slice(first, stop + 1), op.cu_seqlens_q.shape[0] - 1
    starts = vector(op.k_start)
    return {
        "cu_q_ptr": vector(op.cu_seqlens_q)[requests],  # type: ignore[index]
        "cu_k_ptr": vector(op.cu_seqlens_k)[requests],  # type: ignore[index]
        "starts_ptr": None if starts is None else starts[first:stop],
        "table_ptr": None if table is None else table[first:],
        "batch": stop - first,
        "rest_q": op.q.shape[0] if stop == batch else 0,
    }


def programs_of(config: HopperDenseConfig, total_q: int, batch: int, split: bool) -> int:
    """One per SM, or one per tile if those are fewer; splits make any number of work items."""
    tiles = (total_q // config.BM + batch + 1) * config.heads
    return config.sm_count if split else min(tiles, config.sm_count)


def merge_programs(config: HopperDenseConfig, space: SplitSpace) -> int:
    """Enough for the tiles of all requests of a launch that can be split."""
    tiles = min(space.requests, space.group) * (config.sm_count // 2)
    return tiles * (config.BM // MERGE_ROWS)


def _in_groups(
    kernel: Any, plan: Plan, fixed: Fixed, space: SplitSpace, op: DenseOperands,
    arguments: dict[str, Any],
) -> Iterator[Call]:  # fmt: skip
    """Launches whose partial sums fit the workspace, each followed by its merge."""
    config, batch = plan.config, op.cu_seqlens_q.shape[0] - 1
    sums, state = space.allocate(op.q.device)
    parts = {"part_sums_ptr": sums, "part_state_ptr": state, "SPLIT": fixed.min_keys}
    group = batch if space.requests <= space.group else space.group
    for first in range(0, batch, group):
        call = _group(kernel, plan, op, {**arguments, **parts}, first, min(first + group, batch))
        yield call
        shared = {name: call.arguments[name] for name in _MERGED}
        rest = {"D_V": config.d_v, "BLOCK_ROWS": MERGE_ROWS, "num_warps": 4}
        yield Call(merge_kernel, merge_programs(config, space), shared | rest, SOURCES)


def counted(plan: Plan, args: Mapping[str, Any]) -> tuple[object, Counted] | None:
    """What follows from token counts, for openmla.cached: of the launches of one group."""
    config: HopperDenseConfig = plan.config
    total_q, total_k = args["q"].shape[0], args["k_nope"].shape[0]
    batch = args["cu_seqlens_q"].shape[0] - 1
    space = split_space(fixed_of(plan.problem, config), config, args)
    one_group = space is None or space.requests <= space.group
    if config.num_qo != config.num_qo_for(total_q, batch) or not one_group:
        return None
    numbers: dict[str, Any] = {
        "batch": batch, "total_q": total_q, "rest_q": total_q, "total_k": total_k,
        **dict.fromkeys(("q_main_desc", "q_tail_desc", "q_rope_desc"), (0, total_q)),
        **dict.fromkeys(("k_main_desc", "k_tail_desc"), (0, total_k)),
    }  # fmt: skip
    if args["k_rope"] is not None:
        numbers["k_rope_desc"] = (0, total_k)
    programs = [programs_of(config, total_q, batch, space is not None)]
    programs += [] if space is None else [merge_programs(config, space)]
    if short := config.one_block(batch, total_k):
        programs = [one_block_programs(config, total_q)]
    return (config.num_qo, space, short), [(n, numbers) for n in programs]


def split_space(
    fixed: Fixed, config: HopperDenseConfig, args: Mapping[str, Any]
) -> SplitSpace | None:
    """Room for the requests that can be split; None when by their lengths none can.

    Lengths are on the device, but a few things are known here: a split needs 2 x min_keys keys, and
    where queries and keys have the same offsets a request has as few keys as queries.
    """
    offsets_q, offsets_k, keys = args["cu_seqlens_q"], args["cu_seqlens_k"], args["k_nope"].shape[0]
    batch = offsets_q.shape[0] - 1
    least = 2 * fixed.min_keys
    short = offsets_q.data_ptr() == offsets_k.data_ptr() and fixed.longest_chunk < least
    shared = args["k_start"] is not None  # ranges of shared keys have not run on a GPU
    if short or shared or not least or not batch or keys < least:
        return None
    requests = min(batch, keys // least)
    slot_bytes = 4 * WGMMA_ROWS * (config.d_v + 2)
    group = max(1, WORKSPACE_CAP // (slot_bytes * fixed.slots))
    rows = min(requests, group) * fixed.slots * WGMMA_ROWS
    return SplitSpace(requests, group, rows, config.d_v)


_MERGED = (
    "part_sums_ptr", "part_state_ptr", "out_ptr", "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr",
    "starts_ptr", "batch", "total_q", "total_k", "heads", "out_stride_t", "out_stride_h",
    "lse_stride_t", "lse_stride_h", "NC", "HG", "SPLIT", "SM_COUNT",
)  # fmt: skip
