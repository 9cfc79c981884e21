"""The Blackwell family: Gluon kernels for sm_100, dense and sparse."""

from __future__ import annotations

from dataclasses import replace

from openmla.errors import Unsupported
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.kernel import why_no_kernel
from openmla.planning.blackwell.mla import ROPE_DEPTH, MLAConfig, select_mla_prefill_config
from openmla.planning.blackwell.smem import SM100AttentionSMem
from openmla.planning.blackwell.sparse.family import SPARSE_KERNELS
from openmla.planning.blackwell.units import SMEM_CARVEOUT, TMEM_ADDR_BYTES, operand_swizzle
from openmla.planning.dequantize import mean_length
from openmla.planning.family import Block, Family, Kernel, Pipeline
from openmla.planning.memory import Columns, MemoryMap, Wanted, lay_out
from openmla.planning.serves import (
    ALIGNED,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
    YES_OR_NO,
    OneOf,
    Range,
    Serves,
    alike,
)
from openmla.planning.split import query_tile_lines
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS, ROPE_SOURCES, Problem

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}
MOST_PAGE_ROWS = 1024

# Dense, with rope.


def _mla(problem: Problem, target: Target) -> MLAConfig:
    qkv = problem.q_dtype
    stored = "e4m3" if problem.rope_dtype in GLUON_CACHES else problem.rope_dtype
    used = qkv if stored == qkv else "bf16"
    config = select_mla_prefill_config(
        qkv_dtype=_LONG_NAMES[qkv],
        rope_gmem_dtype=_LONG_NAMES[stored],
        rope_mma_dtype=_LONG_NAMES[used],
        scale_dtype=_scale_dtype(problem),
        num_q_heads=problem.heads,
        group=1 if problem.rope == "per_head" else problem.heads,
        depth=problem.d_qk,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        v_depth=problem.d_v,
    )
    reason = config.why_unsupported() or why_no_kernel(config)
    if reason:
        raise Unsupported(reason)
    return _fewer_query_tiles(config, problem, target)


def _scale_dtype(problem: Problem) -> str | None:
    return "float32" if problem.has_q_scale or problem.has_k_scale else None


def _fewer_query_tiles(config: MLAConfig, problem: Problem, target: Target) -> MLAConfig:
    """1Q for short prompts, if its key tile is the same: a request's bits must not depend on it."""
    if config.num_qo == 1 or not config.can_switch_to_1q():
        return config
    if config.rope_gmem_dtype_size < config.rope_mma_dtype_size:
        return config  # waiting for dequantized rope takes more registers than 1Q's MMA warp has
    one_q = config.switch_1q_config()
    longest = problem.total_q if problem.batch <= 1 else mean_length(problem.total_q, problem.batch)
    short = config.prefer_1q(longest, 1, problem.batch, target.sm_count)
    alike = one_q.BN == config.BN and not why_no_kernel(one_q)
    return one_q if short and alike else config


def _mla_block(config: MLAConfig, problem: Problem) -> Block:
    block = _fa4_block(config.fa4_config, problem)
    return replace(block, threads=config.launch_num_threads())


def _mla_lines(config: MLAConfig, problem: Problem) -> list[str]:
    lines = config.explain()
    if config.num_qo == 1 and not config.single_o:
        lines += query_tile_lines(problem, config.BM)
    return lines


# Dense, without rope: planned.


