"""Host side of the portable kernels: from a Plan and its operands to kernel calls.

`calls` lists what a launch runs, as data: the plan's variant says which kernels. Nothing here reads
a device tensor, so nothing waits for the GPU. A split request (see tiles.py) is computed in ranges
of keys by the same kernel and merged; the partial results of a group of sequences share one bounded
workspace. An FP8 cache whose rows are visited often is dequantized to bf16 first: its rows have the
same values either way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmla.cache import LatentCache
from openmla.kernels.call import (
    PLAIN_LAUNCH,
    WORKSPACE,
    Call,
    Sources,
    angles_of,
    scale_arguments,
    strides,
    vector,
)
from openmla.kernels.portable.attend import LIST, SPAN, attend_kernel
from openmla.kernels.portable.cache_ops import dequantized
from openmla.kernels.portable.dense import dense_kernel
from openmla.kernels.portable.formats import (
    as_operand,
    operand_type,
    row_constants,
    row_strides,
    row_tensors,
    row_type,
)
from openmla.kernels.portable.latent import latent_kernel
from openmla.kernels.portable.plan import PARTIAL_STATE, SplitSpace, padded
from openmla.kernels.portable.records import PLAIN_ROW, DenseRule
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
from openmla.planning import Plan, latent_split, split
from openmla.planning.target import target_by_name
from openmla.sources import Listed, Source

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
    native = target_by_name(plan.target).has_e4m3
    total_q, heads, _ = op.q.shape
    d_nope, d_v = op.k_nope.shape[2], op.v.shape[2]
    d_rope = op.q.shape[2] - d_nope
    config = plan.config
    tiles = total_q // config.BM + op.cu_seqlens_q.shape[0]
    arguments = {
        "k_ptr": as_operand(op.k_nope, native),
        **strides("k", op.k_nope),
        "v_ptr": as_operand(op.v, native),
        **strides("v", op.v),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "k_start_ptr": vector(op.k_start),
        "total_k": op.k_nope.shape[0] if op.has_keys else 0,
        "tiles": tiles,
        "GROUP": config.group_heads,
        "KEY_GROUP": op.group,
        "D_NOPE": d_nope,
        "NOPE": config.nope_cols,
        "TAIL": config.tail_cols,
        "VALUE": config.v_cols,
        "PROGRAMS": 0,
        "MIN_KEYS": split.MIN_KEYS,
        "K_TYPE": operand_type(op.k_nope.dtype),
        "V_TYPE": operand_type(op.v.dtype),
        "mask_ptr": op.key_mask,
        "mask_stride": 0 if op.key_mask is None else op.key_mask.stride(0),
        "words": 0 if op.key_mask is None else op.key_mask.shape[1],
        **_bulk_copies(plan, op),
        **_rope(plan, op, d_rope, native),
        **_sequences(op),
        **_common(plan, op, results, d_rope, d_v, native),
    }
    return Call(dense_kernel, tiles * heads, arguments, SOURCES)


def _rope(plan: Plan, op: DenseOperands, d_rope: int, native: bool) -> dict[str, Any]:
    """Where rope comes from: nowhere, a tensor (shared by stride 0, or per head), a cache."""
    found: dict[str, Any] = {
        "rope_ptr": None,
        "rope_scale_ptr": None,
        "table_ptr": None,
        "rope_stride_t": 0,
        "rope_stride_h": 0,
        "rope_stride_page": 0,
        "rope_scale_stride_t": 0,
        "rope_scale_stride_page": 0,
        "table_stride": 0,
        "ROPE": plan.config.rope_cols,
        "last_page": 0,
        "ROPE_PER_HEAD": 0,
        "ROPE_TYPE": tl.bfloat16,
        "ROPE_ROW": PLAIN_ROW,
        "ROPE_FIRST": 0,
        "PAGE": 0,
        "TWO_TERMS": False,
    }
    if op.rope_cache is not None and op.block_table is not None and d_rope:
        data, scales = row_tensors(op.rope_cache, native)
        table = vector(op.block_table)
        steps = row_strides(data, scales)
        found |= {
            "rope_ptr": data,
            "rope_scale_ptr": scales,
            "table_ptr": table,
            "rope_stride_t": steps["data_stride_t"],
            "rope_stride_page": steps["data_stride_page"],
            "rope_scale_stride_t": steps["scale_stride_t"],
            "rope_scale_stride_page": steps["scale_stride_page"],
            "table_stride": op.block_table.shape[1],
            "last_page": op.rope_cache.num_pages - 1,
            "ROPE_ROW": row_constants(op.rope_cache),
            "ROPE_FIRST": op.rope_cache.latent,
            "PAGE": op.rope_cache.page_size,
            "TWO_TERMS": plan.config.terms == 2,
        }
    elif op.k_rope is not None:
        shared = op.k_rope.dim() == 2
        found |= {
            "rope_ptr": as_operand(op.k_rope, native),
            "rope_stride_t": op.k_rope.stride(0),
            "rope_stride_h": 0 if shared else op.k_rope.stride(1),
            "ROPE_PER_HEAD": 0 if shared else 1,
            "ROPE_TYPE": operand_type(op.k_rope.dtype),
        }
    return found


def _bulk_copies(plan: Plan, op: DenseOperands) -> dict[str, Any]:
    """Descriptors of K, rope and V where the plan wants them and the tensors allow them."""
    tensors = {"k_desc": op.k_nope, "v_desc": op.v}
    if op.k_rope is not None:
        tensors["rope_desc"] = op.k_rope if op.k_rope.dim() == 3 else op.k_rope[:, None]
    found: dict[str, Any] = dict.fromkeys(("k_desc", "rope_desc", "v_desc"))
    if plan.config.bulk_copies and all(_bulk_copied(x) for x in tensors.values()):
        for name, x in tensors.items():
            by_head = x.transpose(0, 1)
            block = [1, plan.config.BN, x.shape[2]]
            found[name] = TensorDescriptor(
                by_head, list(by_head.shape), list(by_head.stride()), block
            )
    return found


def _bulk_copied(x: Tensor) -> bool:
    """16-bit elements, a power of two of columns, everything at multiples of 16 bytes."""
    return (
        x.numel() > 0
        and x.element_size() == 2
        and x.shape[2] == padded(x.shape[2])
        and x.data_ptr() % 16 == 0
        and all(n * 2 % 16 == 0 and n > 0 for n in x.stride()[:2])
    )


def _latent(plan: Plan, op: LatentOperands, results: Results) -> Call:
    total_q, heads, _ = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    tiles = total_q * heads // plan.config.BM + op.cu_seqlens_q.shape[0]
    arguments = {
        "table_ptr": vector(op.block_table),
        "table_stride": op.block_table.shape[1],
        "lengths_ptr": vector(op.cache_lengths),
        "tiles": tiles,
        "last_page": op.cache.num_pages - 1,
        "most_keys": op.block_table.shape[1] * op.cache.page_size if op.cache.rows else 0,
        "slots": 1,
        "RULE": None,
        **_rows(plan, op.cache, op.cache.latent, native),
        "PAGE": op.cache.page_size,
        **_sequences(op),
        **_common(plan, op, results, op.q.shape[2] - op.cache.latent, op.d_v, native),
    }
    return Call(latent_kernel, tiles, arguments, SOURCES)


def _sparse(plan: Plan, op: SparseOperands, results: Results) -> Call:
    total_q, heads, width = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    latent = op.cache.latent if isinstance(op.cache, LatentCache) else op.d_v
    blocks = -(-heads // plan.config.BM)
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    arguments = {
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "topk": indices.shape[1],
        "lengths_ptr": vector(op.topk_lengths),
        "rows": op.rows,
        "head_blocks": blocks,
        "max_logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        **_rows(plan, op.cache, latent, native),
        **_common(plan, op, results, width - latent, op.d_v, native),
    }
    return Call(sparse_kernel, total_q * blocks, arguments, SOURCES)


def _attend(plan: Plan, op: AttendOperands, results: Results) -> Call:
    total_q, heads, width = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    config = plan.config
    blocks = -(-heads // config.BM)
    common = _common(plan, op, results, width - op.latent, op.d_v, native)
    for name in ("q_scale_ptr", "k_scale_ptr"):  # there are none beside two sources
        del common[name]
    arguments = {
        **_source(op.sources[0], 0, native),
        **_source(op.sources[1] if len(op.sources) > 1 else None, 1, native),
        "head_blocks": blocks,
        "D_LATENT": op.latent,
        "LATENT": config.nope_cols,
        "ROPE": config.rope_cols,
        "TYPE": row_type(op.sources[0].rows),
        "TWO_TERMS": config.terms == 2,
        "BRANCH": config.branches,
        **angles_of(op.turn_back),
        **common,
    }
    return Call(attend_kernel, total_q * blocks, arguments, ATTEND_SOURCES)


def _source(source: Source | None, number: int, native: bool) -> dict[str, Any]:
    """A source as the kernel's arguments of that number; plain rows are one page."""
    found: dict[str, Any] = dict.fromkeys(SOURCE_POINTERS)
    found |= dict.fromkeys(SOURCE_NUMBERS, 0) | {"page_size": 1, "KIND": 0, "ROW": PLAIN_ROW}
    if source is not None:
        data, scales = row_tensors(source.rows, native)
        pages, size = (1, data.shape[0]) if data.dim() == 2 else data.shape[:2]
        listed = isinstance(source, Listed)
        entries = source.indices if isinstance(source, Listed) else source.block_table
        entries = entries if entries.stride(1) == 1 else entries.contiguous()
        found |= {
            "data_ptr": data,
            "scale_ptr": scales,
            "entries_ptr": entries,
            "entries": entries.shape[1],
            "entries_stride": entries.stride(0),
            "pages": pages,
            "page_size": max(size, 1),
            **row_strides(data, scales),
            "KIND": (LIST if listed else SPAN).value,
            "ROW": row_constants(source.rows),
        }
        if isinstance(source, Listed):
            found["pages"] = pages if size else 0
            found["lengths_ptr"] = vector(source.lengths)
        else:
            found["lines"] = entries.shape[0]
            found |= {f"{x}_ptr": vector(getattr(source, x)) for x in ("request", "begin", "end")}
    return {f"{name}_{number}": value for name, value in found.items()}


