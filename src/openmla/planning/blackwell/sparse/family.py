"""The sparse kernels of the Blackwell family: a CTA pair, one CTA, FP8 rows, FP8 throughout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from openmla.errors import Unsupported
from openmla.formats import BF16, FORMATS
from openmla.planning.blackwell.sparse.prefill import (
    P_TMEM_ADDR,
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    select_mla_sparse_config,
)
from openmla.planning.blackwell.sparse.qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.planning.blackwell.sparse.shape import SparseShape
from openmla.planning.blackwell.sparse.smem import MLASparseSharedMemoryFP8, Offsets
from openmla.planning.blackwell.units import NUM_THREADS, SMEM_CARVEOUT, TMEM_COLS
from openmla.planning.family import Block, Kernel, Pipeline
from openmla.planning.memory import Columns, MemoryMap, Region
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
from openmla.planning.target import Target
from openmla.problem import Problem

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}
MOST_PAGE_ROWS = 1024
# A pair's products inside a partition need barriers that both CTAs share.
FIRST_PAIR_TRITON = (3, 9)
_LAUNCHER = "openmla.kernels.blackwell.sparse.launch"

_SPARSE_KINDS = {"qkvo_union": "k", "scores": "p", "p": "p", "q": "q", "kv": "k", "v": "v"}
_SPARSE_LABELS = {"qkvo_union": "Q, then Q + V + K, then output", "p": "P", "kv": "K (and V)"}


def _pair(problem: Problem, target: Target) -> MLAPrefillSparse:
    base = select_mla_sparse_config(num_q_heads=problem.heads, indices_stride=problem.topk)
    return MLAPrefillSparse(**base.arguments() | {"qkv_dtype": _LONG_NAMES[problem.q_dtype]})


def _one_cta(problem: Problem, target: Target) -> MLAPrefillSparse:
    return _pair(problem, target).one_cta()


def _dequantized(problem: Problem, target: Target) -> MLAPrefillSparseFP8:
    """One CTA also for 128 heads: a pair in which each CTA dequantizes half is not written."""
    config = MLAPrefillSparseFP8(**_one_cta(problem, target).arguments())
    reason = config.why_unsupported() or fp8_cache_smem(config, problem).why_unsupported()
    if reason:
        raise Unsupported(reason)
    return config


def _all_fp8(problem: Problem, target: Target) -> MLAPrefillSparseQKVFP8:
    base = select_mla_sparse_config(num_q_heads=problem.heads, indices_stride=problem.topk)
    return MLAPrefillSparseQKVFP8(**base.arguments() | {"qkv_dtype": _LONG_NAMES["e4m3"]})


def fp8_cache_smem(config: MLAPrefillSparseFP8, problem: Problem) -> MLASparseSharedMemoryFP8:
    """The byte map of a sparse block over an FP8 cache: the bf16 one, then the scales."""
    stored = FORMATS.get(problem.kv_dtype, BF16)  # plain e4m3 rows have no scales
    block = stored.layout(problem.d_nope, problem.d_rope).block
    return MLASparseSharedMemoryFP8(scale_block_size=block, **config.arguments())


def _sparse_block(config: MLAPrefillSparse, problem: Problem) -> Block:
    return _block(config, config.smem.offsets, _columns(config))


def _all_fp8_block(config: MLAPrefillSparseQKVFP8, problem: Problem) -> Block:
    return _block(config, config.smem.offsets, _all_fp8_columns(config))


def _block(config: SparseShape, offsets: Offsets, columns: tuple[Columns, ...]) -> Block:
    return Block(
        tile_rows=config.PADDED_HEADS_PER_CTA,
        tile_keys=config.B_TOPK,
        stages=config.num_mbars,
        threads=NUM_THREADS,
        memory=_sparse_map(offsets),
        tensor_memory=columns,
        pipeline=_sparse_pipeline(config),
    )


def _dequantized_block(config: MLAPrefillSparseFP8, problem: Problem) -> Block:
    block = _sparse_block(config, problem)
    end, total = block.memory.used, fp8_cache_smem(config, problem).size_of
    scales = Region("scales of the FP8 rows", "stats", end, total - end)
    return replace(block, memory=replace(block.memory, regions=(*block.memory.regions, scales)))


def _dequantized_lines(config: MLAPrefillSparseFP8, problem: Problem) -> list[str]:
    total = fp8_cache_smem(config, problem).size_of
    scales = f"{total - config.smem_used} bytes of scales and their barriers"
    return [*config.explain(), f"FP8 cache: {scales} more, {total} in all"]


def _all_fp8_lines(config: MLAPrefillSparseQKVFP8, problem: Problem) -> list[str]:
    return config.smem.explain()


def _sparse_map(offsets: Offsets) -> MemoryMap:
    """The big fields by name, everything small as one region of barriers and statistics."""
    ends = {name: offsets[after] for name, after in pairwise(offsets)}
    regions = [
        Region(_SPARSE_LABELS.get(name, name), kind, offsets[name], ends[name] - offsets[name])
        for name, kind in _SPARSE_KINDS.items()
        if name in offsets
    ]
    regions.sort(key=lambda region: region.offset)
    rest = max(region.offset + region.size for region in regions)
    size = offsets["_end"] - rest
    regions.append(Region("barriers, masks, row statistics", "barriers", rest, size))
    return MemoryMap(tuple(regions), SMEM_CARVEOUT)


def _sparse_pipeline(config: SparseShape) -> Pipeline:
    rows, keys = config.PADDED_HEADS_PER_CTA, config.B_TOPK
    widths = config.qk_depth, config.v_depth, config.qkv_dtype_size
    return Pipeline(1, rows, keys, *widths, config.num_mbars, 0)


def _output_columns(config: SparseShape) -> tuple[Columns, ...]:
    atom = config.O_ATOM_PHYS_COLS
    return Columns("O left", 0, atom), Columns("O right", atom, atom)


def _columns(config: MLAPrefillSparse) -> tuple[Columns, ...]:
    q = config.Q_TMEM_ADDR
    scores = Columns("scores", P_TMEM_ADDR, config.score_cols)
    return (*_output_columns(config), scores, Columns("Q", q, TMEM_COLS - q))


def _all_fp8_columns(config: MLAPrefillSparseQKVFP8) -> tuple[Columns, ...]:
    base, stride = config.S_TMEM_BASE, config.S_SLOT_STRIDE
    scores = (Columns(f"S{i}", base + i * stride, stride) for i in range(config.NUM_S_SLOTS))
    return (*_output_columns(config), *scores)


_EVERY_SPARSE = {
    "form": OneOf("sparse"),
    ("d_nope", "d_rope", "d_v"): OneOf((512, 64, 512)),
    "page_size": Range(0, MOST_PAGE_ROWS),
    "causal": YES_OR_NO,
    "topk": Range(1),
    "has_topk_lengths": YES_OR_NO,
    "has_sink": YES_OR_NO,
    "wants_lse": YES_OR_NO,
    "wants_max_logits": YES_OR_NO,
    **LENGTHS,
    "aligned_16": ALIGNED,
}
_HEAD_STEPS = (8, 16, 24, 32, 40, 48, 56, 64)
SPARSE_KERNELS = (
    Kernel(
        serves=Serves(
            {
                **_EVERY_SPARSE,
                "heads": OneOf(128),
                DTYPES: OneOf(*alike("bf16", "fp16")),
                "rope": OneOf("shared"),
            }
        ),
        config=MLAPrefillSparse,
        choose=_pair,
        launcher=_LAUNCHER,
        block=_sparse_block,
        first_triton=FIRST_PAIR_TRITON,
    ),
    Kernel(
        serves=Serves(
            {
                **_EVERY_SPARSE,
                "heads": OneOf(*_HEAD_STEPS, 128),
                DTYPES: OneOf(*alike("bf16", "fp16")),
                "rope": OneOf("shared"),
            }
        ),
        config=MLAPrefillSparse,
        choose=_one_cta,
        launcher=_LAUNCHER,
        block=_sparse_block,
    ),
    Kernel(
        serves=Serves(
            {
                **_EVERY_SPARSE,
                "heads": OneOf(*_HEAD_STEPS, 128),
                DTYPES: OneOf(*(("bf16", name, name, name) for name in ("e4m3", *GLUON_CACHES))),
                "rope": OneOf("shared"),
            }
        ),
        config=MLAPrefillSparseFP8,
        choose=_dequantized,
        launcher=_LAUNCHER,
        block=_dequantized_block,
        explain=_dequantized_lines,
    ),
    Kernel(
        serves=Serves(
            {
                **_EVERY_SPARSE,
                "heads": OneOf(*_HEAD_STEPS, 128),
                DTYPES: OneOf(*alike("e4m3")),
                "rope": OneOf("shared"),
            }
        ),
        config=MLAPrefillSparseQKVFP8,
        choose=_all_fp8,
        block=_all_fp8_block,
        explain=_all_fp8_lines,
    ),
)
