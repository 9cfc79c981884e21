"""The kernels of the Blackwell family over latent rows: a CTA pair, one CTA, FP8 rows, all FP8."""

from collections.abc import Callable, Mapping

from openmla.modular.blackwell.sparse.shape import CTA_HEADS
from openmla.planning.blackwell.pairs import FIRST_ROWS_PAIR
from openmla.planning.blackwell.sparse.kernel import SparseConfig, SparseKernel, sparse_config
from openmla.planning.blackwell.sparse.pair import (
    PairConfig,
    PairKernel,
    pair_config,
    pair_config_once,
)
from openmla.planning.family import Kernel
from openmla.planning.serves import (
    ALIGNED,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
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
_MORE_HEADS = Range(CTA_HEADS + 1, MAX_HEADS)


def _one_cta_fails(problem: Problem, triton: tuple[int, ...]) -> str:
    """One CTA stages the query tiles for tensor memory over 8 of the 9 tiles of K."""
    equal = "shared memory is reinterpreted only as tiles of equal size"
    return equal if triton[:2] == (3, 8) else ""


def _serves(form: str, heads: Range, *dtypes: tuple[str, ...]) -> Serves:
    return Serves({**_FORMS[form], "heads": heads, DTYPES: OneOf(*dtypes), "rope": OneOf("shared")})


def _pair(
    name: str,
    form: str,
    dtypes: Dtypes,
    choose: Callable[[Problem, Target], PairConfig] = pair_config,
    heads: Range = _MORE_HEADS,
    coarse: str = "",
) -> Kernel:
    """A pair of CTAs, for more than 64 heads."""
    return Kernel(
        name=name,
        config=PairConfig,
        serves=_serves(form, heads, *dtypes),
        choose=choose,
        launcher="openmla.kernels.blackwell.rows_launch",
        block=lambda config, problem: PairKernel(config, problem).block,
        explain=lambda config, problem: PairKernel(config, problem).explain(),
        first_triton=FIRST_ROWS_PAIR,
        coarse=coarse,
    )


def _one_cta(name: str, form: str, dtypes: Dtypes) -> Kernel:
    """Any number of heads, by CTAs of 64 each."""
    return Kernel(
        name=name,
        config=SparseConfig,
        serves=_serves(form, _HEADS, *dtypes),
        choose=sparse_config,
        launcher="openmla.kernels.blackwell.rows_launch",
        block=lambda config, problem: SparseKernel(config, problem).block,
        explain=lambda config, problem: SparseKernel(config, problem).explain(),
        not_compiled=_one_cta_fails,
    )


_BF16, _16_BITS = alike("bf16"), alike("bf16", "fp16")
_FP8_ROWS = tuple(("bf16", name, name, name) for name in ("e4m3", *GLUON_CACHES))
_FP8_CACHES = _FP8_ROWS[1:]
COARSE = "its weights are FP8 too: those below 2^-17 of a row's largest are lost"
SPARSE_KERNELS = (
    _pair("sparse_pair", "sparse", _16_BITS),
    _one_cta("sparse", "sparse", _16_BITS),
    _pair("sparse_fp8_rows_pair", "sparse", _FP8_CACHES, pair_config_once),
    _one_cta("sparse_fp8_rows", "sparse", _FP8_ROWS),
    _pair("latent_pair", "latent", _BF16),
    _one_cta("latent", "latent", _BF16),
    _pair("latent_fp8_rows_pair", "latent", _FP8_CACHES, pair_config_once),
    _one_cta("latent_fp8_rows", "latent", _FP8_CACHES),
    _pair("sparse_fp8", "sparse", alike("e4m3"), heads=_HEADS, coarse=COARSE),
)
