"""From a Problem to a family's config: one function per kernel family.

Each returns the config it would run and the reason it cannot, which is empty when it can. The
config is None when the problem lies so far outside that none could be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from openmla.errors import InvalidArgument
from openmla.plan.blackwell_dense import why_no_kernel
from openmla.plan.blackwell_fa4 import FA4Config
from openmla.plan.blackwell_mla import ROPE_DEPTH, MLAConfig, select_mla_prefill_config
from openmla.plan.blackwell_sparse_prefill import (
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    select_mla_sparse_config,
)
from openmla.plan.blackwell_sparse_qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.plan.blackwell_sparse_smem import MLASparseSharedMemoryFP8
from openmla.plan.blackwell_units import operand_swizzle
from openmla.plan.cpu import plan_cpu
from openmla.plan.hopper_cache import (
    CacheRead,
    listed_cache_read,
    mean_length,
    named_pages_read,
)
from openmla.plan.hopper_dense import select_hopper_dense_config
from openmla.plan.hopper_sparse import HopperSparseConfig, select_hopper_sparse_config
from openmla.plan.portable import select_portable_config
from openmla.plan.target import Target
from openmla.problem import DTYPE_BYTES, Problem

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}
# A latent cache row on CDNA4: rope begins at column 512, whatever the width before it.
CDNA4_ROPE_OFFSET = 512
V32_SCALE_BLOCK = 128  # of the 512 latent columns of a row of 656 bytes; its rope is bf16
# Chips for which another chip's kernels were considered, and why they cannot run there.
NEAR_MISSES = {
    "gfx942": "cdna4: gfx942 has neither transposing LDS reads nor 16-byte copies to LDS nor FP8 "
    "products of depth 64, and 64 KB of LDS where the blocks need 56 KB to 160 KB",
}
UNALIGNED = "a pointer or stride is no multiple of 16 bytes, as asynchronous copies demand"


class Choice(NamedTuple):
    """A family's answer to a problem."""

    config: Any
    reason: str


def choose(family: str, problem: Problem, target: Target) -> Choice:
    """The family's config for the problem, or why there is none."""
    try:
        return _CHOOSERS[family](problem, target)
    except InvalidArgument as error:
        # A config refuses what it cannot even describe, such as pages that cut a swizzle pattern.
        return Choice(None, str(error))


def is_fp8_cache(dtype: str) -> bool:
    """Whether a dtype names an FP8 cache format rather than an element type."""
    return dtype not in DTYPE_BYTES


def _cpu(problem: Problem, target: Target) -> Choice:
    return Choice(plan_cpu(problem), "")


def _reference(problem: Problem, target: Target) -> Choice:
    return Choice(None, "")


# Portable.


def _portable(problem: Problem, target: Target) -> Choice:
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if "fp32" in dtypes:
        return Choice(None, "fp32 operands: the GPU kernels multiply bf16, fp16 and e4m3")
    if not target.has_bf16:
        return Choice(None, f"{target.arch}: Triton's products of bf16 and fp16 need sm_80")
    config = select_portable_config(problem, target)
    return Choice(config, config.why_unsupported())


# Hopper.


def _hopper(problem: Problem, target: Target) -> Choice:
    if not problem.aligned_16:
        return Choice(None, UNALIGNED)
    if problem.has_q_scale or problem.has_k_scale:
        return Choice(None, "per-token scales: the Hopper kernels have no place for them")
    if problem.form == "dense":
        return _hopper_dense(problem, target)
    return _hopper_rows(problem, target)


def _hopper_dense(problem: Problem, target: Target) -> Choice:
    dtypes = _operand_dtypes(problem)
    if len(dtypes) > 1 or not dtypes <= {"bf16", "fp16"}:
        reason = f"operands of {_listed(dtypes)}: all must be bf16 or all fp16"
        if "e4m3" in dtypes:
            reason += " (wgmma reads FP8 V only transposed, and bulk copies do not transpose)"
        return Choice(None, reason)
    config = select_hopper_dense_config(
        heads=problem.heads,
        d_nope=problem.d_nope,
        d_rope=problem.d_rope,
        d_v=problem.d_v,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        sm_count=target.sm_count,
    )
    reason = config.why_unsupported()
    if not reason and config.num_qo_for(problem.total_q, problem.batch) == 1:
        config = config.with_num_qo(1)
    return Choice(config, reason)


def _hopper_rows(problem: Problem, target: Target) -> Choice:
    widened = is_fp8_cache(problem.kv_dtype)
    rows_dtype = "bf16" if widened else problem.kv_dtype
    if problem.q_dtype != rows_dtype or rows_dtype not in ("bf16", "fp16"):
        return Choice(None, _mixed_rows(problem))
    if problem.d_v != problem.d_nope:
        return Choice(None, f"d_v {problem.d_v}: V must be all {problem.d_nope} latent columns")
    config = select_hopper_sparse_config(
        heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        gather="indices" if problem.form == "sparse" else "pages",
        sm_count=target.sm_count,
    )
    if widened:
        config = replace(config, cache_read=_cache_read(problem, config))
    return Choice(config, config.why_unsupported())


