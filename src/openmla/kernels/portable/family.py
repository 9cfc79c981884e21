"""The portable family: plain Triton kernels for any CUDA or ROCm GPU, and beside them the selection
that GPUs with cp.async share."""

from openmla.arithmetic import Limit
from openmla.kernels.portable.backward.plan import PORTABLE_BACKWARD
from openmla.kernels.portable.indexer.plan import INDEX_KERNELS
from openmla.kernels.portable.indexer_loss.plan import PORTABLE_LOSS
from openmla.kernels.portable.plan import (
    PortableConfig,
    require_bf16_products,
    select_portable_config,
)
from openmla.kernels.portable.sparse_backward.plan import PORTABLE_SPARSE_BACKWARD
from openmla.planning.family import Block, Family, Kernel, Pipeline
from openmla.planning.latent_split import RANGES_FIT, FixedSplit, LatentSplit, items_line
from openmla.planning.memory import Wanted, lay_out
from openmla.planning.serves import (
    ANY,
    LENGTHS,
    MOST_PAGE_ROWS,
    QUANTIZED_CACHES,
    SECOND,
    OneOf,
    Range,
    Second,
    Serves,
    either,
)
from openmla.planning.split import split_lines
from openmla.planning.target import Target
from openmla.problem import FORMS, MAX_HEADS, ROPE_SOURCES, Problem

WIDEST = 576
"""Columns of the widest row that was run: 512 + 64."""
_ELEMENTS = ("bf16", "fp16", "e4m3")
_STORED = OneOf(*_ELEMENTS, *QUANTIZED_CACHES)


def _choose(problem: Problem, target: Target) -> PortableConfig:
    require_bf16_products(target)
    return select_portable_config(problem, target)


def _block(config: PortableConfig, problem: Problem) -> Block:
    stages = [
        Wanted(f"stage {i}: K and V", "k", config.stage_bytes, align=1)
        for i in range(config.buffers)
    ]
    q, p = Wanted("Q", "q", config.q_bytes, align=1), Wanted("P", "p", config.p_bytes, align=1)
    scratch = Wanted("scratch", "scratch", config.scratch_bytes, align=1)
    return Block(
        tile_rows=config.BM,
        tile_keys=config.BN,
        stages=config.num_stages,
        threads=config.num_threads,
        memory=lay_out([q, *stages, p, scratch], config.smem_limit),
        pipeline=Pipeline(
            groups=1,
            rows=config.BM,
            keys=config.BN,
            d_qk=config.qk_cols,
            d_v=config.out_cols,
            element=config.element,
            k_slots=config.buffers,
            v_slots=config.buffers if config.v_cols else 0,
        ),
    )


def _explain(config: PortableConfig, problem: Problem) -> list[str]:
    rule = config.split
    if isinstance(rule, LatentSplit | FixedSplit):
        items = items_line(rule, problem, config.BM, config.sm_count)
        return [*config.explain(), rule.explain_mean(problem), items]
    return [*config.explain(), *split_lines(rule, problem)]


_ROWS_ALIKE: Limit[Problem] = Limit(
    lambda p: len({source.kv_dtype == "fp16" for source in p.sources}) == 1,
    lambda p: "fp16 rows beside rows of a cache, which are bf16: both must be one or the other",
)
# The kernel of several sources counts positions and rows in 32 bits, up to a block past the last.
_COUNTED: Limit[Problem] = Limit(
    lambda p: not p.is_attend or all(max(x.most_rows, x.total_k) < 2**31 - 256 for x in p.sources),
    lambda p: "several sources or spans of 2^31 - 256 positions or rows: fewer are counted",
)
# Pairs of neighbors are taken apart from the first column on.
_PAIRS: Limit[Problem] = Limit(
    lambda p: not (p.turned_back and p.d_v % 2),
    lambda p: f"turned_back with d_v {p.d_v}: an even number of columns is served",
)
_SERVED = Serves(
    {
        "form": OneOf(*FORMS),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1, WIDEST),
        "d_rope": Range(0, WIDEST),
        "d_v": Range(1, WIDEST),
        "group": Range(1, MAX_HEADS),
        "q_dtype": OneOf(*_ELEMENTS),
        "kv_dtype": _STORED,
        "v_dtype": _STORED,
        "rope": OneOf(*ROPE_SOURCES),
        "rope_dtype": _STORED,
        "page_size": Range(0, MOST_PAGE_ROWS),
        "topk": ANY,
        "window": ANY,
        **LENGTHS,
        "second": Second({**SECOND, "page_size": Range(0, MOST_PAGE_ROWS), "kv_dtype": _STORED}),
        **either("causal", "has_k_start", "has_topk_lengths", "has_sink", "has_q_scale", "span"),
        **either("has_k_scale", "has_key_mask", "wants_lse", "wants_max_logits", "aligned_16"),
        **either("invariant", "fp32_out"),
        "range_keys": ANY,
        "turned_back": ANY,
    },
    limits=(_ROWS_ALIKE, _COUNTED, _PAIRS, RANGES_FIT),
)
PORTABLE = Family(
    name="portable",
    archs=("gpu",),
    kernels=(
        Kernel(
            name="tiled",
            serves=_SERVED,
            config=PortableConfig,
            choose=_choose,
            variant=PortableConfig.variant,
            launcher="openmla.kernels.portable.launch",
            block=_block,
            explain=_explain,
        ),
        *INDEX_KERNELS,
        PORTABLE_BACKWARD,
        PORTABLE_SPARSE_BACKWARD,
        PORTABLE_LOSS,
    ),
)
