"""Host side of ranges of keys: their workspace, requests by launch, and the call of the merge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.kernels.call import Call, Sources, vector
from openmla.kernels.gluon.ranges.merge import merge_kernel
from openmla.operands import LatentOperands
from openmla.planning.latent_split import RangeSpace

MERGE_WARPS, MERGED_TOGETHER = 4, 16  # of a program: see merge.py
MERGED_COLUMNS, FEW_COLUMNS, FEW_MERGES = 128, 32, 64  # fewer columns where programs are few
NO_PARTS: dict[str, Any] = {
    "part_sums_ptr": None,
    "part_state_ptr": None,
    "part_rows": 0,
    "range_bits": None,
}


def partial_results(space: RangeSpace, d_v: int, device: torch.device) -> dict[str, Any]:
    """The sums [rows, d_v], and behind them row_max and row_sum of each row."""
    if not space.rows:
        return NO_PARTS
    rows = space.part_rows
    memory = torch.empty(rows * (d_v + 2), dtype=torch.float32, device=device)
    state = memory[rows * d_v :]
    bits = space.fixed_keys.bit_length() - 1 if space.fixed_keys else None
    return {
        "part_sums_ptr": memory,
        "part_state_ptr": state,
        "part_rows": space.rows,
        "range_bits": bits,
    }


def groups(space: RangeSpace, op: LatentOperands) -> list[slice]:
    """Requests by launch; one launch where there are none."""
    batch = op.cu_seqlens_q.shape[0] - 1
    step = max(space.group, 1)
    return [slice(i, min(i + step, batch)) for i in range(0, max(batch, 1), step)]


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


def merge_call(
    d_v: int,
    space: RangeSpace,
    attention: dict[str, Any],
    sources: Sources | None = None,
    *,
    lanes: int = 32,
    after: bool = True,
) -> Call:
    """Programs for as many rows as a request has on average, if it may be split. attention: the
    arguments of the kernel that computed the ranges; lanes: threads of a warp; after: whether the
    merge may begin before that kernel has ended, for which it then waits."""
    shared = {name: attention[name] for name in _MERGED}
    together = min(1 << (space.ranges - 1).bit_length(), MERGED_TOGETHER)
    mean = -(-attention["total_q"] * attention["heads"] // max(attention["batch"], 1))
    rows = MERGE_WARPS * MERGED_TOGETHER // together if together < MERGED_TOGETHER else 1
    blocks = -(-min(space.merged, mean) // rows)
    columns, tiles = MERGED_COLUMNS, attention["batch"] * blocks
    if tiles * (d_v // columns) <= FEW_MERGES:
        columns = max(FEW_COLUMNS, lanes)
    rest = {
        "D_V": d_v,
        "TOGETHER": together,
        "COLUMNS": columns,
        "LANES": lanes,
        "AFTER": after,
        "blocks": blocks,
        "num_warps": MERGE_WARPS,
    }
    if after:
        rest["launch_pdl"] = True
    return Call(merge_kernel, tiles * (d_v // columns), shared | rest, sources or {})


_MERGED = (
    "part_sums_ptr",
    "part_state_ptr",
    "out_ptr",
    "lse_ptr",
    "sink_ptr",
    "cu_ptr",
    "lengths_ptr",
    "topk",
    "batch",
    "total_q",
    "rest_q",
    "heads",
    "part_rows",
    "range_bits",
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
)
