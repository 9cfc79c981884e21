"""The CDNA4 family: Gluon kernels for gfx950: dense, latent and sparse rows, the indexer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from openmla.arithmetic import Limit
from openmla.formats import V4
from openmla.kernels.cdna4.backward.plan import CDNA4_BACKWARD
from openmla.kernels.cdna4.chip import FIRST_TRITON, LANE_REGISTERS
from openmla.kernels.cdna4.dense.plan import Dense8, Dense16, DenseBlock, DenseFP8
from openmla.kernels.cdna4.indexer.plan import INDEX_KERNELS
from openmla.kernels.cdna4.sparse.plan import ROPE_COLUMNS, MlaSparse16
from openmla.modular.cdna4.config import MlaConfigV2
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.modular.cdna4.prefill import LDS_BYTES
from openmla.planning.family import Block, Family, Kernel, Pipeline
from openmla.planning.latent_split import LatentSplit
from openmla.planning.memory import Wanted, lay_out
from openmla.planning.serves import (
    ALIGNED,
    ANY,
    DTYPES,
    GLUON_CACHES,
    LENGTHS,
    LONG_NAMES,
    MOST_PAGE_ROWS,
    SECOND,
    YES_OR_NO,
    OneOf,
    Range,
    Second,
    Serves,
    alike,
    either,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS, ROPE_SOURCES, Problem

# A latent cache row on CDNA4: rope begins at column 512, whatever the width before it.
ROPE_OFFSET = 512
_OUTPUTS = {**LONG_NAMES, "fp32": "float32"}

# Dense.


def _shape(problem: Problem, kv_block: int) -> MlaConfigV2:
    return MlaConfigV2(
        q_block_size=32,
        kv_block=kv_block,
        depth=problem.d_v,
        num_heads=problem.heads,
        num_kv_heads=problem.key_heads,
        d_qk=problem.d_qk,
        d_rope=problem.d_rope,
        cache_depth=ROPE_OFFSET + problem.d_rope,
        rope_cache_offset=ROPE_OFFSET,
        dtype=LONG_NAMES[problem.q_dtype],
        output_dtype=_OUTPUTS[problem.out_dtype],
    )


def _dense_16(problem: Problem, target: Target) -> Dense16:
    """Copies are dealt to 8 waves, so a rope of 32 columns takes tiles of 128 keys."""
    return Dense16(_shape(problem, kv_block=128 if problem.d_rope == 32 else 64))


def _dense_fp8(problem: Problem, target: Target) -> DenseFP8:
    config = _shape(problem, kv_block=128)
    blocks = [DenseFP8(config, v_full_v227=v227) for v227 in (True, False)]
    return next((block for block in blocks if block.supported()), blocks[0])


def _dense_8(problem: Problem, target: Target) -> Dense8:
    return Dense8(
        _shape(problem, kv_block=128),
        v_dtype=LONG_NAMES[problem.v_dtype],
        scaled_keys=problem.has_k_scale,
    )


def _dense_block(block: DenseBlock, problem: Problem) -> Block:
    keys = [Wanted(f"K{i}", "k", block.k_slot_bytes) for i in range(block.k_slots)]
    values = [Wanted(f"V{i}", "v", block.v_slot_bytes) for i in range(block.v_slots - 1)]
    scales = [Wanted("scales", "scale", block.scale_bytes)] if block.scale_bytes else []
    last = block.v_slot_bytes - block.smem_used + block.launch_smem_used
    values.append(Wanted(f"V{block.v_slots - 1}", "v", last))
    return Block(
        tile_rows=block.BM,
        tile_keys=block.KV_BLOCK,
        stages=block.k_slots,
        threads=block.NUM_THREADS,
        registers=block.NUM_THREADS * LANE_REGISTERS,
        memory=lay_out([Wanted("Q", "q", block.q_bytes), *keys, *values, *scales], LDS_BYTES),
        pipeline=Pipeline(
            groups=2,
            rows=block.BM // 2,
            keys=block.KV_BLOCK,
            d_qk=block.D_QK,
            d_v=block.DEPTH,
            element=block.config.element_bytes,
            k_slots=block.k_slots,
            v_slots=block.v_slots,
        ),
    )


# Sparse.


def _gathered(problem: Problem) -> str:
    if problem.form == "latent":
        return "pages"
    return "sources" if problem.is_attend else "indices"


def _sparse(problem: Problem, target: Target) -> MlaSparse16:
    narrow = replace(problem, fp32_out=False)
    return MlaSparse16(
        num_heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        dtype=LONG_NAMES[narrow.out_dtype],
        dequantized=any(
            source.kv_dtype == "e4m3" or source.kv_dtype in (*GLUON_CACHES, V4.name)
            for source in problem.sources
        ),
        gather=_gathered(problem),
    )


def _sparse_block(block: MlaSparse16, problem: Problem) -> Block:
    stages = range(block.num_kv_stages)
    wanted = [Wanted(f"rows {i}", "k", block.latent_slot.slot_bytes) for i in stages]
    wanted += [Wanted(f"rope {i}", "rope", block.rope_bytes) for i in stages]
    wanted += [Wanted(f"indices {i}", "index", block.index_bytes) for i in stages]
    wanted.append(Wanted("P between waves", "p", block.p_bytes))
    return Block(
        tile_rows=block.BM,
        tile_keys=block.B_TOPK,
        stages=block.num_kv_stages,
        threads=block.num_warps * WAVE,
        registers=block.num_warps * WAVE * LANE_REGISTERS,
        memory=lay_out(wanted, LDS_BYTES),
        pipeline=Pipeline(
            groups=1,
            rows=block.BM,
            keys=block.B_TOPK,
            d_qk=block.latent + block.rope,
            d_v=block.latent,
            element=2,
            k_slots=block.num_kv_stages,
            v_slots=0,
        ),
    )


_EVERY_DENSE = {
    "form": OneOf("dense"),
    "heads": Range(1, MAX_HEADS),
    "group": Range(1, MAX_HEADS),
    "window": ANY,
    "page_size": Range(0, MOST_PAGE_ROWS),
    **either("causal", "has_sink", "has_key_mask", "has_k_start", "wants_lse", "fp32_out"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_ROWS = {
    "heads": Range(1, MAX_HEADS),
    ("d_nope", "d_v"): OneOf((256, 256), (512, 512)),
    "d_rope": OneOf(0, ROPE_COLUMNS),
    "rope": OneOf("none", "shared"),
    **either("causal", "has_sink", "wants_lse", "fp32_out"),
    **LENGTHS,
    "aligned_16": ALIGNED,
}
# Queries in e4m3 are bf16 in registers, exactly.
_OVER_CACHES = tuple((q, name, name, name) for q in ("bf16", "e4m3") for name in GLUON_CACHES)
_V4_ROWS = ("bf16", *[V4.name] * 3)
_SPARSE = {
    "form": OneOf("sparse"),
    **_ROWS,
    DTYPES: OneOf(*alike("bf16", "fp16", "e4m3"), *_OVER_CACHES, _V4_ROWS),
    "page_size": Range(0, MOST_PAGE_ROWS),
    "topk": ANY,
    **either("has_topk_lengths", "wants_max_logits"),
}
_LATENT = {
    "form": OneOf("latent"),
    **_ROWS,
    DTYPES: OneOf(*alike("bf16"), *_OVER_CACHES, _V4_ROWS),
    "page_size": Range(1, MOST_PAGE_ROWS),
    "window": ANY,
}
_V4_WIDTHS: Limit[Problem] = Limit(
    lambda p: p.kv_dtype != V4.name or (p.d_nope, p.d_rope) == (512, 0),
    lambda p: f"kv_dtype {V4.name} with {p.d_nope} + {p.d_rope} columns: its rows are 512 + 0",
)
_ONE_LIST: Mapping[Any, Any] = {
    ("span", "second"): OneOf(
        (False, None), why=f"kernel attend has spans and second sources, of bf16 and {V4.name} rows"
    )
}
_SOURCES = {
    **_SPARSE,
    "fp32_out": OneOf(False),
    "d_rope": OneOf(0),
    ("d_nope", "d_v"): OneOf((512, 512)),
    "turned_back": OneOf(0, 64),
    DTYPES: OneOf(*alike("bf16"), _V4_ROWS),
    "span": YES_OR_NO,
    "second": Second(
        {
            **SECOND,
            "kv_dtype": OneOf("bf16", V4.name),
            "page_size": Range(0, MOST_PAGE_ROWS),
        }
    ),
}
_SEVERAL: Limit[Problem] = Limit(
    lambda p: p.is_attend,
    lambda p: "one list of rows: kernel sparse serves it",
)


_WIDTHS = ("d_nope", "d_rope", "d_v")
_DENSE_16 = {
    **_EVERY_DENSE,
    DTYPES: OneOf(*alike("bf16", "fp16")),
    _WIDTHS: OneOf(
        *product((64, 128, 192, 256), (0, 64), (64, 128, 256)),
        # Two waves share wider rows, in parts of 64 columns.
        *((64, 32, 64), (64, 32, 128), (128, 32, 64)),
        *((64, 128, 64), (64, 128, 128), (128, 128, 64), (128, 128, 128)),
        why="64, 128, 192 or 256 columns, a rope of 0 or 64 and 64, 128 or 256 of V are served; "
        "a rope of 32 or 128 only with 64 or 128 of both, 32 not with 128 of both",
    ),
    "rope": OneOf(*ROPE_SOURCES),
}
_DENSE_FP8 = {
    **_EVERY_DENSE,
    DTYPES: OneOf(*alike("e4m3")),
    # One depth serves K and V; Q stays in LDS.
    _WIDTHS: OneOf((64, 64, 64), (64, 128, 64), (128, 64, 128)),
    "rope": OneOf("shared", "per_head", "cache"),
}


_DENSE_8 = {
    **_EVERY_DENSE,
    DTYPES: OneOf(*alike("e4m3"), ("e4m3", "e4m3", "bf16", "e4m3")),
    _WIDTHS: OneOf(
        *product((64, 128, 192, 256), (0, 64), (64, 128, 256)),
        why="64, 128, 192 or 256 columns, a rope of 0 or 64 and 64, 128 or 256 of V are served",
    ),
    "rope": OneOf("none", "shared", "per_head"),
    **either("has_q_scale", "has_k_scale"),
}
_WIDE_VALUES: Limit[Problem] = Limit(
    lambda p: p.v_dtype == "e4m3" or p.d_v <= 128,
    lambda p: f"{p.d_v} columns of V in bf16 beside FP8 keys: 128 at most fit the LDS",
)
_SCALED_AND_MASKED: Limit[Problem] = Limit(
    lambda p: not (p.has_key_mask and (p.has_q_scale or p.has_k_scale)),
    lambda p: "key_mask beside scales: there are no registers for both",
)
_WINDOWED_AND_MASKED: Limit[Problem] = Limit(
    lambda p: not (p.has_key_mask and p.window),
    lambda p: "key_mask beside a window and FP8 keys: there are no registers for both",
)


def _dense(
    name: str,
    served: dict[Any, Any],
    config: type,
    choose: Callable[[Problem, Target], Any],
    *limits: Limit[Problem],
) -> Kernel:
    return Kernel(
        name=name,
        serves=Serves(served, limits),
        config=config,
        choose=choose,
        launcher="openmla.kernels.cdna4.dense.launch",
        block=_dense_block,
        first_triton=FIRST_TRITON,
    )


def _rows_lines(config: MlaSparse16, problem: Problem) -> list[str]:
    if problem.form != "latent":
        return config.explain()
    if problem.window:
        return [*config.explain(), "keys of a window are not split"]
    return [*config.explain(), config.split.explain_mean(problem)]


_LONG_WINDOW: Limit[Problem] = Limit(
    lambda p: not p.window or not LatentSplit(p.heads, p.d_v).can_split(min(p.window, p.most_keys)),
    lambda p: (
        f"a window of {p.window} keys: the portable kernel splits those of few queries, this one "
        "does not"
    ),
)


def _rows(name: str, served: dict[Any, Any], *limits: Limit[Problem]) -> Kernel:
    return Kernel(
        name=name,
        serves=Serves(served, limits),
        config=MlaSparse16,
        choose=_sparse,
        launcher="openmla.kernels.cdna4.sparse.launch",
        block=_sparse_block,
        first_triton=FIRST_TRITON,
        variant=MlaSparse16.variant,
        explain=_rows_lines,
    )


CDNA4 = Family(
    name="cdna4",
    archs=("gfx950",),
    near_misses={
        "gfx942": "gfx942 has neither transposing LDS reads nor 16-byte copies to LDS nor FP8 "
        "products of depth 64, and 64 KB of LDS where the blocks need 56 KB to 160 KB"
    },
    kernels=(
        _dense("dense", _DENSE_16, Dense16, _dense_16),
        _dense("dense_fp8", _DENSE_FP8, DenseFP8, _dense_fp8, _WINDOWED_AND_MASKED),
        _dense(
            *("dense_8", _DENSE_8, Dense8, _dense_8),
            *(_WIDE_VALUES, _SCALED_AND_MASKED, _WINDOWED_AND_MASKED),
        ),
        _rows("sparse", {**_SPARSE, **_ONE_LIST}, _V4_WIDTHS),
        _rows("attend", _SOURCES, _SEVERAL),
        _rows("latent", _LATENT, _V4_WIDTHS, _LONG_WINDOW),
        CDNA4_BACKWARD,
        *INDEX_KERNELS,
    ),
)