def _rows(plan: Plan, cache: LatentCache | Tensor, latent: int, native: bool) -> dict[str, Any]:
    """The rows of the latent and sparse forms. PAGE 0: pages lie end to end, rows are enough."""
    data, scales = row_tensors(cache, native)
    end_to_end = data.dim() == 2 or all(
        x is None or x.stride(0) == x.shape[1] * x.stride(1) for x in (data, scales)
    )
    return {
        "data_ptr": data,
        "scale_ptr": scales,
        **row_strides(data, scales),
        "D_LATENT": latent,
        "LATENT": plan.config.nope_cols,
        "ROPE": plan.config.rope_cols,
        "TYPE": row_type(cache),
        "ROW": row_constants(cache),
        "PAGE": 0 if end_to_end else data.shape[1],
        "TWO_TERMS": plan.config.terms == 2,
        # A loop that names its stages has all of its loads pipelined, not only those of products.
        "STAGES": plan.config.num_stages if plan.config.branches else None,
        "BRANCH": plan.config.branches,
    }


def _sequences(op: DenseOperands | LatentOperands) -> dict[str, Any]:
    """Arguments that the two forms with sequences share."""
    return {
        "cu_q_ptr": vector(op.cu_seqlens_q),
        "batch": op.cu_seqlens_q.shape[0] - 1,
        "total_q": op.q.shape[0],
        "first_sequence": 0,
        "window": op.window or None,
        "KEY_STEP": split.KEY_STEP,
        "CAUSAL": op.causal,
        "part_out_ptr": None,
        "part_state_ptr": None,
        "SPLIT": False,
    }


