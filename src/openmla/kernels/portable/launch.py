"""Host side of the portable kernels: from a Plan and its operands to kernel calls.

`calls` lists what a launch runs, as data: the plan's variant says which kernels, arguments.py what
they take. Nothing here reads a device tensor, so nothing waits for the GPU. A split request (see
tiles.py) is computed in ranges of keys by the same kernel and merged; the partial results of a
group of sequences share one bounded workspace. An FP8 cache whose rows are visited often is
dequantized to bf16 first: its rows have the same values either way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from openmla.cache import LatentCache
from openmla.kernels.call import PLAIN_LAUNCH, WORKSPACE, Call, Sources
from openmla.kernels.portable.arguments import (
    attend_arguments,
    dense_arguments,
    latent_arguments,
    sparse_arguments,
)
from openmla.kernels.portable.attend import attend_kernel
from openmla.kernels.portable.cache_ops import dequantized
from openmla.kernels.portable.dense import dense_kernel
from openmla.kernels.portable.latent import latent_kernel
from openmla.kernels.portable.plan import PARTIAL_STATE, SplitSpace
from openmla.kernels.portable.records import DenseRule
from openmla.kernels.portable.sparse import sparse_kernel
from openmla.kernels.portable.split import merge_kernel
from openmla.operands import (
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    token_slices,
)
from openmla.planning import Plan, latent_split

MERGE_ROWS = 16
SOURCES: Sources = {
    "q_ptr": "q",
    "k_ptr": "k_nope",
    "v_ptr": "v",
    "k_desc": "k_nope",
    "v_desc": "v",
    "rope_desc": "k_rope",
    "rope_ptr": ("k_rope", "cache_data"),
    "rope_scale_ptr": "cache_scales",
    "data_ptr": ("kv", "cache_data"),
    "scale_ptr": "cache_scales",
    "table_ptr": "block_table",
    "indices_ptr": "indices",
    "lengths_ptr": ("topk_lengths", "cache_lengths"),
    "cu_q_ptr": "cu_seqlens_q",
    "cu_k_ptr": "cu_seqlens_k",
    "k_start_ptr": "k_start",
    "out_ptr": "out",
    "lse_ptr": "lse",
    "max_logits_ptr": "max_logits",
    "sink_ptr": "sink",
    "q_scale_ptr": "q_scale",
    "k_scale_ptr": "k_scale",
    "data_ptr_0": "kv",
    "scale_ptr_0": "cache_scales",
    "entries_ptr_0": ("indices", "block_table"),
    "lengths_ptr_0": "topk_lengths",
    **{f"{x}_ptr_0": x for x in ("request", "begin", "end")},
    "data_ptr_1": "second_kv",
    "scale_ptr_1": "second_scales",
    "entries_ptr_1": ("second_indices", "second_table"),
    "lengths_ptr_1": "second_lengths",
    **{f"{x}_ptr_1": f"second_{x}" for x in ("request", "begin", "end")},
    "part_out_ptr": WORKSPACE,
    "part_state_ptr": WORKSPACE,
}

ATTEND_SOURCES: Sources = {
    **SOURCES,
    "angles_ptr": "turn_table",
    "positions_ptr": "turn_positions",
}


def calls(plan: Plan, operands: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    if isinstance(operands, AttendOperands):
        yield _attend(plan, operands, results)
        return
    if plan.variant.dequantizes:
        assert not isinstance(operands, DenseOperands) and isinstance(operands.cache, LatentCache)
        wide, dequantizing = dequantized(operands.cache)
        yield dequantizing
        operands = replace(operands, cache=wide)
    if isinstance(operands, SparseOperands):
        yield _sparse(plan, operands, results)
    elif isinstance(operands, LatentOperands) and plan.config.invariant:
        yield from _with_fixed_ranges(plan, operands, results)
    elif isinstance(operands, LatentOperands):
        yield from _with_splits(plan, _latent(plan, operands, results), operands, results)
    else:
        yield from _with_splits(plan, _dense(plan, operands, results), operands, results)


def _dense(plan: Plan, op: DenseOperands, results: Results) -> Call:
    arguments = dense_arguments(plan, op, results)
    return Call(dense_kernel, arguments["tiles"] * op.q.shape[1], arguments, SOURCES)


def _latent(plan: Plan, op: LatentOperands, results: Results) -> Call:
    arguments = latent_arguments(plan, op, results)
    return Call(latent_kernel, arguments["tiles"], arguments, SOURCES)


def _sparse(plan: Plan, op: SparseOperands, results: Results) -> Call:
    arguments = sparse_arguments(plan, op, results)
    return Call(sparse_kernel, op.q.shape[0] * arguments["head_blocks"], arguments, SOURCES)


def _attend(plan: Plan, op: AttendOperands, results: Results) -> Call:
    arguments = attend_arguments(plan, op, results)
    programs = op.q.shape[0] * arguments["head_blocks"]
    return Call(attend_kernel, programs, arguments, ATTEND_SOURCES)


def _with_splits(
    plan: Plan, whole: Call, op: DenseOperands | LatentOperands, results: Results
) -> Iterator[Call]:
    """The call itself, then the ranges of requests that are split, group of sequences by group."""
    space: SplitSpace | None = plan.variant.split
    if space is None:
        yield whole
        return
    dense = isinstance(op, DenseOperands)
    splitting, merging = (_dense_ranges if dense else _latent_ranges)(plan, space, whole.arguments)
    arguments = whole.arguments | splitting
    yield Call(whole.kernel, whole.programs, arguments, SOURCES)
    batch, slots, BM = arguments["batch"], space.slots, plan.config.BM
    value = arguments["VALUE" if dense else "LATENT"]
    part_out = op.q.new_empty(space.group * slots, BM, value, dtype=torch.float32)
    part_state = op.q.new_empty(space.group * slots, BM, PARTIAL_STATE, dtype=torch.float32)
    merging |= {name: arguments[name] for name in MERGED} | PLAIN_LAUNCH
    merging |= {
        "slots": slots,
        "most_units": space.tiles,
        "tiles": 0,
        "VALUE": value,
        "ROWS": MERGE_ROWS,
    }
    for first in range(0, batch, space.group):
        here = min(space.group, batch - first)
        place = {"part_out_ptr": part_out, "part_state_ptr": part_state, "first_sequence": first}
        yield Call(whole.kernel, here * slots, arguments | place | {"SPLIT": True}, SOURCES)
        blocks = space.tiles * (BM // MERGE_ROWS)
        yield Call(merge_kernel, here * blocks, merging | place, SOURCES)


def _with_fixed_ranges(plan: Plan, op: LatentOperands, results: Results) -> Iterator[Call]:
    """An invariant call, some tokens at a time: requests of one range, then all ranges of others,
    then their merge."""
    space: SplitSpace | None = plan.variant.split
    if space is None:
        yield _latent(plan, op, results)
        return
    rows = (space.slots * space.tokens * op.q.shape[1],)
    part_out = op.q.new_empty(*rows, plan.config.nope_cols, dtype=torch.float32)
    part_state = op.q.new_empty(*rows, PARTIAL_STATE, dtype=torch.float32)
    rule = latent_split.constants(fixed=plan.config.split.keys_of_range)
    for tokens in token_slices(op.q.shape[0], space.tokens):
        here = op if tokens is None else op.of_tokens(tokens)
        whole = _latent(plan, here, results.of_tokens(tokens))
        arguments = {**whole.arguments, "slots": space.slots, "RULE": rule}
        place = {"part_out_ptr": part_out, "part_state_ptr": part_state}
        yield Call(whole.kernel, whole.programs, arguments, SOURCES)
        ranges = arguments | place | {"SPLIT": True}
        yield Call(whole.kernel, whole.programs * space.slots, ranges, SOURCES)
        merging = {name: arguments[name] for name in (*MERGED, "lengths_ptr", "most_keys", "tiles")}
        merging |= {"cu_k_ptr": None, "k_start_ptr": None, "first_sequence": 0, "most_units": 0}
        merging |= {"slots": space.slots, "VALUE": arguments["LATENT"], "PACKED": True}
        merging |= {"RULE": rule, "ROWS": MERGE_ROWS} | place | PLAIN_LAUNCH
        yield Call(merge_kernel, whole.programs * (plan.config.BM // MERGE_ROWS), merging, SOURCES)


class Ranges(NamedTuple):
    """Arguments by which kernels know which requests are split, and how."""

    splitting: dict[str, Any]
    """Arguments of the attention kernel, whose launch over whole requests skips split ones."""
    merging: dict[str, Any]
    """Arguments of the merge, besides those that it shares with the attention kernel."""


def _dense_ranges(plan: Plan, space: SplitSpace, arguments: Mapping[str, Any]) -> Ranges:
    """Ranges by SplitRule: two programs per SM."""
    rule = DenseRule(programs=space.slots, min_keys=plan.config.split.min_keys)
    merging = {
        "cu_k_ptr": arguments["cu_k_ptr"],
        "k_start_ptr": arguments["k_start_ptr"],
        "lengths_ptr": None,
        "most_keys": arguments["total_k"],
        "PACKED": False,
        "RULE": rule,
    }
    return Ranges({"PROGRAMS": rule.programs, "MIN_KEYS": rule.min_keys}, merging)


def _latent_ranges(plan: Plan, space: SplitSpace, arguments: Mapping[str, Any]) -> Ranges:
    """Ranges by LatentSplit."""
    rule = latent_split.constants()
    merging = {
        "cu_k_ptr": None,
        "k_start_ptr": None,
        "lengths_ptr": arguments["lengths_ptr"],
        "most_keys": arguments["most_keys"],
        "PACKED": True,
        "RULE": rule,
    }
    return Ranges({"slots": space.slots, "RULE": rule}, merging)


MERGED = (
    "out_ptr",
    "lse_ptr",
    "sink_ptr",
    "cu_q_ptr",
    "total_q",
    "batch",
    "heads",
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
    "window",
    "KEY_STEP",
    "D_V",
    "BM",
)
