"""Arguments of the portable attention kernels, from a Plan and its operands.

`launch.py` makes calls of them. What kernels have in common stands here once: the rows of a cache
(`_rows`), sequences (`_sequences`), queries, outputs and the tile (`_common`).
"""

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmla.arithmetic import ceildiv
from openmla.cache import LatentCache
from openmla.kernels.call import angles_of, scale_arguments, strides, vector
from openmla.kernels.portable.attend import LIST, SPAN
from openmla.kernels.portable.formats import (
    as_operand,
    operand_type,
    row_constants,
    row_strides,
    row_tensors,
    row_type,
)
from openmla.kernels.portable.plan import padded
from openmla.kernels.portable.records import PLAIN_ROW
from openmla.operands import (
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
)
from openmla.planning import Plan, split
from openmla.planning.target import target_by_name
from openmla.sources import Listed, Source

SOURCE_POINTERS = (
    *("data_ptr", "scale_ptr", "entries_ptr", "lengths_ptr"),
    *("request_ptr", "begin_ptr", "end_ptr"),
)
SOURCE_NUMBERS = (
    *("entries", "lines", "pages", "entries_stride", "data_stride_page", "data_stride_t"),
    *("scale_stride_page", "scale_stride_t"),
)


def dense_arguments(plan: Plan, op: DenseOperands, results: Results) -> dict[str, Any]:
    """MHA form: a program for each tile of queries and head."""
    native = target_by_name(plan.target).has_e4m3
    total_q, _, d_qk = op.q.shape
    d_nope, d_v = op.k_nope.shape[2], op.v.shape[2]
    d_rope = d_qk - d_nope
    config = plan.config
    return {
        "k_ptr": as_operand(op.k_nope, native),
        **strides("k", op.k_nope),
        "v_ptr": as_operand(op.v, native),
        **strides("v", op.v),
        "cu_k_ptr": vector(op.cu_seqlens_k),
        "k_start_ptr": vector(op.k_start),
        "total_k": op.k_nope.shape[0] if op.has_keys else 0,
        "tiles": total_q // config.BM + op.cu_seqlens_q.shape[0],
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


def latent_arguments(plan: Plan, op: LatentOperands, results: Results) -> dict[str, Any]:
    """Latent form over pages: a program for each tile of rows, which are heads of tokens."""
    total_q, heads, _ = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    return {
        "table_ptr": vector(op.block_table),
        "table_stride": op.block_table.shape[1],
        "lengths_ptr": vector(op.cache_lengths),
        "tiles": total_q * heads // plan.config.BM + op.cu_seqlens_q.shape[0],
        "last_page": op.cache.num_pages - 1,
        "most_keys": op.block_table.shape[1] * op.cache.page_size if op.cache.rows else 0,
        "slots": 1,
        "RULE": None,
        **_rows(plan, op.cache, op.cache.latent, native),
        "PAGE": op.cache.page_size,
        **_sequences(op),
        **_common(plan, op, results, op.q.shape[2] - op.cache.latent, op.d_v, native),
    }


def sparse_arguments(plan: Plan, op: SparseOperands, results: Results) -> dict[str, Any]:
    """Lists of rows: a program for each token and block of its heads."""
    _, heads, width = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    latent = op.cache.latent if isinstance(op.cache, LatentCache) else op.d_v
    indices = op.indices if op.indices.stride(1) == 1 else op.indices.contiguous()
    return {
        "indices_ptr": indices,
        "indices_stride": indices.stride(0),
        "topk": indices.shape[1],
        "lengths_ptr": vector(op.topk_lengths),
        "rows": op.rows,
        "head_blocks": ceildiv(heads, plan.config.BM),
        "max_logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        **_rows(plan, op.cache, latent, native),
        **_common(plan, op, results, width - latent, op.d_v, native),
    }


def attend_arguments(plan: Plan, op: AttendOperands, results: Results) -> dict[str, Any]:
    """Spans and second sources: a program for each token and block of its heads."""
    _, heads, width = op.q.shape
    native = target_by_name(plan.target).has_e4m3
    config = plan.config
    common = _common(plan, op, results, width - op.latent, op.d_v, native)
    for name in ("q_scale_ptr", "k_scale_ptr"):  # there are none beside two sources
        del common[name]
    return {
        **_source(op.sources[0], 0, native),
        **_source(op.sources[1] if len(op.sources) > 1 else None, 1, native),
        "head_blocks": ceildiv(heads, config.BM),
        "D_LATENT": op.latent,
        "LATENT": config.nope_cols,
        "ROPE": config.rope_cols,
        "TYPE": row_type(op.sources[0].rows),
        "TWO_TERMS": config.terms == 2,
        "BRANCH": config.branches,
        **angles_of(op.turn_back),
        **common,
    }


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
    """Arguments that all kernels share: queries, outputs, weights, tile."""
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