def _common(
    plan: Plan, op: Operands, results: Results, d_rope: int, d_v: int, native: bool
) -> dict[str, Any]:
    """Arguments that all three kernels share: queries, outputs, weights, tile."""
    config, weights = plan.config, op.weights
    return {
        "q_ptr": as_operand(op.q, native),
        **strides("q", op.q),
        "heads": op.q.shape[1],
        "out_ptr": results.out,
        **strides("out", results.out),
        "lse_ptr": results.lse,
        **strides("lse", results.lse),
        "sink_ptr": vector(weights.sink),
        "q_scale_ptr": vector(weights.q_scale),
        "k_scale_ptr": vector(weights.k_scale),
        **scale_arguments(weights.scale),
        "D_ROPE": d_rope,
        "D_V": d_v,
        "BM": config.BM,
        "BN": config.BN,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


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
    rule = latent_split.constants(invariant=True)
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
    """By SplitRule: two programs per SM."""
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
    """By LatentSplit."""
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


SOURCE_POINTERS = (
    *("data_ptr", "scale_ptr", "entries_ptr", "lengths_ptr"),
    *("request_ptr", "begin_ptr", "end_ptr"),
)
SOURCE_NUMBERS = (
    *("entries", "lines", "pages", "entries_stride", "data_stride_page", "data_stride_t"),
    *("scale_stride_page", "scale_stride_t"),
)
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
