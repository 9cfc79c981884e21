"""Host side of the latent Hopper kernel: from a Plan and its operands to a kernel call.

`calls` lists what a launch runs, as data. Nothing here reads a device tensor, so nothing waits for
the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
from openmla.kernels.gluon.dequantize.launch import Filling, addressed_once, rows_of
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.few.launch import few_calls
from openmla.kernels.hopper.latent.kernel import sparse_kernel
from openmla.kernels.hopper.latent.merge import merge_kernel
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.planning import Plan
from openmla.planning.hopper import HopperSparseConfig
from openmla.planning.hopper.few import few_queries
from openmla.planning.latent_split import most_ranges

WGMMA_ROWS = 64
VECTOR = 8  # elements in 16 bytes
MOST_ROWS = 2**31 - 1  # no index names more
MERGE_WARPS, MERGED_TOGETHER = 4, 16  # of a program: see merge.py
MERGED_COLUMNS, FEW_COLUMNS, FEW_MERGES = 128, 32, 64  # fewer columns where programs are few
Operands = SparseOperands | LatentOperands
SOURCES: Sources = {
    "q_half_desc": "q", "q_rope_desc": "q", "k_half_desc": "cache_data",
    "k_rope_desc": "cache_data", "out_ptr": "out", "lse_ptr": "lse",
    "logits_ptr": "max_logits", "sink_ptr": "sink", "data_ptr": ("kv", "cache_data"),
    "rope_ptr": ("kv", "cache_data"), "scale_ptr": ("cache_scales", "kv", "cache_data"),
    "indices_ptr": ("indices", "block_table"), "lengths_ptr": ("topk_lengths", "cache_lengths"),
    "cu_ptr": "cu_seqlens_q", "part_sums_ptr": WORKSPACE, "part_state_ptr": WORKSPACE,
    "counter_ptr": COUNTER,
}  # fmt: skip


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing where nobody sees a key, and results are cleared."""
    if not results.out.numel():
        return
    if not has_keys(op):
        results.clear()
        return
    config: HopperSparseConfig = plan.config
    if config.few:
        heads = _queries(config, op.q, packed=False, rows=config.few.padded_heads)
        yield from few_calls(config.few, _arguments(config, op, results), heads, SOURCES)
        return
    if config.cache_read.mode != "workspace":
        yield from _attention(config, [_arguments(config, op, results)], op)
        return
    columns, lanes = (config.latent, config.rope), config.copy_lanes
    space = addressed_once(Filling(config.cache_read, columns, config.sm_count, lanes), op)
    after = {"AFTER": True, "launch_pdl": True}  # may begin before the launch in front has ended
    ways = [_arguments(config, space.operands, results) | space.gate(fits=True) | after]
    if space.total is not None:
        ways.append(_arguments(config, op, results) | space.gate(fits=False) | after)
    yield from space.calls
    yield from _attention(config, ways, op)


def has_keys(op: Operands) -> bool:
    """Whether anybody could see a key."""
    if isinstance(op, LatentOperands):
        return bool(op.cache.rows and op.block_table.numel())
    return bool(op.rows and op.indices.shape[1])


NO_GATE: dict[str, Any] = {"total_ptr": None, "capacity": 0, "FITS": True, "AFTER": False}
NO_PARTS: dict[str, Any] = {"part_sums_ptr": None, "part_state_ptr": None, "part_rows": 0}


def _attention(
    config: HopperSparseConfig, ways: list[dict[str, Any]], op: Operands
) -> Iterator[Call]:
    """One launch for each of several ways to read rows, of which one will run; of sequences that
    may be split in groups, each with its merge."""
    if isinstance(op, SparseOperands):
        for way in ways:
            yield Call(sparse_kernel, min(way["tiles"], config.sm_count), way | NO_PARTS, SOURCES)
        return
    space = part_space(config, op)
    parts = space.arguments(op.q.device)
    for group in groups(space, op):
        here: dict[str, Any] = {}
        for way in ways:
            here = way | parts | group_of(op, way["indices_ptr"], group)
            yield Call(sparse_kernel, space.programs, here, SOURCES)
        if space.rows:
            yield _merge(space, here)


def _arguments(config: HopperSparseConfig, op: Operands, results: Results) -> dict[str, Any]:
    """Attention over the rows of `op` as they are stored."""
    places = sequences(op) if isinstance(op, LatentOperands) else lists(config, op)
    rows = rows_of(op.cache)
    dequantizes = rows["SCALED"] > 0
    registers = config.registers_of(dequantizes)
    draws = config.draws and not dequantizes and _most_work_items(config, op) > config.sm_count
    return {
        **constexprs(config),
        **places,
        **rows,
        **NO_GATE,
        "REGISTERS": (registers.consumer, registers.producer),
        "counter_ptr": launch_counter(op.q.device) if draws else None,
        **outputs(results),
        **scale_arguments(op.weights.scale),
        **_queries(config, op.q, packed=isinstance(op, LatentOperands)),
        **_boxes(config, op, dequantizes),
        "sink_ptr": vector(op.weights.sink),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }


