"""The Blackwell family: Gluon kernels for sm_100, dense and sparse."""

from dataclasses import replace

from openmla.errors import Unsupported
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.kernel import DenseKernel, columns_of, why_no_kernel
from openmla.planning.blackwell.mla import ROPE_DEPTH, MLAConfig, select_mla_prefill_config
from openmla.planning.blackwell.smem import SM100AttentionSMem
from openmla.planning.blackwell.sparse.family import SPARSE_KERNELS
from openmla.planning.blackwell.units import SMEM_CARVEOUT, TMEM_ADDR_BYTES, operand_swizzle
from openmla.planning.dequantize import mean_length
from openmla.planning.family import Block, Family, Kernel, Pipeline
from openmla.planning.memory import MemoryMap, Wanted, lay_out
from openmla.planning.serves import (
    ALIGNED,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
    LONG_NAMES,
    MOST_PAGE_ROWS,
    OneOf,
    Range,
    Serves,
    alike,
    either,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS, ROPE_SOURCES, Problem

# Dense, with rope.


def _mla(problem: Problem, target: Target) -> MLAConfig:
    qkv = problem.q_dtype
    stored = "e4m3" if problem.rope_dtype in GLUON_CACHES else problem.rope_dtype
    used = qkv if stored == qkv else "bf16"
    config = select_mla_prefill_config(
        qkv_dtype=LONG_NAMES[qkv], rope_gmem_dtype=LONG_NAMES[stored],
        rope_mma_dtype=LONG_NAMES[used], scale_dtype=_scale_dtype(problem),
        num_q_heads=problem.heads, group=1 if problem.rope == "per_head" else problem.heads,
        depth=problem.d_qk, page_size=problem.page_size if problem.rope == "cache" else 0,
        v_depth=problem.d_v,
    )  # fmt: skip
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


# Dense, without rope: planned.


def _fa4(problem: Problem, target: Target) -> FA4Config:
    """Plain attention: 2Q, else 1Q, else one accumulator."""
    qkv_dtype = LONG_NAMES[problem.q_dtype]
    two_q = FA4Config(
        qkv_dtype=qkv_dtype, scale_dtype=_scale_dtype(problem), num_q_heads=problem.heads, group=1,
        qk_depth=problem.d_nope, ov_depth=problem.d_v, nope_depth=problem.d_nope,
        swizzle_mode=operand_swizzle(qkv_dtype), page_size=0, is_mla=False,
    )  # fmt: skip
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
        tile_rows=config.BM, tile_keys=config.BN, stages=ring, threads=config.num_threads,
        memory=_dense_map(config), tensor_memory=columns_of(config),
        pipeline=Pipeline(
            groups, rows, config.BN, *widths, ring, v_slots, shares_keys=config.num_qo == 2
        ),
    )  # fmt: skip


def _dense_map(config: FA4Config) -> MemoryMap:
    """Of the original: there is no kernel yet."""
    smem = SM100AttentionSMem(config)
    sizes = {
        ("Q", "q"): smem.q_bytes,
        ("K and V", "k"): smem.kv_bytes,
        ("correction", "stats"): smem.correction_bytes,
        ("scales", "stats"): smem.q_scale_bytes + smem.k_scale_bytes,
        ("barriers, TMEM address", "barriers"): smem.mbar_bytes + TMEM_ADDR_BYTES,
        ("reserved", "scratch"): config.smem_used - smem.smem_size(),
    }
    return lay_out([Wanted(*what, size, align=1) for what, size in sizes.items()], SMEM_CARVEOUT)


_EVERY_DENSE = {
    "form": OneOf("dense"),
    "heads": Range(1, MAX_HEADS),
    **either("causal", "has_sink", "has_q_scale", "has_k_scale", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_WITHOUT_ROPE = {
    **_EVERY_DENSE,
    "d_nope": Range(64, 256, 8),
    "d_rope": OneOf(0),
    "d_v": Range(8, 384, 8),
    DTYPES: OneOf(*alike("bf16", "fp16", "e4m3")),
    "rope": OneOf(*ROPE_SOURCES),
}


def _with_rope(*dtypes: tuple[str, ...], coarse: str = "") -> Kernel:
    served = {
        **_EVERY_DENSE,
        "d_nope": OneOf(64, 128, 192, 256, 320, 384),
        "d_rope": OneOf(ROPE_DEPTH),
        "d_v": OneOf(64, 128, 256),
        DTYPES: OneOf(*dtypes),
        "rope": OneOf("shared", "per_head", "cache"),
        "page_size": Range(0, MOST_PAGE_ROWS),
    }
    return Kernel(
        serves=Serves(served),
        config=MLAConfig,
        choose=_mla,
        launcher="openmla.kernels.blackwell.dense.launch",
        block=lambda config, problem: DenseKernel(config, problem).block,
        explain=lambda config, problem: DenseKernel(config, problem).explain(),
        coarse=coarse,
    )


BLACKWELL = Family(
    name="blackwell",
    archs=("sm_100", "sm_103"),
    kernels=(
        # The rope of an FP8 cache is dequantized to bf16, if it is not bf16 already.
        _with_rope(
            *alike("bf16", "fp16"), *(("bf16", "bf16", "bf16", name) for name in GLUON_CACHES)
        ),
        _with_rope(
            *alike("e4m3"),
            ("e4m3", "e4m3", "e4m3", "bf16"),
            coarse="its weights are FP8 too: those below 2^-17 of a row's largest are lost",
        ),
        Kernel(serves=Serves(_WITHOUT_ROPE), config=FA4Config, choose=_fa4, block=_fa4_block),
        *SPARSE_KERNELS,
    ),
)