def _fa4(problem: Problem, target: Target) -> FA4Config:
    """Plain attention: 2Q, else 1Q, else one accumulator."""
    qkv_dtype = _LONG_NAMES[problem.q_dtype]
    two_q = FA4Config(
        qkv_dtype=qkv_dtype,
        scale_dtype=_scale_dtype(problem),
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
    return next((config for config in tried if config.supported()), two_q)


def _fa4_block(config: FA4Config, problem: Problem) -> Block:
    ring = config.num_kv_stages
    widths = config.qk_depth, config.ov_depth, config.qkv_dtype_size
    v_slots = -1 if config.use_fused_kv else ring
    groups = 1 if config.single_o else 2
    rows = config.BM // config.num_qo
    return Block(
        tile_rows=config.BM,
        tile_keys=config.BN,
        stages=ring,
        threads=config.num_threads,
        memory=_dense_map(config),
        tensor_memory=_dense_columns(config),
        pipeline=Pipeline(
            groups, rows, config.BN, *widths, ring, v_slots, shares_keys=config.num_qo == 2
        ),
    )


def _dense_map(config: FA4Config) -> MemoryMap:
    smem = SM100AttentionSMem(config)
    stages = range(config.num_kv_stages)
    wanted = [
        Wanted("Q nope", "q", smem.q_nope_bytes, align=1),
        Wanted("Q rope", "q", smem.q_rope_bytes, align=1),
    ]
    if config.use_fused_kv:
        wanted += [Wanted(f"slot {i}: K or V", "k", smem.k_stage_bytes, align=1) for i in stages]
        each = smem.rope_bytes // max(smem.num_rope_bufs, 1)
        wanted += [Wanted(f"K rope {i}", "rope", each, align=1) for i in range(smem.num_rope_bufs)]
    else:
        wanted += [Wanted(f"K{i}", "k", smem.k_stage_bytes, align=1) for i in stages]
        wanted += [Wanted(f"V{i}", "v", smem.v_stage_bytes, align=1) for i in stages]
    wanted += [
        Wanted("correction", "stats", smem.correction_bytes, align=1),
        Wanted("Q scales", "stats", smem.q_scale_bytes, align=1),
        Wanted("K scales", "stats", smem.k_scale_bytes, align=1),
        Wanted("barriers", "barriers", smem.mbar_bytes, align=1),
        Wanted("TMEM address", "barriers", TMEM_ADDR_BYTES, align=1),
        Wanted("reserved", "scratch", config.smem_used - smem.smem_size(), align=1),
    ]
    return lay_out(wanted, SMEM_CARVEOUT)


def _dense_columns(config: FA4Config) -> tuple[Columns, ...]:
    score, out = config.TMEM_S1, config.padded_ov_depth
    scores = Columns("S0, then P0", 0, score), Columns("S1, then P1", score, score)
    if config.single_o:
        return (*scores, Columns("O", config.TMEM_O0, out))
    return (*scores, Columns("O0", config.TMEM_O0, out), Columns("O1", config.TMEM_O1, out))


_EVERY_DENSE = {
    "form": OneOf("dense"),
    "heads": Range(1, MAX_HEADS),
    "causal": YES_OR_NO,
    "has_sink": YES_OR_NO,
    "has_q_scale": YES_OR_NO,
    "has_k_scale": YES_OR_NO,
    "wants_lse": YES_OR_NO,
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_WITH_ROPE = (
    *alike("bf16", "fp16"),
    # The rope of an FP8 cache is dequantized to bf16, if it is not bf16 already.
    *(("bf16", "bf16", "bf16", name) for name in GLUON_CACHES),
)
BLACKWELL = Family(
    name="blackwell",
    archs=("sm_100", "sm_103"),
    kernels=(
        Kernel(
            serves=Serves(
                {
                    **_EVERY_DENSE,
                    "d_nope": OneOf(64, 128, 192, 256, 320, 384),
                    "d_rope": OneOf(ROPE_DEPTH),
                    "d_v": OneOf(64, 128, 256),
                    DTYPES: OneOf(*_WITH_ROPE),
                    "rope": OneOf("shared", "per_head", "cache"),
                    "page_size": Range(0, MOST_PAGE_ROWS),
                }
            ),
            config=MLAConfig,
            choose=_mla,
            launcher="openmla.kernels.blackwell.dense.launch",
            block=_mla_block,
            explain=_mla_lines,
        ),
        Kernel(
            serves=Serves(
                {
                    **_EVERY_DENSE,
                    "d_nope": OneOf(64, 128, 192, 256, 320, 384),
                    "d_rope": OneOf(ROPE_DEPTH),
                    "d_v": OneOf(64, 128, 256),
                    DTYPES: OneOf(*alike("e4m3"), ("e4m3", "e4m3", "e4m3", "bf16")),
                    "rope": OneOf("shared", "per_head", "cache"),
                    "page_size": Range(0, MOST_PAGE_ROWS),
                }
            ),
            config=MLAConfig,
            choose=_mla,
            launcher="openmla.kernels.blackwell.dense.launch",
            block=_mla_block,
            explain=_mla_lines,
            coarse="its weights are FP8 too: those below 2^-17 of a row's largest are lost",
        ),
        Kernel(
            serves=Serves(
                {
                    **_EVERY_DENSE,
                    "d_nope": Range(64, 256, 8),
                    "d_rope": OneOf(0),
                    "d_v": Range(8, 384, 8),
                    DTYPES: OneOf(*alike("bf16", "fp16", "e4m3")),
                    "rope": OneOf(*ROPE_SOURCES),
                }
            ),
            config=FA4Config,
            choose=_fa4,
            block=_fa4_block,
        ),
        *SPARSE_KERNELS,
    ),
)
