"""The Blackwell family: Gluon kernels for sm_100: dense and its gradients, latent, the indexer."""

from collections.abc import Callable, Mapping
from typing import Any

from openmla.arithmetic import Limit
from openmla.formats import V4
from openmla.kernels.blackwell.backward.plan import BLACKWELL_BACKWARD
from openmla.kernels.blackwell.dense.plan import (
    FIRST_DENSE_PAIR,
    PAIR_PROMPT,
    ROPE_COLUMNS,
    DenseConfig,
    dense_config,
    dense_pair_config,
)
from openmla.kernels.blackwell.dense.resources import DenseKernel
from openmla.kernels.blackwell.indexer.plan import INDEX_KERNELS
from openmla.kernels.blackwell.pair.plan import (
    FIRST_ROWS_PAIR,
    PairConfig,
    PairKernel,
    can_split,
    joins,
    pair_config,
    pair_config_dequantized,
    pair_config_joined,
    why_slow_for_large_pools,
)
from openmla.kernels.blackwell.sparse.plan import SparseConfig, SparseKernel, sparse_config
from openmla.modular.blackwell.sparse.shape import CTA_HEADS
from openmla.planning.family import Family, Kernel
from openmla.planning.latent_split import SHORT, why_slower_unsplit
from openmla.planning.serves import (
    ALIGNED,
    ANY,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
    MOST_PAGE_ROWS,
    SECOND,
    Allowed,
    Field,
    OneOf,
    Range,
    Second,
    Serves,
    alike,
    either,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS, Problem

COARSE = "its weights are FP8 too: those below 2^-17 of a row's largest are lost"

# Dense.

# Rows of a page that rope comes from. A tile of 64 or 128 keys is whole pages or a part of one, and
# a page is whole swizzle patterns of 8 rows.
_PAGES = OneOf(
    *(0, 8, 16, 32, *range(64, MOST_PAGE_ROWS + 1, 64)),
    why="pages of 8, 16, 32 or a multiple of 64 rows are served",
)

_EVERY_DENSE = {
    "form": OneOf("dense"),
    "heads": Range(1, MAX_HEADS),
    **either("causal", "has_sink", "has_q_scale", "has_k_scale", "wants_lse"),
    **either("has_key_mask", "has_k_start", "fp32_out"),
    "group": Range(1, MAX_HEADS),
    "window": ANY,
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_WINDOW_OF_ROWS: Limit[Problem] = Limit(
    lambda p: not p.window or (p.rope != "cache" and not p.has_key_mask),
    lambda p: "a window beside pages or a key mask: its blocks begin at any key, theirs do not",
)
_LONG_WINDOWS: Limit[Problem] = Limit(
    lambda p: not p.window or p.window >= PAIR_PROMPT,
    lambda p: f"a pair of CTAs serves windows of {PAIR_PROMPT} keys or more",
)
_WIDTHS = ("d_nope", "d_v")
# Narrower rope of 16 bits: a box of 64 columns fills with zeros behind it.
_16_BIT_ROPE = OneOf(ROPE_COLUMNS // 2, ROPE_COLUMNS)
_WITH_ROPE: Mapping[Field, Allowed] = {
    "d_rope": OneOf(ROPE_COLUMNS),
    "rope": OneOf("shared", "per_head", "cache"),
    "page_size": _PAGES,
}
_WITHOUT_ROPE: Mapping[Field, Allowed] = {
    "d_rope": OneOf(0),
    "d_nope": OneOf(64, 128, 192, 256),
    "d_v": OneOf(64, 128, 256),
    "rope": OneOf("none"),
}
# (d_nope, d_v) with rope. 192 columns are two tiles of K, which then needs a ring of its own: that
# of 64 or 128 columns of V would be shared.
_16_BIT_WIDTHS = (
    *((64, 64), (64, 128), (64, 256)),
    *((128, 64), (128, 128), (128, 256)),
    (192, 256),
    *((256, 64), (256, 128), (256, 256)),
)
_16_BITS_WITH_ROPE: Mapping[Field, Allowed] = {
    **_WITH_ROPE,
    "d_rope": _16_BIT_ROPE,
    _WIDTHS: OneOf(*_16_BIT_WIDTHS),
}
_ROPE_OF_FP8_ROWS: Limit[Problem] = Limit(
    lambda p: p.d_rope == ROPE_COLUMNS or p.rope_dtype not in GLUON_CACHES,
    lambda p: f"d_rope {p.d_rope} of {p.rope_dtype} rows: {ROPE_COLUMNS} is served",
)
_FP8_WITH_ROPE: Mapping[Field, Allowed] = {
    **_WITH_ROPE,
    "d_nope": Range(64, 384, 64),
    "d_v": OneOf(64, 128, 256),
    "rope_dtype": OneOf("e4m3", "bf16"),
}
_OF_A_PAIR: Mapping[Field, Allowed] = {
    "rope": OneOf("shared", "per_head"),
    "d_rope": _16_BIT_ROPE,
    _WIDTHS: OneOf((128, 128)),
    "has_q_scale": OneOf(False),
    "has_k_scale": OneOf(False),
    "has_key_mask": OneOf(False),  # its words would be registers that a pair does not have
}


def _not_compiled(problem: Problem, triton: tuple[int, ...]) -> str:
    """An output of 256 columns begins behind 128 columns of scores."""
    tiles = "tensor memory is sliced only between whole tiles"
    return tiles if triton[:2] == (3, 8) and problem.d_v > 128 else ""


def _dense(
    name: str,
    served: Mapping[Field, Allowed],
    choose: Callable[[Problem, Target], DenseConfig] = dense_config,
    limits: tuple[Limit[Problem], ...] = (),
    **more: Any,
) -> Kernel:
    return Kernel(
        name=name,
        serves=Serves(served, (*limits, _WINDOW_OF_ROWS)),
        config=DenseConfig,
        choose=choose,
        not_compiled=_not_compiled,
        launcher="openmla.kernels.blackwell.dense.launch",
        block=lambda config, problem: DenseKernel(config, problem).block,
        explain=lambda config, problem: DenseKernel(config, problem).explain(),
        **more,
    )


# Types first: a refusal names the first value that does not fit the kernel that fits best.
_16_BITS = {**_EVERY_DENSE, DTYPES: OneOf(*alike("bf16", "fp16"))}
# The rope of an FP8 cache is dequantized to bf16, if it is not bf16 already.
_16_BITS_BESIDE_CACHES = {
    **_EVERY_DENSE,
    DTYPES: OneOf(
        *alike("bf16", "fp16"), *(("bf16", "bf16", "bf16", name) for name in GLUON_CACHES)
    ),
}
# V of 8 bits becomes bf16 before the kernel.
_FP8_VALUES = tuple(("e4m3", "e4m3", values) for values in ("e4m3", "bf16"))
_FP8 = {("q_dtype", "kv_dtype", "v_dtype"): OneOf(*_FP8_VALUES), **_EVERY_DENSE}


# Latent rows, which lists or pages name: a CTA pair, one CTA, FP8 rows, all FP8.

Dtypes = tuple[tuple[str, ...], ...]
Widths = tuple[tuple[int, int, int], ...]

_ROW_WIDTHS = ("d_nope", "d_rope", "d_v")
_EVERY_ROW: Mapping[Field, Allowed] = {
    **either("causal", "has_sink", "has_q_scale", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_ROW_FORMS: Mapping[str, Mapping[Field, Allowed]] = {
    "sparse": {
        "form": OneOf("sparse"),
        **_EVERY_ROW,
        "page_size": Range(0, MOST_PAGE_ROWS),
        "topk": Range(1),
        **either("has_topk_lengths", "wants_max_logits"),
    },
    "latent": {"form": OneOf("latent"), **_EVERY_ROW, "page_size": Range(1, MOST_PAGE_ROWS)},
}
_HEADS = Range(1, MAX_HEADS)
_CTA_HEADS, _MORE_HEADS = Range(1, CTA_HEADS), Range(CTA_HEADS + 1, MAX_HEADS)


def _one_cta_fails(problem: Problem, triton: tuple[int, ...]) -> str:
    """One CTA stages the query tiles for tensor memory over 8 of the 9 tiles of K."""
    equal = "shared memory is reinterpreted only as tiles of equal size"
    return equal if triton[:2] == (3, 8) else ""


_WIDE_ROWS = ((512, 64, 512), (512, 0, 512))
_ALL_ROWS = (*_WIDE_ROWS, (256, 64, 256))
NOTHING_MORE: Mapping[Field, Allowed] = {}


# A token walks its own window, whose keys are never split: so many are those of a short request.
_SHORT_WINDOWS: Mapping[Field, Allowed] = {"window": Range(0, SHORT)}

# One CTA has all keys of a token, and serves so few heads where no request can be split.
_LONG_TABLES: Limit[Problem] = Limit(
    can_split,
    lambda p: f"{p.most_keys} keys in a table: too few for a request to be split",
)


def _serves_rows(
    form: str,
    heads: Range,
    widths: Widths,
    *dtypes: tuple[str, ...],
    limits: tuple[Limit[Problem], ...] = (),
    more: Mapping[Field, Allowed] = NOTHING_MORE,
) -> Serves:
    return Serves(
        {
            **_ROW_FORMS[form],
            **more,
            _ROW_WIDTHS: OneOf(*widths),
            "heads": heads,
            DTYPES: OneOf(*dtypes),
            "rope": OneOf("none", "shared"),
        },
        limits,
    )


def _pair(
    name: str,
    form: str,
    dtypes: Dtypes,
    choose: Callable[[Problem, Target], PairConfig] = pair_config,
    heads: Range = _MORE_HEADS,
    widths: Widths = _WIDE_ROWS,
    serves: Serves | None = None,
    limits: tuple[Limit[Problem], ...] = (),
    window: Mapping[Field, Allowed] = NOTHING_MORE,
    **more: Any,
) -> Kernel:
    """A pair of CTAs, for more than 64 heads, or for fewer whose keys are split."""
    return Kernel(
        name=name,
        config=PairConfig,
        serves=serves or _serves_rows(form, heads, widths, *dtypes, limits=limits, more=window),
        choose=choose,
        variant=PairConfig.variant,
        launcher="openmla.kernels.blackwell.pair.launch",
        block=lambda config, problem: PairKernel(config, problem).block,
        explain=lambda config, problem: PairKernel(config, problem).explain(),
        first_triton=FIRST_ROWS_PAIR,
        **more,
    )


def _one_cta(
    name: str,
    form: str,
    dtypes: Dtypes,
    more: Mapping[Field, Allowed] = NOTHING_MORE,
    serves: Serves | None = None,
    limits: tuple[Limit[Problem], ...] = (),
) -> Kernel:
    """Any number of heads, by CTAs of 64 each."""
    return Kernel(
        name=name,
        config=SparseConfig,
        serves=serves or _serves_rows(form, _HEADS, _ALL_ROWS, *dtypes, limits=limits, more=more),
        choose=sparse_config,
        launcher="openmla.kernels.blackwell.sparse.launch",
        block=lambda config, problem: SparseKernel(config, problem).block,
        explain=lambda config, problem: SparseKernel(config, problem).explain(),
        not_compiled=_one_cta_fails,
        slower=why_slower_unsplit,
    )


_ROWS_BF16, _ROWS_16_BITS = alike("bf16"), alike("bf16", "fp16")
# Queries of 8 bits become bf16 before the kernel.
_FP8_CACHES = tuple((q, name, name, name) for q in ("bf16", "e4m3") for name in GLUON_CACHES)
_FP8_ROWS = (*_FP8_CACHES, *(((q, "e4m3", "e4m3", "e4m3")) for q in ("bf16", "e4m3")))
_V4_COLUMNS = (512, 0, 512)
_FP8_PAGES = (*_FP8_CACHES, *((q, *[V4.name] * 3) for q in ("bf16", "e4m3")))
_COLUMNS_OF_V4: Limit[Problem] = Limit(
    lambda p: p.kv_dtype != V4.name or (p.d_nope, p.d_rope, p.d_v) == _V4_COLUMNS,
    lambda p: f"{V4.name} rows of {p.d_nope} + {p.d_rope} columns: 512 + 0 are served",
)
_SOURCES = {
    "form": OneOf("sparse"),
    **_EVERY_ROW,
    "has_q_scale": OneOf(False),
    _ROW_WIDTHS: OneOf(_V4_COLUMNS),
    "heads": _HEADS,
    "turned_back": OneOf(0, 64),
    DTYPES: OneOf(*_ROWS_BF16, ("bf16", *[V4.name] * 3)),
    "rope": OneOf("none"),
    "page_size": Range(0, MOST_PAGE_ROWS),
    "topk": ANY,
    **either("span", "has_topk_lengths", "wants_max_logits"),
    "second": Second(
        {
            **SECOND,
            "kv_dtype": OneOf("bf16", V4.name),
            "page_size": Range(0, MOST_PAGE_ROWS),
        }
    ),
}
# Rows of larger pools, where they lie: those of both sources are dequantized on their way.
_ALL_OF_V4: Mapping[Field, Allowed] = {
    DTYPES: OneOf(("bf16", *[V4.name] * 3)),
    "second": Second({**SECOND, "kv_dtype": OneOf(V4.name), "page_size": Range(0, MOST_PAGE_ROWS)}),
}
_SEVERAL: Limit[Problem] = Limit(
    lambda p: p.is_attend or joins(p),
    lambda p: "one list of rows: kernel sparse serves it",
)
_ROWS_KERNELS = (
    _pair("sparse_pair", "sparse", _ROWS_16_BITS),
    _one_cta("sparse", "sparse", _ROWS_16_BITS),
    _pair("sparse_fp8", "sparse", alike("e4m3"), heads=_HEADS, coarse=COARSE),
    _pair("sparse_fp8_rows_pair", "sparse", _FP8_CACHES, pair_config_dequantized),
    _one_cta("sparse_fp8_rows", "sparse", _FP8_ROWS),
    _pair(
        *("attend_pair", "sparse", ()),
        choose=pair_config_joined,
        serves=Serves(_SOURCES, (_SEVERAL,)),
        slower=why_slow_for_large_pools,
    ),
    _one_cta(
        *("attend", "sparse", ()),
        serves=Serves({**_SOURCES, **_ALL_OF_V4}),
    ),
    _pair("latent_pair", "latent", _ROWS_BF16, window=_SHORT_WINDOWS),
    _pair("latent_split_pair", "latent", _ROWS_BF16, heads=_CTA_HEADS, limits=(_LONG_TABLES,)),
    _one_cta("latent", "latent", _ROWS_BF16, _SHORT_WINDOWS),
    _pair(
        *("latent_fp8_rows_pair", "latent", _FP8_PAGES),
        choose=pair_config_dequantized,
        limits=(_COLUMNS_OF_V4,),
    ),
    _pair(
        *("latent_fp8_rows_split_pair", "latent", _FP8_PAGES),
        choose=pair_config_dequantized,
        heads=_CTA_HEADS,
        limits=(_LONG_TABLES, _COLUMNS_OF_V4),
    ),
    # No pair: it would dequantize all rows of a request, and a window has few.
    _one_cta("latent_fp8_rows", "latent", _FP8_PAGES, _SHORT_WINDOWS, limits=(_COLUMNS_OF_V4,)),
)

BLACKWELL = Family(
    name="blackwell",
    archs=("sm_100", "sm_103"),
    kernels=(
        _dense(
            "dense_pair",
            {**_16_BITS, **_OF_A_PAIR},
            limits=(_LONG_WINDOWS,),
            choose=dense_pair_config,
            first_triton=FIRST_DENSE_PAIR,
        ),
        _dense(
            "dense",
            {**_16_BITS_BESIDE_CACHES, **_16_BITS_WITH_ROPE},
            limits=(_ROPE_OF_FP8_ROWS,),
        ),
        _dense("dense_fp8", {**_FP8, **_FP8_WITH_ROPE}),
        _dense("dense_no_rope", {**_16_BITS, **_WITHOUT_ROPE}),
        _dense("dense_no_rope_fp8", {**_FP8, **_WITHOUT_ROPE, "rope_dtype": OneOf("e4m3")}),
        *_ROWS_KERNELS,
        BLACKWELL_BACKWARD,
        *INDEX_KERNELS,
    ),
)