class PartSpace(NamedTuple):
    """Room for the ranges of split requests, and what the launches of a call have in common."""

    programs: int
    group: int
    """Requests of one launch."""
    rows: int
    """Rows of partial results of a request; 0 where none can be split."""
    merged: int
    """Most rows of a split request."""
    ranges: int
    """Most ranges of a request."""
    d_v: int

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The sums [rows, d_v], and behind them row_max and row_sum of each row."""
        if not self.rows:
            return NO_PARTS
        rows = self.group * self.rows
        space = torch.empty(rows * (self.d_v + 2), dtype=torch.float32, device=device)
        state = space[rows * self.d_v :]
        return {"part_sums_ptr": space, "part_state_ptr": state, "part_rows": self.rows}


def part_space(config: HopperSparseConfig, op: LatentOperands) -> PartSpace:
    """By what is known without the lengths."""
    batch, rows = op.cu_seqlens_q.shape[0] - 1, op.q.shape[0] * op.q.shape[1]
    rule, most = config.split, _most_keys(op)
    if not batch or not rule.can_split(most):
        tiles = rows // WGMMA_ROWS + batch + 1
        return PartSpace(min(tiles, config.sm_count), batch, 0, 0, 1, config.latent)
    group, each = rule.group(batch, most), rule.part_rows(1, most)
    merged, ranges = rule.split_rows(1, rows, most), most_ranges(config.heads, most)
    return PartSpace(config.sm_count, group, each, merged, ranges, config.latent)


def _most_work_items(config: HopperSparseConfig, op: Operands) -> int:
    """By what is known without the lengths: if every program has one, there is nothing to draw."""
    tokens, heads = op.q.shape[:2]
    if isinstance(op, SparseOperands):
        return tokens * config.row_blocks
    tiles = tokens * heads // WGMMA_ROWS + op.cu_seqlens_q.shape[0]
    return tiles * most_ranges(heads, _most_keys(op))


def _most_keys(op: LatentOperands) -> int:
    return min(op.block_table.shape[1] * op.cache.page_size, MOST_ROWS)


def groups(space: PartSpace, op: LatentOperands) -> list[slice]:
    """Requests by launch; one launch where there are none."""
    batch = op.cu_seqlens_q.shape[0] - 1
    step = max(space.group, 1)
    return [slice(i, min(i + step, batch)) for i in range(0, max(batch, 1), step)]


def _merge(space: PartSpace, attention: dict[str, Any]) -> Call:
    """Programs for as many rows as a request has on average, if it may be split."""
    shared = {name: attention[name] for name in _MERGED}
    together = min(1 << (space.ranges - 1).bit_length(), MERGED_TOGETHER)
    mean = -(-attention["total_q"] * attention["heads"] // max(attention["batch"], 1))
    rows = MERGE_WARPS * MERGED_TOGETHER // together if together < MERGED_TOGETHER else 1
    blocks = -(-min(space.merged, mean) // rows)
    columns, tiles = MERGED_COLUMNS, attention["batch"] * blocks
    if tiles * (space.d_v // columns) <= FEW_MERGES:
        columns = FEW_COLUMNS
    rest = {
        "D_V": space.d_v, "TOGETHER": together, "COLUMNS": columns, "blocks": blocks,
        "num_warps": MERGE_WARPS, "launch_pdl": True,
    }  # fmt: skip
    return Call(merge_kernel, tiles * (space.d_v // columns), shared | rest, SOURCES)


_MERGED = (
    "part_sums_ptr", "part_state_ptr", "out_ptr", "lse_ptr", "sink_ptr", "cu_ptr", "lengths_ptr",
    "topk", "batch", "total_q", "rest_q", "heads", "part_rows", "out_stride_t", "out_stride_h",
    "lse_stride_t", "lse_stride_h",
)  # fmt: skip


def counted(plan: Plan, args: Mapping[str, Any]) -> tuple[object, Counted] | None:
    """What follows from the number of tokens, for openmla.cached: of lists of rows that are read as
    they are. Over pages, and whether FP8 rows are worth a workspace, other counts are planned."""
    config: HopperSparseConfig = plan.config
    if config.cache_read.mode != "plain" or "indices" not in args:
        return None
    tokens = args["q"].shape[0]
    columns, topk = (config.latent, config.rope), args["indices"].shape[1]
    if few_queries(tokens, config.heads, topk, columns, config.sm_count):
        return None
    tiles = tokens * config.row_blocks
    described = dict.fromkeys(("q_half_desc", "q_rope_desc"), (0, tokens))
    draws = config.draws and tiles > config.sm_count
    return draws, [(min(tiles, config.sm_count), {"tiles": tiles, "total_q": tokens, **described})]


def lists(config: HopperSparseConfig, op: SparseOperands) -> dict[str, Any]:
    """Every token with its own list of rows: a tile is 64 of its heads."""
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "indices_ptr": indices,
        "lengths_ptr": vector(op.topk_lengths),
        "cu_ptr": None,
        "topk": indices.shape[1],
        "rows": min(op.rows, MOST_ROWS),
        "tiles": op.q.shape[0] * config.row_blocks,
        "head_blocks": config.row_blocks,
        "batch": 0,
        "rest_q": 0,
        "indices_stride": indices.stride(0),
        "PAGE_SIZE": 0,
        "MASK": 0,
    }


def sequences(op: LatentOperands) -> dict[str, Any]:
    """Sequences over pages: a tile is 64 rows, heads of tokens (see pages.py)."""
    table = op.block_table if op.block_table.stride(1) == 1 else op.block_table.contiguous()
    return {
        "indices_ptr": table,
        "topk": _most_keys(op),
        "rows": min(op.cache.rows, MOST_ROWS),
        "tiles": 0,
        "head_blocks": 1,
        "indices_stride": table.stride(0),
        "PAGE_SIZE": op.cache.page_size,
        "MASK": 2 if op.causal else 1,
    }


def group_of(op: LatentOperands, table: Tensor, group: slice) -> dict[str, Any]:
    """Some of the sequences; the last launch of a call also owns rows after the last."""
    first, stop = group.start, group.stop
    return {
        "indices_ptr": table[first:],
        "lengths_ptr": vector(op.cache_lengths)[first:],  # type: ignore[index]
        "cu_ptr": vector(op.cu_seqlens_q)[first:],  # type: ignore[index]
        "batch": stop - first,
        "rest_q": op.q.shape[0] if stop == op.cu_seqlens_q.shape[0] - 1 else 0,
    }


@lru_cache(maxsize=4096)
def constexprs(config: HopperSparseConfig) -> dict[str, Any]:
    """What is compiled in, besides the page size and the sign of the scale."""
    half = config.latent // 2
    return {
        "ST": config.num_kv_stages,
        "DIMS": (half, config.rope),
        "OVERLAY": config.p_overlays_rope,
        "LANES": config.copy_lanes,
        "LAYOUTS": tuple(tile_layout(width) for width in (half, config.rope or 16, 64)),
        "num_warps": 4,
    }


def _queries(
    config: HopperSparseConfig, q: Tensor, packed: bool, rows: int = WGMMA_ROWS
) -> dict[str, Any]:
    """Descriptors of Q. `packed`: tiles hold heads of several tokens, so these must follow one
    another as the heads of one do."""
    rope = config.rope
    if packed:
        q = q.reshape(1, -1, q.shape[2])  # a copy only where heads and tokens have gaps
    return {
        "q_half_desc": heads_of_tokens(q, config.latent // 2, rows),
        "q_rope_desc": heads_of_tokens(q, rope, rows) if rope else None,
    }


def _boxes(config: HopperSparseConfig, op: Operands, dequantizes: bool) -> dict[str, Any]:
    """Descriptors of pages, where a block of keys never lies in two."""
    if not isinstance(op, LatentOperands) or dequantizes or op.cache.page_size % WGMMA_ROWS:
        return {"k_half_desc": None, "k_rope_desc": None}
    rows, rope = op.cache.data, config.rope
    return {
        "k_half_desc": heads_of_tokens(rows, config.latent // 2),
        "k_rope_desc": heads_of_tokens(rows, rope) if rope else None,
    }


def heads_of_tokens(q: Tensor, columns: int, rows: int = WGMMA_ROWS) -> Any:
    """Boxes of 64 heads of one token of q [tokens, heads, width]; zeros past the last head."""
    steps = list(q.stride())
    if q.shape[1] == 1:
        steps[1] = steps[0]  # of one head: may be anything, and is never used
    box = [1, rows, columns]
    layout = tile_layout(columns, 3, q.element_size())
    return TensorDescriptor(q, list(q.shape), steps, box, layout)


def outputs(results: Results) -> dict[str, Any]:
    """Where results are written."""
    out, lse, logits = results.out, results.lse, results.max_logits
    vectors = {"out_ptr": out, "lse_ptr": lse, "logits_ptr": logits}
    steps = strides("out", out, VECTOR) | strides("lse", lse) | strides("logits", logits)
    return {**vectors, **steps}
