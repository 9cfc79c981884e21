"""The Blackwell family: Gluon kernels for sm_100, dense and sparse."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from openmla.errors import Unsupported
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.kernel import DenseKernel, why_no_kernel
from openmla.planning.blackwell.mla import (
    ROPE_DEPTH,
    MLAConfig,
    MLAPairConfig,
    pair_of,
    select_mla_prefill_config,
)
from openmla.planning.blackwell.sparse.family import COARSE, SPARSE_KERNELS
from openmla.planning.blackwell.units import FIRST_DENSE_PAIR, operand_swizzle
from openmla.planning.dequantize import mean_length
from openmla.planning.family import Family, Kernel
from openmla.planning.serves import (
    ALIGNED,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
    LONG_NAMES,
    MOST_PAGE_ROWS,
    Allowed,
    Field,
    OneOf,
    Range,
    Serves,
    alike,
    either,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS, Problem

Dense = TypeVar("Dense", MLAConfig, FA4Config)
# Tokens from which on work items of 512 rows are predicted to be faster than those of 256 (of the
# peak, 128 heads: 57 and 55 % at 2048 tokens, 32 and 34 % at 1024; `openmla explain`, 2026-11-16).
PAIR_PROMPT = 2048

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


def _mla_pair(problem: Problem, target: Target) -> MLAPairConfig:
    """Two CTAs that share K and V, for prompts that fill several of their work items."""
    config = _mla(problem, target)
    if config.num_qo == 1 or mean_length(problem.total_q, problem.batch) < PAIR_PROMPT:
        raise Unsupported(f"a pair of CTAs serves prompts of {PAIR_PROMPT} tokens or more")
    return pair_of(config)


def _scale_dtype(problem: Problem) -> str | None:
    return "float32" if problem.has_q_scale or problem.has_k_scale else None


def _fewer_query_tiles(config: Dense, problem: Problem, target: Target) -> Dense:
    """1Q for short prompts, if its key tile is the same: a request's bits must not depend on it."""
    if config.num_qo == 1 or not config.can_switch_to_1q():
        return config
    mla = config if isinstance(config, MLAConfig) else None
    if mla and mla.rope_gmem_dtype_size < mla.rope_mma_dtype_size:
        return config  # waiting for dequantized rope takes more registers than 1Q's MMA warp has
    one_q = config.switch_1q_config()
    longest = problem.total_q if problem.batch <= 1 else mean_length(problem.total_q, problem.batch)
    short = config.prefer_1q(longest, 1, problem.batch, target.sm_count)
    alike = one_q.BN == config.BN and not why_no_kernel(one_q)
    return one_q if short and alike else config


# Dense, without rope.


def _fa4(problem: Problem, target: Target) -> FA4Config:
    """Plain attention: 2Q, else 1Q, else one accumulator; tiles of 128 or 64 keys.

    `group` is 1: FA4Config plans query heads that share K and V, a call cannot have them, since its
    K and V are of as many heads as q.
    """
    qkv_dtype = LONG_NAMES[problem.q_dtype]
    two_q = FA4Config(
        qkv_dtype=qkv_dtype, scale_dtype=_scale_dtype(problem), num_q_heads=problem.heads, group=1,
        qk_depth=problem.d_nope, ov_depth=problem.d_v, nope_depth=problem.d_nope,
        swizzle_mode=operand_swizzle(qkv_dtype), page_size=0, is_mla=False, bn_cap=128,
    )  # fmt: skip
    single_o = replace(two_q, BM=128, single_o=True)
    tried = (two_q, replace(two_q, BM=128), single_o, replace(single_o, bn_cap=64))
    reasons = [config.why_unsupported() or why_no_kernel(config) for config in tried]
    if "" not in reasons:
        raise Unsupported(reasons[0])
    return _fewer_query_tiles(tried[reasons.index("")], problem, target)


_EVERY_DENSE = {
    "form": OneOf("dense"),
    "heads": Range(1, MAX_HEADS),
    **either("causal", "has_sink", "has_q_scale", "has_k_scale", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_WITH_ROPE: Mapping[Field, Allowed] = {
    "d_nope": OneOf(64, 128, 192, 256, 320, 384),
    "d_rope": OneOf(ROPE_DEPTH),
    "d_v": OneOf(64, 128, 256),
    "rope": OneOf("shared", "per_head", "cache"),
    "page_size": Range(0, MOST_PAGE_ROWS),
}
_WITHOUT_ROPE: Mapping[Field, Allowed] = {
    "d_nope": OneOf(64, 128, 192, 256),
    "d_rope": OneOf(0),
    "d_v": OneOf(64, 128, 256),
    "rope": OneOf("none"),
}


_OF_A_PAIR: Mapping[Field, Allowed] = {
    "d_nope": OneOf(128),
    "d_rope": OneOf(ROPE_DEPTH),
    "d_v": OneOf(128),
    "rope": OneOf("shared", "per_head"),
    "has_q_scale": OneOf(False),
    "has_k_scale": OneOf(False),
}


def _not_compiled(problem: Problem, triton: tuple[int, ...]) -> str:
    """An output of 256 columns begins behind 128 columns of scores."""
    tiles = "tensor memory is sliced only between whole tiles"
    return tiles if triton[:2] == (3, 8) and problem.d_v > 128 else ""


def _dense(
    name: str, widths: Mapping[Field, Allowed], *dtypes: tuple[str, ...], coarse: str = ""
) -> Kernel:
    with_rope, pair = "page_size" in widths, widths is _OF_A_PAIR
    choose = _mla_pair if pair else _mla if with_rope else _fa4
    return Kernel(
        name=name,
        serves=Serves({**_EVERY_DENSE, **widths, DTYPES: OneOf(*dtypes)}),
        config=MLAPairConfig if pair else MLAConfig if with_rope else FA4Config,
        choose=choose,
        not_compiled=_not_compiled,
        first_triton=FIRST_DENSE_PAIR if pair else (0, 0),
        launcher="openmla.kernels.blackwell.dense.launch",
        block=lambda config, problem: DenseKernel(config, problem).block,
        explain=lambda config, problem: DenseKernel(config, problem).explain(),
        coarse=coarse,
    )


_16_BITS = alike("bf16", "fp16")
BLACKWELL = Family(
    name="blackwell",
    archs=("sm_100", "sm_103"),
    kernels=(
        _dense("dense_pair", _OF_A_PAIR, *alike("bf16", "fp16")),
        # The rope of an FP8 cache is dequantized to bf16, if it is not bf16 already.
        _dense(
            "dense",
            _WITH_ROPE,
            *_16_BITS,
            *(("bf16", "bf16", "bf16", name) for name in GLUON_CACHES),
        ),
        _dense(
            "dense_fp8", _WITH_ROPE, *alike("e4m3"), ("e4m3", "e4m3", "e4m3", "bf16"), coarse=COARSE
        ),
        _dense("dense_no_rope", _WITHOUT_ROPE, *_16_BITS),
        _dense("dense_no_rope_fp8", _WITHOUT_ROPE, *alike("e4m3"), coarse=COARSE),
        *SPARSE_KERNELS,
    ),
)
