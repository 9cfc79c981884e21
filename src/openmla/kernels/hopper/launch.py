"""Host side of the dense Hopper kernel: from a Plan and its operands to kernel calls.

`calls` lists what a launch would run, as data; `launch` runs it. Nothing here reads a device
tensor, so nothing waits for the GPU. The rest is worked out once per Problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.kernels.call import Call, vector
from openmla.kernels.hopper.dense import dense_kernel
from openmla.kernels.hopper.descriptors import (
    pages,
    ragged,
    rows_of_heads,
    shared_rows,
    tile_layout,
)
from openmla.kernels.hopper.merge import merge_kernel
from openmla.kernels.hopper.repeat import Repeat
from openmla.operands import DenseOperands, Results
from openmla.plan import Plan
from openmla.plan.hopper import HopperDenseConfig
from openmla.plan.hopper_split import WORKSPACE_CAP
from openmla.problem import Problem

LOG2_E = math.log2(math.e)
WGMMA_ROWS = 64
MERGE_ROWS = 16
VECTOR = 8  # elements in 16 bytes
MOST_KNOWN = 4096
_counters: dict[tuple[torch.device, int], Tensor] = {}
_known: dict[tuple[Any, ...], list[Repeat]] = {}


class Fixed(NamedTuple):
    """What a Problem alone determines."""

    constexprs: dict[str, Any]
    parts: tuple[int, int, int]
    """Columns of the main, tail and rope tiles of Q and K."""
    page_box: int
    """Rows of a page copied at once."""
    split_keys: int
    """Fewest keys of a range; 0 where no request can be split."""
    slots: int
    """Workspace slots (64 rows of partial sums) a split request may need."""
    split_requests: int
    """Most requests of the problem that can be split."""


def launch(plan: Plan, operands: DenseOperands, results: Results) -> None:
    """Fill every row of `results`."""
    if not operands.k_nope.shape[0]:
        results.clear()  # nobody sees a key, and a descriptor cannot describe an empty tensor
        return
    key = _key(plan, operands, results)
    known = _known.get(key)
    if known is not None:
        tensors = _tensors(plan, operands, results, _counter(operands.q.device))
        for repeat in known:
            repeat.run(tensors)
        return
    made = list(calls(plan, operands, results))
    compiled = [call.run() for call in made]
    groups = sum(call.kernel is dense_kernel for call in made)
    # Several groups slice their tensors; and a simulated launch compiles nothing.
    if groups == 1 and all(kernel is not None for kernel in compiled):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = [Repeat(*pair) for pair in zip(made, compiled, strict=True)]


def _key(plan: Plan, op: DenseOperands, results: Results) -> tuple[Any, ...]:
    """Everything a launch depends on besides the addresses of its tensors."""
    rope = op.k_rope if op.rope_cache is None else op.rope_cache.data
    table, lse = op.block_table, results.lse
    return (
        plan.problem, plan.config, op.weights.scale, op.q.device, op.q.stride(), op.k_nope.stride(),
        op.v.stride(), results.out.stride(), None if rope is None else (rope.stride(), rope.shape),
        None if lse is None else lse.stride(), None if table is None else table.shape,
    )  # fmt: skip


def _tensors(
    plan: Plan, op: DenseOperands, results: Results, counter: Tensor
) -> dict[str, Tensor | None]:
    """The tensors of a call by the names of the kernels' arguments, for one group."""
    sums, state = _workspace(_fixed(plan.problem, plan.config), plan.config, op)
    cache = op.rope_cache
    return {
        "q_main_desc": op.q, "q_tail_desc": op.q, "q_rope_desc": op.q,
        "k_main_desc": op.k_nope, "k_tail_desc": op.k_nope, "v_desc": op.v,
        "k_rope_desc": op.k_rope if cache is None else cache.data[..., cache.latent :],
        "out_ptr": results.out, "lse_ptr": results.lse, "sink_ptr": vector(op.weights.sink),
        "cu_q_ptr": vector(op.cu_seqlens_q), "cu_k_ptr": vector(op.cu_seqlens_k),
        "table_ptr": vector(op.block_table), "counter_ptr": counter,
        "part_sums_ptr": sums, "part_state_ptr": state,
    }  # fmt: skip


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """What `launch` runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    fixed = _fixed(plan.problem, plan.config)
    arguments = {
        **fixed.constexprs,
        **_descriptors(fixed, plan.config, op),
        **_outputs(op, results),
        **_scale(op.weights.scale),
        "total_q": op.q.shape[0],
        "total_k": op.k_nope.shape[0],
        "heads": op.q.shape[1],
    }
    if fixed.split_keys and op.cu_seqlens_q.shape[0] > 1:
        yield from _in_groups(plan, fixed, op, arguments)
    else:
        first = {"part_sums_ptr": None, "part_state_ptr": None, "SPLIT": 0}
        batch = op.cu_seqlens_q.shape[0] - 1
        yield _group(plan, op, {**arguments, **first}, 0, batch)


@lru_cache(maxsize=4096)
def _fixed(problem: Problem, config: HopperDenseConfig) -> Fixed:
    main, *rest = config.nope_parts
    tail = rest[0] if rest else 0
    parts = (main, tail, config.d_rope)
    rule = config.split
    paged = problem.rope == "cache" and config.d_rope > 0
    possible = rule.longest_split_chunk and problem.total_k >= 2 * rule.min_keys
    widths = (main, tail or 16, config.d_rope or 16, config.d_v)
    constexprs = {
        "NC": config.num_qo,
        "BN": config.BN,
        "ST": config.num_kv_stages,
        "DIMS": (*parts, config.d_v),
        "ROPE": (problem.rope, config.page_size if paged else 0),
        "CAUSAL": problem.causal,
        "HG": config.heads_per_l2_group,
        "SM_COUNT": config.sm_count,
        "REGISTERS": (config.registers.consumer, config.registers.producer),
        "LAYOUTS": tuple(tile_layout(width) for width in widths),
        "num_warps": 4,
    }
    return Fixed(
        constexprs,
        parts,
        config.page_box,
        rule.min_keys if possible else 0,
        2 * config.sm_count * config.num_qo,
        min(problem.batch, problem.total_k // (2 * rule.min_keys)),
    )


def _descriptors(fixed: Fixed, config: HopperDenseConfig, op: DenseOperands) -> dict[str, Any]:
    main, tail, rope = fixed.parts
    BN = config.BN
    found: dict[str, Any] = {
        "q_main_desc": rows_of_heads(op.q, WGMMA_ROWS, main),
        "q_tail_desc": rows_of_heads(op.q, WGMMA_ROWS, tail) if tail else None,
        "q_rope_desc": rows_of_heads(op.q, WGMMA_ROWS, rope) if rope else None,
        "k_main_desc": rows_of_heads(op.k_nope, BN, main),
        "k_tail_desc": rows_of_heads(op.k_nope, BN, tail) if tail else None,
        "k_rope_desc": None,
        "v_desc": ragged(op.v, BN),
        "table_ptr": None,
        "table_stride": 0,
    }
    if not rope:
        return found
    if op.rope_cache is not None and op.block_table is not None:
        table = vector(op.block_table)
        found["k_rope_desc"] = pages(
            op.rope_cache.data[..., op.rope_cache.latent :], fixed.page_box
        )
        found |= {"table_ptr": table, "table_stride": op.block_table.shape[1]}
    elif op.k_rope is not None and op.k_rope.dim() == 2:
        found["k_rope_desc"] = shared_rows(op.k_rope, BN)
    elif op.k_rope is not None:
        found["k_rope_desc"] = rows_of_heads(op.k_rope, BN, rope)
    return found


def _outputs(op: DenseOperands, results: Results) -> dict[str, Any]:
    out, lse = results.out, results.lse
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "sink_ptr": vector(op.weights.sink),
        "out_stride_t": out.stride(0) // VECTOR,
        "out_stride_h": out.stride(1) // VECTOR,
        "lse_stride_t": 0 if lse is None else lse.stride(0),
        "lse_stride_h": 0 if lse is None else lse.stride(1),
    }


def _scale(scale: float) -> dict[str, Any]:
    """The kernel multiplies by a positive factor; a scale that vanishes in fp32 makes scores 0."""
    factor = abs(scale) * LOG2_E
    vanishes = factor < 2.0**-149
    return {
        "factor": 1.0 if vanishes else factor,
        "SIGN": 0 if vanishes else 1 if scale > 0 else -1,
    }


def _group(plan: Plan, op: DenseOperands, arguments: dict[str, Any], first: int, stop: int) -> Call:
    """Requests first … stop - 1 in one launch; the last group also owns rows after the last."""
    config = plan.config
    batch = op.cu_seqlens_q.shape[0] - 1
    requests = slice(first, stop + 1)
    table = arguments["table_ptr"]
    here = {
        "cu_q_ptr": vector(op.cu_seqlens_q)[requests],  # type: ignore[index]
        "cu_k_ptr": vector(op.cu_seqlens_k)[requests],  # type: ignore[index]
        "table_ptr": None if table is None else table[first:],
        "counter_ptr": _counter(op.q.device),
        "batch": stop - first,
        "rest_q": op.q.shape[0] if stop == batch else 0,
    }
    tiles = (op.q.shape[0] // config.BM + stop - first + 1) * op.q.shape[1]
    if arguments["SPLIT"]:
        tiles = config.sm_count
    return Call(dense_kernel, min(tiles, config.sm_count), {**arguments, **here})


def _in_groups(
    plan: Plan, fixed: Fixed, op: DenseOperands, arguments: dict[str, Any]
) -> Iterator[Call]:
    """Launches whose partial sums fit the workspace, each followed by its merge."""
    config, batch = plan.config, op.cu_seqlens_q.shape[0] - 1
    sums, state = _workspace(fixed, config, op)
    parts = {"part_sums_ptr": sums, "part_state_ptr": state, "SPLIT": fixed.split_keys}
    group = _group_size(fixed, config, batch)
    tiles = min(fixed.split_requests, group) * (config.sm_count // 2)
    for first in range(0, batch, group):
        call = _group(plan, op, {**arguments, **parts}, first, min(first + group, batch))
        yield call
        shared = {name: call.arguments[name] for name in _MERGED}
        programs = tiles * (config.BM // MERGE_ROWS)
        rest = {"D_V": config.d_v, "BLOCK_ROWS": MERGE_ROWS, "num_warps": 4}
        yield Call(merge_kernel, programs, shared | rest)


def _group_size(fixed: Fixed, config: HopperDenseConfig, batch: int) -> int:
    """Requests per launch: all, unless too many of them may be split for the workspace."""
    slot_bytes = 4 * WGMMA_ROWS * (config.d_v + 2)
    most = max(1, WORKSPACE_CAP // (slot_bytes * fixed.slots))
    return batch if fixed.split_requests <= most else most


def _workspace(
    fixed: Fixed, config: HopperDenseConfig, op: DenseOperands
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the partial sums of a group, and for their top and total; None without splits."""
    batch = op.cu_seqlens_q.shape[0] - 1
    if not fixed.split_keys or not batch:
        return None, None
    requests = min(fixed.split_requests, _group_size(fixed, config, batch))
    sums = requests * fixed.slots * WGMMA_ROWS * config.d_v
    size = sums + requests * fixed.slots * WGMMA_ROWS * 2
    space = torch.empty(size, dtype=torch.float32, device=op.q.device)
    return space, space[sums:]


_MERGED = (
    "part_sums_ptr", "part_state_ptr", "out_ptr", "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr",
    "batch", "total_q", "total_k", "heads", "out_stride_t", "out_stride_h", "lse_stride_t",
    "lse_stride_h", "NC", "HG", "SPLIT", "SM_COUNT",
)  # fmt: skip


def _counter(device: torch.device) -> Tensor:
    """A zero from which the launch draws its work, and which it leaves zero.

    One per stream: launches on a stream follow one another. A captured graph gets its own, zeroed
    by the graph: it may be replayed on any stream, beside anything.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]
