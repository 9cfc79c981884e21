"""The sparse kernels of the Blackwell family: a CTA pair, one CTA, FP8 rows, FP8 throughout."""

from collections.abc import Callable, Mapping
from typing import Any

from openmla.errors import Unsupported
from openmla.planning.arithmetic import round_up
from openmla.planning.blackwell.sparse.kernel import SparseKernel, layout_of
from openmla.planning.blackwell.sparse.pair import PairKernel, takes_pair
from openmla.planning.blackwell.sparse.prefill import (
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    select_mla_sparse_config,
)
from openmla.planning.blackwell.sparse.qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.planning.blackwell.sparse.shape import CTA_HEADS, HEAD_STEP, PAIR_HEADS
from openmla.planning.blackwell.sparse.smem import MLASparseSharedMemoryFP8
from openmla.planning.blackwell.units import FIRST_ROWS_PAIR
from openmla.planning.dequantize import WORKSPACE_CAP
from openmla.planning.family import Kernel
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

Dtypes = tuple[tuple[str, ...], ...]


def _arguments(problem: Problem) -> dict[str, Any]:
    """Of the plan for as many heads as the original has a kernel for: the others are padding, which
    TMA fills with zeros and does not store."""
    heads = PAIR_HEADS if problem.heads > CTA_HEADS else round_up(problem.heads, HEAD_STEP)
    topk = max(problem.topk, 1)  # pages have no lists
    return select_mla_sparse_config(num_q_heads=heads, indices_stride=topk).arguments()


def _pair(problem: Problem, target: Target) -> MLAPrefillSparse:
    return MLAPrefillSparse(**_arguments(problem) | {"qkv_dtype": LONG_NAMES[problem.q_dtype]})


def _one_cta(problem: Problem, target: Target) -> MLAPrefillSparse:
    return _pair(problem, target).one_cta()


def _dequantized_once(problem: Problem, target: Target) -> MLAPrefillSparseFP8:
    """A pair over rows that were dequantized before, if a workspace may hold all of the cache: a
    question of the cache alone, since other kernels give other bits."""
    config = MLAPrefillSparseFP8(**_pair(problem, target).arguments())
    workspace = problem.total_k * config.qk_depth * 2
    if workspace > WORKSPACE_CAP:
        rows = f"{problem.total_k} rows of {2 * config.qk_depth} bytes"
        raise Unsupported(f"a workspace of {rows} = {workspace} would exceed {WORKSPACE_CAP}")
    return config


def _dequantized(problem: Problem, target: Target) -> MLAPrefillSparseFP8:
    """In the kernel, by one CTA; also for 128 heads where no workspace or pair is to be had."""
    config = MLAPrefillSparseFP8(**_one_cta(problem, target).arguments())
    block = layout_of(problem).block
    smem = MLASparseSharedMemoryFP8(scale_block_size=block, **config.arguments())
    reason = config.why_unsupported() or smem.why_unsupported()
    if reason:
        raise Unsupported(reason)
    return config


def _all_fp8(problem: Problem, target: Target) -> MLAPrefillSparseQKVFP8:
    return MLAPrefillSparseQKVFP8(**_arguments(problem) | {"qkv_dtype": LONG_NAMES["e4m3"]})


_EVERY = {
    ("d_nope", "d_rope", "d_v"): OneOf((512, 64, 512)),
    **either("causal", "has_sink", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_FORMS: Mapping[str, Mapping[Field, Allowed]] = {
    "sparse": {
        "form": OneOf("sparse"),
        **_EVERY,
        "page_size": Range(0, MOST_PAGE_ROWS),
        "topk": Range(1),
        **either("has_topk_lengths", "wants_max_logits"),
    },
    "latent": {"form": OneOf("latent"), **_EVERY, "page_size": Range(1, MOST_PAGE_ROWS)},
}
_HEADS = Range(1, MAX_HEADS)


def _one_cta_fails(problem: Problem, triton: tuple[int, ...]) -> str:
    """One CTA stages the query tiles for tensor memory over 8 of the 9 tiles of K."""
    equal = "shared memory is reinterpreted only as tiles of equal size"
    return equal if triton[:2] == (3, 8) else ""


def _serves(form: str, heads: Range, *dtypes: tuple[str, ...]) -> Serves:
    return Serves({**_FORMS[form], "heads": heads, DTYPES: OneOf(*dtypes), "rope": OneOf("shared")})


def _kernel(
    name: str, config: type, form: str, heads: Range, dtypes: Dtypes, **more: Any
) -> Kernel:
    return Kernel(
        name=name,
        config=config,
        serves=_serves(form, heads, *dtypes),
        launcher="openmla.kernels.blackwell.rows_launch",
        block=lambda config, problem: _made(config, problem).block,
        explain=lambda config, problem: _made(config, problem).explain(),
        **more,
    )


def _pair_kernel(
    name: str, config: type, form: str, dtypes: Dtypes, choose: Callable[[Problem, Target], Any]
) -> Kernel:
    """More than 64 heads, by a pair of CTAs."""
    return _kernel(name, config, form, _PAIR, dtypes, choose=choose, first_triton=FIRST_ROWS_PAIR)


def _cta_kernel(
    name: str, config: type, form: str, dtypes: Dtypes, choose: Callable[[Problem, Target], Any]
) -> Kernel:
    """Any number of heads, by CTAs of 64 each."""
    return _kernel(name, config, form, _HEADS, dtypes, choose=choose, not_compiled=_one_cta_fails)


def _made(config: Any, problem: Problem) -> PairKernel | SparseKernel:
    return (PairKernel if takes_pair(config) else SparseKernel)(config, problem)


_BF16, _16_BITS = alike("bf16"), alike("bf16", "fp16")
_FP8_ROWS = tuple(("bf16", name, name, name) for name in ("e4m3", *GLUON_CACHES))
_FP8_CACHES = _FP8_ROWS[1:]
_PAIR = Range(CTA_HEADS + 1, MAX_HEADS)
COARSE = "its weights are FP8 too: those below 2^-17 of a row's largest are lost"
SPARSE_KERNELS = (
    _pair_kernel("sparse_pair", MLAPrefillSparse, "sparse", _16_BITS, _pair),
    _cta_kernel("sparse", MLAPrefillSparse, "sparse", _16_BITS, _one_cta),
    _pair_kernel(
        "sparse_fp8_rows_pair", MLAPrefillSparseFP8, "sparse", _FP8_CACHES, _dequantized_once
    ),
    _cta_kernel("sparse_fp8_rows", MLAPrefillSparseFP8, "sparse", _FP8_ROWS, _dequantized),
    _pair_kernel("latent_pair", MLAPrefillSparse, "latent", _BF16, _pair),
    _cta_kernel("latent", MLAPrefillSparse, "latent", _BF16, _one_cta),
    _pair_kernel(
        "latent_fp8_rows_pair", MLAPrefillSparseFP8, "latent", _FP8_CACHES, _dequantized_once
    ),
    _cta_kernel("latent_fp8_rows", MLAPrefillSparseFP8, "latent", _FP8_CACHES, _dequantized),
    _kernel(
        "sparse_fp8",
        MLAPrefillSparseQKVFP8,
        "sparse",
        _HEADS,
        alike("e4m3"),
        choose=_all_fp8,
        coarse=COARSE,
        first_triton=FIRST_ROWS_PAIR,
    ),
)
