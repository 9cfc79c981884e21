"""Statistics of query rows: what the exponents are relative to, delta, and parts of d_sink.

    total = lse, or logaddexp(lse, sink), in log2 units; +inf for a row that sees no key
    delta = sum(out * d_out) - d_lse; 0 for a row that sees no key

A weight is exp2(score - total), so rows that see no key and rows past a sequence have weights of 0
without a mask. The gradient of lse is in delta only where there is no sink.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.gradients.records import RowStatistics
from openmla.kernels.gluon.gradients.rows import VECTOR, wide
from openmla.kernels.gluon.scores import LOG2_E, MINUS_INF, opaque_zero

PLUS_INF = gl.constexpr(float("inf"))
GROUP_ROWS = gl.constexpr(64)  # of a warp-group


@gluon.jit
def row_of(rows, item, WHO: gl.constexpr):
    """Where a warp-group's first row of a head begins. rows: Rows, item: WorkItem."""
    token = item.token + (opaque_zero() + WHO * GROUP_ROWS)
    return rows.base + (token * wide(rows.stride_t) + item.head * wide(rows.stride_h))


@gluon.jit
def load_columns(
    rows, item, ok, D: gl.constexpr, FIRST: gl.constexpr, WHO: gl.constexpr, BL: gl.constexpr
):
    """D columns from FIRST on of 64 rows of a head in fp32, zeros where not `ok`; 16 bytes per
    thread and load.

    Strides come in units of 8 elements.
    """
    row = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, BL))
    column = gl.arange(0, D, gl.SliceLayout(0, BL))
    if FIRST > 0:
        column += FIRST
    step = wide(rows.stride_t) * VECTOR
    token = item.token + (opaque_zero() + WHO * GROUP_ROWS)
    first = rows.base + (token * step + item.head * (wide(rows.stride_h) * VECTOR))
    here = (first + row * step)[:, None] + column[None, :]
    return gl.load(here, mask=ok[:, None], other=0.0).to(gl.float32)


@gluon.jit
def row_statistics(item, saved, stats, D_V: gl.constexpr, WHO: gl.constexpr, SL: gl.constexpr):
    """The RowStatistics of 64 rows of a tile, those of warp-group WHO, also written to `stats`.

    item: WorkItem, saved: Saved, stats: Statistics. Rows are those of the layout SL of scores.
    """
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    left = item.rows - WHO * GROUP_ROWS
    row = gl.arange(0, GROUP_ROWS, RL)
    lse_rows = row_of(saved.lse, item, WHO) + row * wide(saved.lse.stride_t)
    lse = gl.load(lse_rows, mask=row < left, other=MINUS_INF)
    seeing = lse != MINUS_INF
    total = lse
    if saved.sink is not None:
        # An infinite sink works too: the larger one is infinite, and the exponential of -inf is 0.
        sink = gl.load(saved.sink + item.head)
        total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))
    total = gl.where(seeing, total * LOG2_E, PLUS_INF)

    ok = gl.convert_layout(seeing, gl.SliceLayout(1, BL))
    AT_ONCE: gl.constexpr = min(D_V, 128)  # more columns would not fit into registers
    out = load_columns(saved.out, item, ok, AT_ONCE, 0, WHO, BL)
    d_out = load_columns(saved.d_out, item, ok, AT_ONCE, 0, WHO, BL)
    products = gl.sum(out * d_out, 1)
    if D_V > AT_ONCE:
        out = load_columns(saved.out, item, ok, AT_ONCE, AT_ONCE, WHO, BL)
        d_out = load_columns(saved.d_out, item, ok, AT_ONCE, AT_ONCE, WHO, BL)
        products += gl.sum(out * d_out, 1)
    delta = gl.convert_layout(products, RL)
    place = item.place + WHO * GROUP_ROWS
    if stats.part_sink is not None:
        share = 1.0 / (1.0 + gl.exp(lse - gl.load(saved.sink + item.head)))
        part = -gl.sum(gl.where(seeing, share * delta, 0.0), 0)
        number = (place // GROUP_ROWS).to(gl.int64) * stats.heads + item.head
        gl.store(stats.part_sink + number, part)
    if saved.d_lse.base is not None:
        d_lse_rows = row_of(saved.d_lse, item, WHO) + row * wide(saved.d_lse.stride_t)
        delta = delta - gl.load(d_lse_rows, mask=seeing, other=0.0)
    here = stats.base + (item.head.to(gl.int64) * stats.rows + place) + row
    gl.store(here, total)
    gl.store(here + stats.heads.to(gl.int64) * stats.rows, delta)
    return RowStatistics(total=total, delta=delta)
