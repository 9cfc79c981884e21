"""Statistics of query rows: what the exponents are relative to, delta, and parts of d_sink.

    total = lse, or logaddexp(lse, sink), in log2 units; +inf for a row that sees no key
    delta = sum(out * d_out) - d_lse; 0 for a row that sees no key

A weight is exp2(score - total), so rows that see no key and rows past a sequence have weights of 0
without a mask. The gradient of lse is in delta only where there is no sink.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.cdna4.backward.records import RowStatistics
from openmla.kernels.cdna4.backward.walk import PIECE
from openmla.kernels.gluon.scores import LOG2_E, MINUS_INF

PLUS_INF = gl.constexpr(float("inf"))


@gluon.jit
def row_of(rows, item):
    """Where the rows of an item's head begin, in strides of TokenRows `rows`."""
    token = item.token.to(gl.int64) * rows.token_stride
    return token + item.head.to(gl.int64) * rows.row_stride


@gluon.jit
def load_columns(rows, item, ok, BM: gl.constexpr, D: gl.constexpr, BL: gl.constexpr):
    """BM rows of a head in fp32, zeros where not `ok`; strides count pieces of 16 bytes."""
    row = gl.arange(0, BM, gl.SliceLayout(1, BL))
    column = gl.arange(0, D, gl.SliceLayout(0, BL))
    at = rows.ptr + row_of(rows, item) * PIECE
    here = (at + row.to(gl.int64) * (rows.token_stride * PIECE))[:, None] + column[None, :]
    return gl.load(here, mask=ok[:, None], other=0.0).to(gl.float32)


@gluon.jit
def row_statistics(item, saved, stats, part_ptr, place, BLOCK: gl.constexpr, SL: gl.constexpr):
    """The RowStatistics of a WorkItem's rows, also written to `stats` from row `place` on, and
    their part of d_sink, to `part_ptr` unless it is None.

    saved: Saved, stats: Statistics. Rows are those of the layout SL of scores.
    """
    BM: gl.constexpr = BLOCK.own_rows
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0])
    row = gl.arange(0, BM, RL)
    lse_rows = saved.lse.ptr + row_of(saved.lse, item)
    lse_rows = lse_rows + row.to(gl.int64) * saved.lse.token_stride
    lse = gl.load(lse_rows, mask=row < item.rows, other=MINUS_INF)
    seeing = lse != MINUS_INF
    total = lse
    if saved.sink_ptr is not None:
        # An infinite sink works too: the larger one is infinite, and the exponential of -inf is 0.
        sink = gl.load(saved.sink_ptr + item.head)
        total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))
    total = gl.where(seeing, total * LOG2_E, PLUS_INF)

    ok = gl.convert_layout(seeing, gl.SliceLayout(1, BL))
    out = load_columns(saved.out, item, ok, BM, BLOCK.d_v, BL)
    d_out = load_columns(saved.d_out, item, ok, BM, BLOCK.d_v, BL)
    delta = gl.convert_layout(gl.sum(out * d_out, 1), RL)
    if part_ptr is not None:
        share = 1.0 / (1.0 + gl.exp(lse - gl.load(saved.sink_ptr + item.head)))
        gl.store(part_ptr, -gl.sum(gl.where(seeing, share * delta, 0.0), 0))
    if saved.d_lse.ptr is not None:
        d_lse_rows = saved.d_lse.ptr + row_of(saved.d_lse, item)
        d_lse_rows = d_lse_rows + row.to(gl.int64) * saved.d_lse.token_stride
        delta = delta - gl.load(d_lse_rows, mask=seeing, other=0.0)
    here = stats.ptr + (item.head.to(gl.int64) * stats.rows + place) + row
    gl.store(here, total)
    gl.store(here + stats.heads.to(gl.int64) * stats.rows, delta)
    return RowStatistics(total=total, delta=delta)