def _cache_read(problem: Problem, config: HopperSparseConfig) -> CacheRead:
    rows, width = problem.total_k, problem.d_qk
    if config.gather == "indices":
        return listed_cache_read(
            problem.total_q, problem.topk, rows, config.row_blocks, width, config.sm_count
        )
    tiles = config.tiles(mean_length(problem.total_q, problem.batch))
    return named_pages_read(tiles, rows, width, problem.page_size)


# Blackwell.


def _blackwell(problem: Problem, target: Target) -> Choice:
    if not problem.aligned_16:
        return Choice(None, UNALIGNED)
    if problem.form == "latent":
        return Choice(None, "the latent form over whole pages has no Blackwell plan")
    return (
        _blackwell_dense(problem, target) if problem.form == "dense" else _blackwell_rows(problem)
    )


def _blackwell_dense(problem: Problem, target: Target) -> Choice:
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype}
    if len(dtypes) > 1 or "fp32" in dtypes:
        return Choice(None, f"operands of {_listed(dtypes)}: Q, K and V must be all of one type")
    qkv_dtype = _LONG_NAMES[problem.q_dtype]
    scale_dtype = "float32" if problem.has_q_scale or problem.has_k_scale else None
    if problem.d_rope == 0:
        return _plain_attention(problem, qkv_dtype, scale_dtype)
    if problem.d_rope != ROPE_DEPTH:
        return Choice(None, f"rope of {problem.d_rope} columns: the kernel multiplies {ROPE_DEPTH}")
    stored = "e4m3" if is_fp8_cache(problem.rope_dtype) else problem.rope_dtype
    if stored not in _LONG_NAMES:
        return Choice(None, f"rope stored as {stored}")
    both_fp8 = stored == problem.q_dtype == "e4m3"
    used = "e4m3" if both_fp8 else "fp16" if problem.q_dtype == "fp16" else "bf16"
    config = select_mla_prefill_config(
        qkv_dtype=qkv_dtype,
        rope_gmem_dtype=_LONG_NAMES[stored],
        rope_mma_dtype=_LONG_NAMES[used],
        scale_dtype=scale_dtype,
        num_q_heads=problem.heads,
        group=1 if problem.rope == "per_head" else problem.heads,
        depth=problem.d_qk,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        v_depth=problem.d_v,
    )
    reason = config.why_unsupported() or why_no_kernel(problem, config)
    return Choice(config if reason else _fewer_query_tiles(config, problem, target), reason)


def _fewer_query_tiles(config: MLAConfig, problem: Problem, target: Target) -> MLAConfig:
    """1Q for short prompts, if its key tile is the same: a request's bits must not depend on it."""
    if config.num_qo == 1 or not config.can_switch_to_1q():
        return config
    if config.rope_gmem_dtype_size < config.rope_mma_dtype_size:
        return config  # waiting for widened rope takes more registers than 1Q's MMA warp has
    one_q = config.switch_1q_config()
    longest = problem.total_q if problem.batch <= 1 else mean_length(problem.total_q, problem.batch)
    short = config.prefer_1q(longest, 1, problem.batch, target.sm_count)
    alike = one_q.BN == config.BN and not why_no_kernel(problem, one_q)
    return one_q if short and alike else config


def _plain_attention(problem: Problem, qkv_dtype: str, scale_dtype: str | None) -> Choice:
    """Without rope the block is plain attention: 2Q, else 1Q, else one accumulator."""
    two_q = FA4Config(
        qkv_dtype=qkv_dtype,
        scale_dtype=scale_dtype,
        num_q_heads=problem.heads,
        group=1,
        qk_depth=problem.d_nope,
        ov_depth=problem.d_v,
        nope_depth=problem.d_nope,
        swizzle_mode=operand_swizzle(qkv_dtype),
        page_size=0,
        is_mla=False,
    )
    single_o = replace(two_q, BM=128, single_o=True)
    tried = (two_q, replace(two_q, BM=128), single_o, replace(single_o, bn_cap=64))
    chosen = next((config for config in tried if config.supported()), two_q)
    return Choice(chosen, chosen.why_unsupported())


def _blackwell_rows(problem: Problem) -> Choice:
    if problem.topk == 0:
        return Choice(None, "top-0: the kernel needs at least one index per token")
    if (problem.d_nope, problem.d_rope, problem.d_v) != (512, 64, 512):
        got = f"{problem.d_nope} + {problem.d_rope} columns with V {problem.d_v}"
        return Choice(None, f"rows of {got}: the kernel gathers 512 + 64 with V 512")
    base = select_mla_sparse_config(num_q_heads=problem.heads, indices_stride=problem.topk)
    if problem.q_dtype == "e4m3" == problem.kv_dtype:
        if problem.has_q_scale or problem.has_k_scale:
            return Choice(None, "the FP8 kernel multiplies without per-token scales")
        shape = base.arguments() | {"qkv_dtype": _LONG_NAMES["e4m3"]}
        fp8 = MLAPrefillSparseQKVFP8(**shape)
        return Choice(fp8, fp8.why_unsupported())
    if problem.has_q_scale or problem.has_k_scale:
        return Choice(None, "per-token scales: the sparse Blackwell kernels have no place for them")
    widened = is_fp8_cache(problem.kv_dtype) or problem.kv_dtype == "e4m3"
    kv_dtype = "bf16" if widened else problem.kv_dtype
    if problem.q_dtype != kv_dtype or kv_dtype not in ("bf16", "fp16"):
        return Choice(None, _mixed_rows(problem))
    shape = base.arguments() | {"qkv_dtype": _LONG_NAMES[kv_dtype]}
    if not widened:
        config = MLAPrefillSparse(**shape)
        return Choice(config, config.why_unsupported())
    widening = MLAPrefillSparseFP8(**shape)
    smem = fp8_cache_smem(widening, problem)
    return Choice(widening, widening.why_unsupported() or smem.why_unsupported())


