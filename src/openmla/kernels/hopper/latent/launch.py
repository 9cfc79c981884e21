"""Host side of the latent Hopper kernel: from a Plan and its operands to a kernel call.

`calls` lists what a launch runs, as data: the plan's variant says which kernels, `numbers` what
token counts decide of them. Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.arithmetic import ceildiv
from openmla.kernels.call import (
    COUNTER,
    WORKSPACE,
    Call,
    Extent,
    LaunchNumbers,
    Sources,
    angles_of,
    launch_counter,
    scale_arguments,
    strides,
    vector,
)
from openmla.kernels.gluon.dequantize.launch import (
    Filling,
    dequantized_operands,
    dequantized_sources,
    source_rows_of,
    stored_rows_of,
)
from openmla.kernels.gluon.dequantize.records import RowColumns, Stored
from openmla.kernels.gluon.descriptors import SWIZZLE_BYTES, box_strides, tile_layout
from openmla.kernels.gluon.places import NO_SPANS, places_of
from openmla.kernels.gluon.ranges.launch import (
    NO_PARTS,
    group_of,
    groups,
    merge_call,
    partial_results,
)
from openmla.kernels.gluon.turning import SOURCES as ANGLE_SOURCES
from openmla.kernels.hopper.few.launch import few_calls
from openmla.kernels.hopper.latent.kernel import latent_kernel
from openmla.kernels.hopper.latent.plan import (
    HopperLatentConfig,
    LatentVariant,
    RowsLaunch,
)
from openmla.kernels.hopper.latent.records import (
    CAUSAL,
    FULL,
    LISTED,
    WINDOW,
    Registers,
    TileLayouts,
)
from openmla.operands import (
    AttendOperands,
    LatentOperands,
    Results,
    SparseOperands,
    token_slices,
)
from openmla.planning import Plan
from openmla.planning.latent_split import MOST_ROWS, RangeSpace
from openmla.problem import Problem

WGMMA_ROWS = 64
VECTOR = 8  # elements in 16 bytes
Operands = SparseOperands | LatentOperands | AttendOperands
SOURCES: Sources = {
    "q_half_desc": "q",
    "q_rope_desc": "q",
    "k_half_desc": "cache_data",
    "k_rope_desc": "cache_data",
    "out_ptr": "out",
    "lse_ptr": "lse",
    "logits_ptr": "max_logits",
    "sink_ptr": "sink",
    "data_ptr": ("kv", "cache_data"),
    "rope_ptr": ("kv", "cache_data"),
    "scale_ptr": ("cache_scales", "kv", "cache_data"),
    "indices_ptr": ("indices", "block_table"),
    "lengths_ptr": ("topk_lengths", "cache_lengths", "end"),
    "request_ptr": "request",
    "begin_ptr": "begin",
    "second_data_ptr": "second_kv",
    "second_scale_ptr": "second_scales",
    "second_indices_ptr": ("second_indices", "second_table"),
    "second_lengths_ptr": ("second_lengths", "second_end"),
    "second_request_ptr": "second_request",
    "second_begin_ptr": "second_begin",
    "cu_ptr": "cu_seqlens_q",
    **ANGLE_SOURCES,
    "part_sums_ptr": WORKSPACE,
    "part_state_ptr": WORKSPACE,
    "counter_ptr": COUNTER,
}


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; without keys nothing, and results are cleared."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()
        return
    config: HopperLatentConfig = plan.config
    variant: LatentVariant = plan.variant
    if variant.few:
        heads = _queries(config, op.q, packed=False, rows=variant.few.padded_heads)
        arguments = _arguments(plan, variant.rows[0], op, results)
        yield from few_calls(variant.few, arguments, heads, SOURCES)
        return
    if variant.workspace is None:
        yield from _attention(plan, [Way(variant.rows[0], op, {})], results)
        return
    columns, lanes = (config.latent, config.rope), config.copy_lanes
    filling = Filling(variant.workspace, columns, config.sm_count, lanes)
    after = {"AFTER": True, "launch_pdl": True}  # may begin before the launch in front has ended
    if isinstance(op, AttendOperands):
        bf16 = dequantized_sources(filling, op)
        yield from bf16.calls
        yield from _attention(plan, [Way(variant.rows[0], bf16.operands, after)], results)
        return
    space = dequantized_operands(filling, op)
    ways = []
    for rows in variant.rows:
        over = op if rows.dequantizes else space.operands
        gate = space.gate(fits=not rows.dequantizes)
        ways.append(Way(rows, over, gate | after))
    yield from space.calls
    yield from _attention(plan, ways, results)


class Way(NamedTuple):
    """One way to read rows: as they are stored, or dequantized before."""

    rows: RowsLaunch
    operands: Operands
    gate: dict[str, Any]
    """Arguments by which one of two launches exits early."""


NO_GATE: dict[str, Any] = {"total_ptr": None, "capacity": 0, "FITS": True, "AFTER": False}
SECOND_ARGUMENTS = (
    "data_ptr",
    "scale_ptr",
    "indices_ptr",
    "lengths_ptr",
    "request_ptr",
    "begin_ptr",
    "requests",
    "topk",
    "rows",
    "page_rows",
    "indices_stride",
    "stride_page",
    "stride_row",
    "scale_page",
    "scale_row",
)
NO_SECOND: dict[str, Any] = {f"second_{name}": None for name in SECOND_ARGUMENTS}


def _attention(plan: Plan, ways: list[Way], results: Results) -> Iterator[Call]:
    """The launches over rows: of two, one exits early (see `total_ptr` of the kernel). Sequences
    that may be split go in groups, each with its merge; those of an invariant call some tokens at a
    time."""
    config, problem = plan.config, plan.problem
    if problem.form == "sparse":
        for rows, op, gate in ways:
            way = _arguments(plan, rows, op, results) | gate | NO_PARTS
            yield Call(latent_kernel, list_programs(config, problem), way, SOURCES)
        return
    space: RangeSpace = plan.variant.ranges
    parts = partial_results(space, config.latent, results.out.device)
    for tokens in token_slices(results.out.shape[0], space.tokens):
        chosen = [(rows, tokens_of(op, tokens), gate) for rows, op, gate in ways]
        written = results.of_tokens(tokens)
        called = [(_arguments(plan, rows, op, written) | gate, op) for rows, op, gate in chosen]
        for group in groups(space, called[0][1]):
            here: dict[str, Any] = {}
            for way, op in called:
                here = way | parts | group_of(op, way["indices_ptr"], group)
                yield Call(latent_kernel, range_programs(config, problem, space), here, SOURCES)
            if space.rows:
                yield merge_call(config.latent, space, here, SOURCES)


def tokens_of(op: Operands, tokens: slice | None) -> LatentOperands:
    """Some tokens of a call over sequences; None: all of them."""
    assert isinstance(op, LatentOperands)
    return op if tokens is None else op.of_tokens(tokens)


def _arguments(plan: Plan, rows: RowsLaunch, op: Operands, results: Results) -> dict[str, Any]:
    """One launch over the rows of `op` as they are stored."""
    config = plan.config
    if isinstance(op, LatentOperands):
        places = {**sequences(op), **stored_rows_of(op.cache), **NO_SPANS, **NO_SECOND}
        places["window"] = op.window or None
        places["STORED"] = stored_of(places["STORED"])
    else:
        places = {**lists(config, op), **sources_of(op), "window": None}
    registers = config.registers_of(rows.dequantizes)
    return {
        **constexprs(config),
        **places,
        **NO_GATE,
        "REGISTERS": Registers(registers.consumer, registers.producer),
        "CHUNK": rows.chunk,
        "counter_ptr": launch_counter(op.q.device) if rows.dynamic else None,
        **outputs(results),
        **scale_arguments(op.weights.scale),
        **angles_of(op.turn_back),
        **_queries(config, op.q, packed=isinstance(op, LatentOperands)),
        **_boxes(config, rows, op),
        "sink_ptr": vector(op.weights.sink),
        "heads": op.q.shape[1],
        "total_q": op.q.shape[0],
    }


def numbers(plan: Plan, problem: Problem) -> list[LaunchNumbers] | None:
    """What the number of tokens decides of a launch over lists of rows that are read as they are.
    Sequences over pages, and whether FP8 rows are worth a workspace, are planned anew."""
    config: HopperLatentConfig = plan.config
    several = problem.is_attend
    if config.cache_read.mode != "plain" or problem.form != "sparse" or plan.variant.few or several:
        return None
    described = dict.fromkeys(("q_half_desc", "q_rope_desc"), Extent(0, problem.total_q))
    arguments: dict[str, int | Extent] = {**list_counts(config, problem.total_q), **described}
    return [LaunchNumbers(list_programs(config, problem), arguments)]


def list_counts(config: HopperLatentConfig, tokens: int) -> dict[str, int]:
    """Integers that follow from the number of lists."""
    return {"tiles": tokens * config.row_blocks, "total_q": tokens}


def list_programs(config: HopperLatentConfig, problem: Problem) -> int:
    """One for each SM, or for each tile if those are fewer."""
    return min(problem.total_q * config.row_blocks, config.sm_count)


def range_programs(config: HopperLatentConfig, problem: Problem, space: RangeSpace) -> int:
    """One for each SM, or for each tile if those are fewer and no range is cut."""
    tiles = problem.total_q * problem.heads // WGMMA_ROWS + problem.batch + 1
    return config.sm_count if space.rows else min(tiles, config.sm_count)


def lists(config: HopperLatentConfig, op: SparseOperands | AttendOperands) -> dict[str, Any]:
    """Every token with its own rows, those of its first source: a tile is 64 of its heads."""
    return {
        **places_of(op.sources[0]),
        "cu_ptr": None,
        **list_counts(config, op.q.shape[0]),
        "head_blocks": config.row_blocks,
        "mean_tiles": 1,
        "batch": 0,
        "rest_q": 0,
        "MASK": LISTED.value,
    }


def sources_of(op: SparseOperands | AttendOperands) -> dict[str, Any]:
    """Rows and places of one source, or of two."""
    rows = stored_rows_of if isinstance(op, SparseOperands) else source_rows_of
    first, *more = ({**rows(source.rows), **NO_SPANS, **places_of(source)} for source in op.sources)
    second = {f"second_{name}": more[0][name] for name in SECOND_ARGUMENTS} if more else NO_SECOND
    scaled = max(source["SCALED"] for source in (first, *more))
    stored = stored_of(*(source["STORED"] for source in (first, *more)))
    return {**first, **second, "SCALED": scaled, "STORED": stored}


def stored_of(first: str | None, second: str | None = None) -> Stored | None:
    """Formats of one source or two, where rows are read chunk by chunk or of several sources."""
    return None if first is None else Stored(first, second or first)


def sequences(op: LatentOperands) -> dict[str, Any]:
    """Sequences over pages: a tile is 64 rows, heads of tokens (see source.py)."""
    table = op.block_table if op.block_table.stride(1) == 1 else op.block_table.contiguous()
    return {
        "indices_ptr": table,
        "topk": min(op.block_table.shape[1] * op.cache.page_size, MOST_ROWS),
        "rows": min(op.cache.rows, MOST_ROWS),
        "tiles": 0,
        "head_blocks": 1,
        "mean_tiles": mean_tiles(op.q, op.cu_seqlens_q.shape[0] - 1),
        "indices_stride": table.stride(0),
        "MASK": (WINDOW if op.window else CAUSAL if op.causal else FULL).value,
    }


def mean_tiles(q: Tensor, requests: int) -> int:
    """Tiles of a request with the mean number of tokens."""
    tokens = ceildiv(q.shape[0], max(requests, 1))
    return max(1, ceildiv(tokens * q.shape[1], WGMMA_ROWS))


@lru_cache(maxsize=4096)
def constexprs(config: HopperLatentConfig) -> dict[str, Any]:
    """What is compiled in, besides the sign of the scale."""
    half = config.latent // 2
    return {
        "ST": config.num_kv_stages,
        "DIMS": RowColumns(config.latent, config.rope),
        "OVERLAY": config.p_overlays_rope,
        "LANES": config.copy_lanes,
        "LAYOUTS": TileLayouts(
            latent=tile_layout(half), rope=tile_layout(config.rope or 16), p=tile_layout(64)
        ),
        "num_warps": 4,
    }


def _queries(
    config: HopperLatentConfig, q: Tensor, packed: bool, rows: int = WGMMA_ROWS
) -> dict[str, Any]:
    """Descriptors of Q. `packed`: tiles hold heads of several tokens, so these must follow one
    another as the heads of one do."""
    rope = config.rope
    if packed:
        q = q.reshape(1, -1, q.shape[2])  # a copy only where heads and tokens have gaps
    return {
        "q_half_desc": heads_of_tokens(q, config.latent // 2, rows),
        "q_rope_desc": heads_of_tokens(q, rope, rows) if rope else None,
    }


def _boxes(config: HopperLatentConfig, rows: RowsLaunch, op: Operands) -> dict[str, Any]:
    """Descriptors of pages, where full blocks of keys come by TMA."""
    if not rows.boxes or not isinstance(op, LatentOperands):
        return {"k_half_desc": None, "k_rope_desc": None}
    data, rope = op.cache.data, config.rope
    return {
        "k_half_desc": heads_of_tokens(data, config.latent // 2),
        "k_rope_desc": heads_of_tokens(data, rope) if rope else None,
    }


def heads_of_tokens(
    q: Tensor, columns: int, rows: int = WGMMA_ROWS, span: int = SWIZZLE_BYTES
) -> Any:
    """Boxes of 64 heads of one token of q [tokens, heads, width]; zeros past the last head. span:
    bytes of a swizzle pattern."""
    box = [1, rows, columns]
    layout = tile_layout(columns, 3, q.element_size(), span)
    return TensorDescriptor(q, list(q.shape), box_strides(q), box, layout)


def outputs(results: Results) -> dict[str, Any]:
    """Where results are written."""
    out, lse, logits = results.out, results.lse, results.max_logits
    vectors = {"out_ptr": out, "lse_ptr": lse, "logits_ptr": logits}
    steps = strides("out", out, VECTOR) | strides("lse", lse) | strides("logits", logits)
    return {**vectors, **steps}
