"""The Hopper family: Gluon kernels for sm_90: dense and its gradients, latent, the indexer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from openmla.arithmetic import Limit
from openmla.formats import FORMATS
from openmla.kernels.hopper.backward.plan import HOPPER_BACKWARD
from openmla.kernels.hopper.dense.plan import Dense, HopperDenseConfig, select_hopper_dense_config
from openmla.kernels.hopper.dense_fp8.plan import (
    VALUE_BYTES,
    HopperDenseFp8Config,
    select_hopper_dense_fp8_config,
)
from openmla.kernels.hopper.indexer.plan import INDEX_KERNELS
from openmla.kernels.hopper.latent.plan import (
    CHUNKED_CACHES,
    ROW_CACHES,
    WHOLE_POOL_CACHES,
    HopperLatentConfig,
    dequantizes_pools,
    most_places,
    select_hopper_latent_config,
    why_slow_for_large_pools,
)
from openmla.kernels.hopper.latent_fp8.plan import (
    HopperLatentFp8Config,
    select_hopper_latent_fp8_config,
)
from openmla.kernels.hopper.sparse_backward.plan import HOPPER_SPARSE_BACKWARD
from openmla.planning.dequantize import (
    DEQUANTIZED_CAP,
    CacheRead,
    in_kernel_read,
    listed_cache_read,
    mean_length,
    named_pages_read,
    sources_read,
    whole_pools_read,
)
from openmla.planning.family import Block, Family, Kernel, Pipeline
from openmla.planning.latent_split import (
    MOST_ROWS,
    RANGES_FIT,
    SHORT,
    FixedSplit,
    items_line,
)
from openmla.planning.serves import (
    ALIGNED,
    ANY,
    DTYPES,
    LENGTHS,
    MOST_PAGE_ROWS,
    SECOND,
    YES_OR_NO,
    Allowed,
    Field,
    OneOf,
    Range,
    Second,
    Serves,
    alike,
    either,
)
from openmla.planning.split import query_tile_lines, split_lines
from openmla.planning.target import Target
from openmla.problem import DTYPE_BYTES, MAX_HEADS, ROPE_SOURCES, Problem

# Dense.


def _dense(problem: Problem, target: Target) -> HopperDenseConfig:
    config = select_hopper_dense_config(
        heads=problem.heads,
        d_nope=problem.d_nope,
        d_rope=problem.d_rope,
        d_v=problem.d_v,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        sm_count=target.sm_count,
        key_mask=problem.has_key_mask,
    )
    return _fewer_query_tiles(config, problem)


def _fewer_query_tiles(config: Dense, problem: Problem) -> Dense:
    short = config.supported() and config.prefer_1q(problem.total_q, problem.batch)
    return config.with_num_qo(1) if short else config


def _dense_fp8(problem: Problem, target: Target) -> HopperDenseFp8Config:
    config = select_hopper_dense_fp8_config(
        heads=problem.heads,
        d_nope=problem.d_nope,
        d_rope=problem.d_rope,
        d_v=problem.d_v,
        v_bytes=DTYPE_BYTES[problem.v_dtype],
        rope_bytes=DTYPE_BYTES[problem.rope_dtype],
        k_scaled=problem.has_k_scale,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        sm_count=target.sm_count,
    )
    return _fewer_query_tiles(config, problem)


def _dense_block(config: HopperDenseConfig, problem: Problem) -> Block:
    ring = config.num_kv_stages
    return Block(
        tile_rows=config.BM,
        tile_keys=config.BN,
        stages=ring,
        threads=config.num_threads,
        memory=config.smem_map,
        registers=config.registers.most,
        pipeline=Pipeline(
            groups=config.num_qo,
            rows=64,
            keys=config.BN,
            d_qk=config.d_qk,
            d_v=config.d_v,
            element=VALUE_BYTES,
            k_slots=ring,
            v_slots=ring,
        ),
    )


def _dense_lines(config: HopperDenseConfig, problem: Problem) -> list[str]:
    tiles = query_tile_lines(problem, config.BM) if config.num_qo == 1 else []
    return [*config.explain(), *tiles, *split_lines(config.split, problem)]


def _dense_bf16_lines(config: HopperDenseConfig, problem: Problem) -> list[str]:
    one = f"one request of at most {config.BN} keys: programs of 64 rows, without loops and rings"
    return _dense_lines(config, problem) + [one] * config.variant(problem).one_block


# Latent: lists of rows, and whole pages.


def _latent(problem: Problem, target: Target) -> HopperLatentConfig:
    several = problem.is_attend
    formats = [source.kv_dtype for source in problem.sources]
    config = select_hopper_latent_config(
        heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        gather="indices" if problem.form == "sparse" else "pages",
        dynamic=problem.form == "latent" or (problem.has_topk_lengths and not several),
        sm_count=target.sm_count,
        invariant=problem.invariant,
        range_keys=problem.range_keys,
    )
    config = replace(config, few=config.few_queries(problem))
    if dequantizes_pools(problem):
        config = replace(config, cache_read=whole_pools_read(problem))
    elif any(name in ROW_CACHES for name in formats):
        config = replace(config, cache_read=_cache_read(problem, config))
    return config


def _latent_fp8(problem: Problem, target: Target) -> HopperLatentFp8Config:
    return select_hopper_latent_fp8_config(
        heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        gather="indices" if problem.form == "sparse" else "pages",
        dynamic=problem.form == "latent" or problem.has_topk_lengths,
        scaled=problem.has_k_scale or problem.kv_dtype in _CACHES,
        sm_count=target.sm_count,
    )


def _cache_read(problem: Problem, config: HopperLatentConfig) -> CacheRead:
    rows, width = problem.total_k, problem.d_qk
    if config.few:
        return in_kernel_read(problem.total_q * problem.most_rows, width)
    if problem.is_attend:
        return sources_read(problem, config.row_blocks, config.sm_count)
    if problem.window:
        return in_kernel_read(problem.total_q * problem.window, width)  # few rows of a request
    if config.gather == "indices":
        return listed_cache_read(
            problem.total_q, problem.topk, rows, config.row_blocks, width, config.sm_count
        )
    tiles = config.tiles(mean_length(problem.total_q, problem.batch))
    return named_pages_read(tiles, rows, width, problem.page_size)


def _latent_block(config: HopperLatentConfig, problem: Problem, element: int = 2) -> Block:
    return Block(
        tile_rows=config.BM,
        tile_keys=config.keys_per_step,
        stages=config.num_kv_stages,
        threads=config.num_threads,
        memory=config.smem_map,
        registers=config.registers.most,
        pipeline=Pipeline(
            groups=2,
            rows=64,
            keys=64,
            d_qk=config.width,
            d_v=config.latent,
            element=element,
            k_slots=2 * config.num_kv_stages,
            v_slots=0,
            shares_keys=False,
        ),
    )


def _latent_fp8_block(config: HopperLatentFp8Config, problem: Problem) -> Block:
    return _latent_block(config, problem, element=1)


def _keys_not_split(config: HopperLatentFp8Config, problem: Problem) -> str:
    return "" if problem.form == "sparse" else "the portable kernel splits the keys of few queries"


def _latent_lines(config: HopperLatentConfig, problem: Problem) -> list[str]:
    if config.gather == "indices":
        return config.explain()
    if problem.window:
        return [*config.explain(), f"windows of {problem.window} keys are not split"]
    rule = config.split
    items = items_line(rule, problem, config.BM, config.sm_count)
    return [*config.explain(), rule.explain_mean(problem), items]


_ROWS = {
    "heads": Range(1, MAX_HEADS),
    ("d_nope", "d_v"): OneOf((128, 128), (256, 256), (512, 512)),
    "d_rope": OneOf(0, 32, 64),
    "rope": OneOf("none", "shared"),
    **either("has_sink", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_LISTS: dict[Field, Allowed] = {
    "causal": YES_OR_NO,
    "topk": ANY,
    "has_topk_lengths": YES_OR_NO,
    "wants_max_logits": YES_OR_NO,
}
# What else there may be has a kernel of its own, whose refusal then says more.
_ONE_LIST: dict[Field, Allowed] = {
    ("span", "second"): OneOf(
        (False, None), why="kernel attend has spans and second sources, of bf16, V4 and V4.1 rows"
    ),
}
# FP8 caches that FP8 queries read: one scale per row.
_CACHES = ("fp8_token",)
_FP8_ROWS = {**_ROWS, ("d_nope", "d_v"): OneOf((512, 512)), "d_rope": OneOf(0, 64)}
_FP8_OVER_CACHES = tuple(("e4m3", name, name, name) for name in _CACHES)
_BF16_OVER_CACHES = tuple(("bf16", name, name, name) for name in (*ROW_CACHES, *WHOLE_POOL_CACHES))
# Rows of several sources.
_SOURCES = ("bf16", *CHUNKED_CACHES)

_DENSE = {
    "heads": Range(1, MAX_HEADS),
    "rope": OneOf(*ROPE_SOURCES),
    # A bulk copy takes whole swizzle patterns of 8 rows.
    "page_size": Range(0, MOST_PAGE_ROWS, 8),
    **either("causal", "has_sink", "wants_lse"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
# Products of FP8 take 32 columns. A 16-bit rope may come from a bf16 cache.
_DENSE_FP8 = {
    **_DENSE,
    "d_nope": OneOf(32, 64, 96, 128, 160, 192, 256),
    "d_rope": OneOf(0, 32, 64, 128),
    "d_v": OneOf(16, 32, 64, 128, 256),
    **either("has_q_scale", "has_k_scale"),
}


# Widest d_qk by d_v with a key mask: its blocks have 128 keys, of which two must fit beside Q.
_MASKED_QK = {16: 272, 32: 256, 64: 224, 128: 192}
_ROPE_FROM_PAGES: Limit[Problem] = Limit(
    lambda p: p.rope != "cache" or p.d_rope <= 64,
    lambda p: f"d_rope {p.d_rope} from pages: 64 columns at most",
)
_MASKED: Limit[Problem] = Limit(
    lambda p: not p.has_key_mask or p.d_qk <= _MASKED_QK.get(p.d_v, 0),
    lambda p: (
        f"key_mask with d_qk {p.d_qk} and d_v {p.d_v}: two blocks of 128 keys fit with d_qk up to "
        + ", ".join(f"{qk} (d_v {v})" for v, qk in _MASKED_QK.items())
    ),
)

# V begins where the window does, wherever in a page or a word of bits that may be.
_WINDOWED: Limit[Problem] = Limit(
    lambda p: not p.window or not (p.rope == "cache" or p.has_key_mask),
    lambda p: (
        f"window beside {'key_mask' if p.has_key_mask else 'rope from pages'}: blocks of keys "
        "begin with the window, not where a copy of bits or of a page may"
    ),
)
_V4_WIDTHS: Limit[Problem] = Limit(
    lambda p: p.kv_dtype not in CHUNKED_CACHES or (p.d_nope, p.d_rope) == (512, 0),
    lambda p: f"kv_dtype {p.kv_dtype} at {p.d_nope} + {p.d_rope} columns: 512 + 0 are served",
)
_POOL_WIDTHS: Limit[Problem] = Limit(
    lambda p: p.kv_dtype not in WHOLE_POOL_CACHES or FORMATS[p.kv_dtype].takes(p.d_nope, p.d_rope),
    lambda p: f"kv_dtype {p.kv_dtype} at {p.d_nope} + {p.d_rope} columns: there are none",
)
_POOLS_FIT: Limit[Problem] = Limit(
    lambda p: not dequantizes_pools(p) or _pool_bytes(p) <= DEQUANTIZED_CAP,
    lambda p: f"a workspace of dequantized pools of {_pool_bytes(p)} bytes > {DEQUANTIZED_CAP}",
)
_SEVERAL: Limit[Problem] = Limit(
    lambda p: p.is_attend,
    lambda p: "one list of rows: kernel sparse serves it",
)
# Windows are not split: so many keys are those of a short request.
SHORT_WINDOWS = Range(0, SHORT)
_WINDOW_VARIES: Limit[Problem] = Limit(
    lambda p: not (p.window and p.invariant),
    lambda p: "a window in an invariant call: tiles of several tokens begin with their first one's",
)
# The merge counts elements of partial results in 32 bits; one token's ranges may be very many.
_PARTS_COUNTED: Limit[Problem] = Limit(
    lambda p: not p.invariant or _invariant_parts(p) < 2**31,
    lambda p: f"invariant, {_invariant_parts(p)} partial results of a token: 2^31 - 1 are counted",
)
# Places are counted in 32 bits, up to a step past the last; so are rows.
_COUNTED: Limit[Problem] = Limit(
    lambda p: most_places(p) <= MOST_ROWS - 256 and all(x.total_k <= MOST_ROWS for x in p.sources),
    lambda p: f"{most_places(p)} places of a query, or rows of a pool: 2^31 - 257 are counted",
)


def _pool_bytes(problem: Problem) -> int:
    """Bytes of all rows of all pools in bf16."""
    return 2 * problem.d_qk * sum(source.total_k for source in problem.sources)


def _invariant_parts(problem: Problem) -> int:
    """Elements of the partial results of one token of an invariant call."""
    rule = FixedSplit(problem.heads, problem.d_v, problem.range_keys)
    ranges = rule.ranges(problem.most_keys)
    return problem.heads * ranges * (problem.d_v + 2)


def _e4m3_beside(*v_dtypes: str) -> list[tuple[str, ...]]:
    """e4m3 queries and keys with these types of V, and a rope of any."""
    return [("e4m3", "e4m3", v, rope) for v in v_dtypes for rope in ("e4m3", "bf16", "fp16")]


def _kernel(
    name: str, allowed: dict[Field, Allowed], *limits: Limit[Problem], **parts: Any
) -> Kernel:
    return Kernel(name=name, serves=Serves(allowed, limits), **parts)


_dense_fp8_kernel = partial(
    _kernel,
    config=HopperDenseFp8Config,
    choose=_dense_fp8,
    variant=HopperDenseFp8Config.variant,
    block=_dense_block,
    explain=_dense_lines,
    launcher="openmla.kernels.hopper.dense_fp8.launch",
)
_rows_kernel = partial(
    _kernel,
    config=HopperLatentConfig,
    choose=_latent,
    variant=HopperLatentConfig.variant,
    slower=why_slow_for_large_pools,
    block=_latent_block,
    launcher="openmla.kernels.hopper.latent.launch",
)
_rows_fp8_kernel = partial(
    _kernel,
    config=HopperLatentFp8Config,
    choose=_latent_fp8,
    variant=HopperLatentFp8Config.variant,
    slower=_keys_not_split,
    block=_latent_fp8_block,
    launcher="openmla.kernels.hopper.latent_fp8.launch",
)

HOPPER = Family(
    name="hopper",
    archs=("sm_90",),
    kernels=(
        _kernel(
            "dense",
            {
                # Types first: a refusal then names the kernel for them.
                "form": OneOf("dense"),
                DTYPES: OneOf(*alike("bf16", "fp16")),
                # One or two tiles of K, each a power of two.
                "d_nope": OneOf(16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256),
                "d_rope": OneOf(0, 16, 32, 64, 128),
                "d_v": OneOf(16, 32, 64, 128, 256),
                **_DENSE,
                **either("has_key_mask", "has_k_start"),
                "window": ANY,
            },
            _ROPE_FROM_PAGES,
            _MASKED,
            _WINDOWED,
            config=HopperDenseConfig,
            choose=_dense,
            variant=HopperDenseConfig.variant,
            launcher="openmla.kernels.hopper.dense.launch",
            block=_dense_block,
            explain=_dense_bf16_lines,
        ),
        _dense_fp8_kernel(
            "dense_fp8",
            {
                "form": OneOf("dense"),
                DTYPES: OneOf(*_e4m3_beside("bf16", "fp16", "e4m3")),
                **_DENSE_FP8,
                "has_k_start": YES_OR_NO,
            },
            _ROPE_FROM_PAGES,
        ),
        _rows_kernel(
            "latent",
            {
                "form": OneOf("latent"),
                DTYPES: OneOf(*alike("bf16"), *_BF16_OVER_CACHES),
                **_ROWS,
                "page_size": Range(1, MOST_PAGE_ROWS),
                **either("causal", "invariant"),
                "range_keys": ANY,
                "window": SHORT_WINDOWS,
            },
            _WINDOW_VARIES,
            _V4_WIDTHS,
            _POOL_WIDTHS,
            _POOLS_FIT,
            RANGES_FIT,
            _PARTS_COUNTED,
            explain=_latent_lines,
        ),
        _rows_kernel(
            "sparse",
            {
                "form": OneOf("sparse"),
                **_ONE_LIST,
                DTYPES: OneOf(*alike("bf16", "fp16"), *_BF16_OVER_CACHES),
                **_ROWS,
                "page_size": Range(0, MOST_PAGE_ROWS),
                **_LISTS,
            },
            _V4_WIDTHS,
            _POOL_WIDTHS,
            _POOLS_FIT,
        ),
        _rows_kernel(
            "attend",
            {
                "form": OneOf("sparse"),
                DTYPES: OneOf(*(("bf16", *[name] * 3) for name in _SOURCES)),
                **_ROWS,
                ("d_nope", "d_v"): OneOf((512, 512)),
                "d_rope": OneOf(0),
                "page_size": Range(0, MOST_PAGE_ROWS),
                "span": YES_OR_NO,
                "topk": ANY,
                "second": Second(
                    {
                        **SECOND,
                        "kv_dtype": OneOf(*_SOURCES),
                        "page_size": Range(0, MOST_PAGE_ROWS),
                    }
                ),
                "causal": YES_OR_NO,
                "has_topk_lengths": YES_OR_NO,
                "turned_back": OneOf(0, 64),
            },
            _SEVERAL,
            _COUNTED,
        ),
        _rows_fp8_kernel(
            "sparse_fp8",
            {
                "form": OneOf("sparse"),
                DTYPES: OneOf(*alike("e4m3")),
                **_FP8_ROWS,
                **either("has_q_scale", "has_k_scale"),
                **_LISTS,
            },
        ),
        _rows_fp8_kernel(
            "sparse_fp8_cache",
            {
                "form": OneOf("sparse"),
                DTYPES: OneOf(*_FP8_OVER_CACHES),
                **_FP8_ROWS,
                "has_q_scale": YES_OR_NO,
                "page_size": Range(0, MOST_PAGE_ROWS),
                **_LISTS,
            },
        ),
        _rows_fp8_kernel(
            "latent_fp8_cache",
            {
                "form": OneOf("latent"),
                DTYPES: OneOf(*_FP8_OVER_CACHES),
                **_FP8_ROWS,
                "has_q_scale": YES_OR_NO,
                "page_size": Range(1, MOST_PAGE_ROWS),
                "causal": YES_OR_NO,
            },
        ),
        HOPPER_BACKWARD,
        HOPPER_SPARSE_BACKWARD,
        *INDEX_KERNELS,
    ),
)