def fp8_cache_smem(config: MLAPrefillSparseFP8, problem: Problem) -> MLASparseSharedMemoryFP8:
    """The byte map of a sparse block over an FP8 cache: the bf16 one, then the scales."""
    block = scale_block(problem.kv_dtype, problem.d_qk)
    return MLASparseSharedMemoryFP8(scale_block_size=block, **config.arguments())


def scale_block(cache_format: str, width: int) -> int:
    """Columns that share a scale: 64 for fp8_block64, the whole row for fp8_token, 0 for none."""
    special = {"fp8_token": width, "fp8_656": V32_SCALE_BLOCK, "e4m3": 0}
    found = special.get(cache_format)
    return int(cache_format.removeprefix("fp8_block")) if found is None else found


# CDNA4.


def _cdna4(problem: Problem, target: Target) -> Choice:
    if problem.form == "latent":
        return Choice(None, "the latent form over whole pages has no CDNA4 plan")
    if not problem.aligned_16:
        return Choice(None, UNALIGNED)
    if problem.has_q_scale or problem.has_k_scale:
        return Choice(None, "the CDNA4 kernels multiply without per-token scales")
    return _cdna4_dense(problem) if problem.form == "dense" else _cdna4_sparse(problem)


def _cdna4_sparse(problem: Problem) -> Choice:
    from openmla.plan.cdna4 import MlaSparse16

    widened = problem.kv_dtype == "e4m3" or is_fp8_cache(problem.kv_dtype)
    rows_dtype = "bf16" if is_fp8_cache(problem.kv_dtype) else problem.kv_dtype
    if problem.q_dtype != rows_dtype or rows_dtype not in _LONG_NAMES:
        return Choice(None, _mixed_rows(problem))
    if problem.d_v != problem.d_nope:
        return Choice(None, f"d_v {problem.d_v}: V must be all {problem.d_nope} latent columns")
    config = MlaSparse16(
        num_heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        dtype=_LONG_NAMES[problem.out_dtype],
        widened=widened,
    )
    return Choice(config, config.why_unsupported())


def _cdna4_dense(problem: Problem) -> Choice:
    dtypes = _operand_dtypes(problem)
    if len(dtypes) > 1 or not dtypes <= set(_LONG_NAMES):
        return Choice(None, f"operands of {_listed(dtypes)}: all must be of one type")
    if problem.d_nope != problem.d_v:
        return Choice(None, f"d_nope {problem.d_nope} != d_v {problem.d_v}: one depth serves both")
    if problem.d_rope == 0:
        return Choice(None, "no rope: the K slot is laid out with a rope part")
    from openmla.plan.cdna4 import MlaConfigV2, MlaPrefill16, MlaPrefillV2

    fp8 = dtypes == {"e4m3"}
    config = MlaConfigV2(
        q_block_size=32,
        kv_block=128 if fp8 else 64,
        depth=problem.d_v,
        num_heads=problem.heads,
        num_kv_heads=problem.heads,
        d_qk=problem.d_qk,
        d_rope=problem.d_rope,
        cache_depth=CDNA4_ROPE_OFFSET + problem.d_rope,
        rope_cache_offset=CDNA4_ROPE_OFFSET,
        dtype=_LONG_NAMES[problem.q_dtype],
        output_dtype=_LONG_NAMES[problem.out_dtype],
    )
    if not fp8:
        wide = MlaPrefill16(config)
        return Choice(wide, wide.why_unsupported())
    # FP8 weights would be too coarse for the accuracy that every path promises.
    blocks = [MlaPrefillV2(config, v_full_v227=v227, p_dtype="bfloat16") for v227 in (True, False)]
    block = next((b for b in blocks if b.supported()), blocks[0])
    return Choice(block, block.why_unsupported())


def _operand_dtypes(problem: Problem) -> set[str]:
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype}
    return dtypes | {problem.rope_dtype} if problem.d_rope else dtypes


def _mixed_rows(problem: Problem) -> str:
    pair = f"q {problem.q_dtype} with rows of {problem.kv_dtype}"
    return f"{pair}: both must be bf16 or both fp16"


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))


_CHOOSERS: dict[str, Callable[[Problem, Target], Choice]] = {
    "reference": _reference,
    "cpu": _cpu,
    "portable": _portable,
    "hopper": _hopper,
    "blackwell": _blackwell,
    "cdna4": _cdna4,
}
