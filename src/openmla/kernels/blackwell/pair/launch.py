"""Host side of the kernel of a CTA pair: from a Plan and its operands to a kernel call.

Nothing here reads a device tensor, so nothing waits for the GPU.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.pair.kernel import pair_kernel
from openmla.kernels.blackwell.pair.plan import KEYS, ROWS, TILE, PairKernel
from openmla.kernels.blackwell.pair.records import Registers
from openmla.kernels.blackwell.records import WeightRange
from openmla.kernels.blackwell.sparse.launch import (
    LOG2_E,
    Rows,
    gather_box,
    head_box,
    indexing_of,
    lists_of,
    rows_of,
    widened,
)
from openmla.kernels.blackwell.sparse.records import Indexing
from openmla.kernels.call import Call, angles_of, strides, vector
from openmla.kernels.gluon.compat import pair_tmem_layout, tmem_reg_layout
from openmla.kernels.gluon.dequantize.launch import Filling, dequantized_operands, joined_sources
from openmla.kernels.gluon.places import NO_SPANS, places_of
from openmla.kernels.gluon.ranges.launch import group_of, groups, merge_call, partial_results
from openmla.operands import AttendOperands, LatentOperands, Results, SparseOperands, data_of
from openmla.planning import Plan
from openmla.planning.dequantize import Workspace
from openmla.planning.target import target_by_name

ATOM = 256  # columns of the output that one product writes
OUT_SIZE = 2  # bytes
VECTOR = 8  # elements of 16 bytes: the unit of the merge's strides
WHOLE = Workspace(names=False, units=0, may_overflow=False)
SECOND_ARGUMENTS = (
    *("indices_ptr", "lengths_ptr", "request_ptr", "begin_ptr", "requests", "topk", "rows", "base"),
    "indices_stride",
)
NO_SECOND: dict[str, Any] = {f"second_{name}": None for name in SECOND_ARGUMENTS}
Operands = SparseOperands | LatentOperands | AttendOperands


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """The kernel calls of a launch; none for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # there are no keys, and a descriptor cannot describe an empty tensor
        return
    kernel, chip = PairKernel(plan.config, plan.problem), target_by_name(plan.target)
    workspace = plan.variant.workspace
    columns = plan.config.v_depth, plan.config.qk_depth - plan.config.v_depth
    if isinstance(op, AttendOperands) or kernel.joins:
        assert not isinstance(op, LatentOperands)
        placed = _sources(kernel, op, Filling(WHOLE, columns, chip.sm_count))
    elif workspace is not None:
        space = dequantized_operands(Filling(workspace, columns, chip.sm_count), op)
        yield from space.calls
        placed = _listed(space.operands)
    else:
        placed = _listed(op)
    yield from placed.calls
    if plan.config.qkv_dtype_size == OUT_SIZE:
        op, copies = widened(op)
        yield from copies
    rows, size = placed.rows, kernel.size
    tokens, heads, _ = op.q.shape
    arguments = {
        **constexprs_of(kernel, placed.indexing),
        **placed.arguments,
        "q_desc": head_box(op.q, 2 * ROWS, TILE, tile(1, size, 3)),
        "k_desc": gather_box(rows, TILE, tile(0, size)),
        "v_desc": gather_box(rows, ATOM, tile(1, size)),
        "out_desc": head_box(results.out, 2 * ROWS, ATOM, tile(1, OUT_SIZE, 3)),
        "lse_ptr": results.lse,
        **strides("lse", results.lse),
        "max_logits_ptr": results.max_logits,
        **strides("logits", results.max_logits),
        "sink_ptr": vector(op.weights.sink),
        "q_scale_ptr": vector(op.weights.q_scale),
        "factor": op.weights.scale * LOG2_E,
        "tokens": tokens,
        "heads": heads,
        "page_step": rows.page_step,
        "row_step": rows.row_step,
        **angles_of(op.turn_back),
    }
    yield from _launches(plan, op, results, arguments, max(chip.sm_count // 2, 1))


class Placed(NamedTuple):
    """Which rows each token sees, and where they lie."""

    rows: Rows
    arguments: dict[str, Any]
    indexing: Indexing
    calls: tuple[Call, ...] = ()
    """Launches that bring the rows there."""


def _listed(op: SparseOperands | LatentOperands) -> Placed:
    """The lists of the tokens, or the pages of their sequences, over rows where they are."""
    keys, table = lists_of(op)
    rows = rows_of(data_of(op.cache))
    indexing = Indexing(
        page_size=rows.page_size,
        table_page_size=table.page_size,
        is_causal=table.is_causal,
        ctas=2,
        is_span=False,
        second=None,
    )
    return Placed(rows, {**keys, **NO_SPANS, **NO_SECOND}, indexing)


def _sources(kernel: PairKernel, op: AttendOperands | SparseOperands, filling: Filling) -> Placed:
    """Lists and spans of one source, over rows where they are, or over joined rows."""
    if kernel.joins:
        joined = joined_sources(filling, op)
        rows, bases, made = rows_of(joined.rows), joined.bases, joined.calls
    else:
        rows, bases, made = rows_of(data_of(op.sources[0].rows)), (0,), ()
    first, *more = [{**NO_SPANS, "lengths_ptr": None, **places_of(source)} for source in op.sources]
    indexing, *others = [indexing_of(source, rows.page_size, ctas=2) for source in op.sources]
    arguments = {**first, "cu_ptr": None, "batch": 0, "window": None, **NO_SECOND}
    if more:
        arguments |= {f"second_{name}": value for name, value in more[0].items()}
        arguments["second_base"] = bases[1]
    second = others[0] if others else None
    return Placed(rows, arguments, indexing._replace(second=second), made)


def _launches(
    plan: Plan, op: Operands, results: Results, arguments: dict[str, Any], pairs: int
) -> Iterator[Call]:
    """One launch; or where requests may be split, one for each group of them, with its merge."""
    space, tokens = plan.variant.ranges, op.q.shape[0]
    if space is None or not space.rows:
        whole = {"part_sums_ptr": None, "part_state_ptr": None, "part_rows": 0, "rest_q": 0}
        yield Call(pair_kernel, min(tokens, pairs), arguments | whole)
        return
    assert isinstance(op, LatentOperands)
    parts = partial_results(space, plan.config.v_depth, results.out.device)
    no_bits = parts.pop("range_bits")
    for group in groups(space, op):
        here = arguments | parts | group_of(op, arguments["indices_ptr"], group)
        yield Call(pair_kernel, min(tokens * space.ranges, pairs), here)
        merged = {"range_bits": no_bits, "total_q": tokens, "out_ptr": results.out}
        merged |= strides("out", results.out, VECTOR)
        yield merge_call(plan.config.v_depth, space, here | merged)


@lru_cache(maxsize=64)
def constexprs_of(kernel: PairKernel, indexing: Indexing) -> dict[str, Any]:
    """The constants that follow from the plan and from how rows are listed and laid out."""
    atom = pair_tmem_layout(ROWS, KEYS)
    return {
        "INDEXING": indexing,
        "Q_TILES": kernel.config.qk_depth // TILE,
        "SLOTS": kernel.slots,
        "WEIGHTS": WeightRange(*kernel.weights),
        "ATOM": atom,
        "REGS": tmem_reg_layout(gl.float32, (2 * ROWS, KEYS), atom, 4),
        "TILE": tile(0, kernel.size),
        "V_TILE": tile(1, kernel.size),
        "OUT_TILE": tile(0, OUT_SIZE),
        "REGISTERS": Registers(*kernel.registers),
        "num_warps": 4,
        "num_ctas": 2,
    }


def tile(axis: int, element: int, rank: int = 2) -> Any:
    """The layout of a tile of which each CTA holds half, along `axis`: swizzled by 64 columns."""
    cluster = [[int(i == axis) for i in range(rank)]]
    return gl.NVMMASharedLayout(
        swizzle_byte_width=TILE * element,
        element_bitwidth=8 * element,
        rank=rank,
        cga_layout=cluster,
    )
