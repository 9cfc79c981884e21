"""Statistics of query rows: what the exponents are relative to, delta, and parts of d_sink.

    total = lse, or logaddexp(lse, sink), in log2 units; +inf for a row that sees no key
    delta = sum(out * d_out) - d_lse; 0 for a row that sees no key

As in the dense backward (backward/statistics.py). A program has 16 heads of a query; it reads out
and d_out once, so that no block of the walk has to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import LOG2_E, MINUS_INF
from openmla.kernels.hopper.accumulator import VECTOR

PLUS_INF = gl.constexpr(float("inf"))
HEADS = gl.constexpr(16)
COUNTS = ["heads", "head_blocks"]
STRIDES = [f"{name}_stride_{of}" for name in ("out", "lse", "d_out", "d_lse") for of in ("t", "h")]
VECTORS = ["lse_ptr", "d_lse_ptr", "sink_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def statistics_kernel(  # noqa: PLR0913
    out_ptr,
    d_out_ptr,
    lse_ptr,
    d_lse_ptr,
    sink_ptr,
    total_ptr,
    delta_ptr,
    part_sink_ptr,
    heads,
    head_blocks,
    out_stride_t,
    out_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    lse_stride_t,
    lse_stride_h,
    d_lse_stride_t,
    d_lse_stride_h,
    D_V: gl.constexpr,
):
    """total and delta [total_q, heads] of 16 heads of a query. Strides of out and d_out come in
    units of 8 elements."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    head = gl.program_id(0) % head_blocks * HEADS + gl.arange(0, HEADS, RL)
    here = head < heads
    lse = gl.load(
        lse_ptr + token * lse_stride_t + head.to(gl.int64) * lse_stride_h,
        mask=here,
        other=MINUS_INF,
    )
    seeing = lse != MINUS_INF
    total = lse
    if sink_ptr is not None:
        # An infinite sink works too: the larger one is infinite, and the exponential of -inf is 0.
        sink = gl.load(sink_ptr + head, mask=here, other=0.0)
        total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))
    column = gl.arange(0, D_V, gl.SliceLayout(0, BL))
    out_row = out_ptr + token * out_stride_t * VECTOR + head.to(gl.int64) * out_stride_h * VECTOR
    d_out_row = (
        d_out_ptr + token * d_out_stride_t * VECTOR + head.to(gl.int64) * d_out_stride_h * VECTOR
    )
    seen = seeing[:, None]
    out = gl.load(out_row[:, None] + column[None, :], mask=seen, other=0.0).to(gl.float32)
    d_out = gl.load(d_out_row[:, None] + column[None, :], mask=seen, other=0.0).to(gl.float32)
    delta = gl.sum(out * d_out, 1)
    at = token * heads + head
    if part_sink_ptr is not None:
        share = 1.0 / (1.0 + gl.exp(lse - sink))
        gl.store(part_sink_ptr + at, -gl.where(seeing, share * delta, 0.0), mask=here)
    if d_lse_ptr is not None:
        d_lse_row = d_lse_ptr + token * d_lse_stride_t + head.to(gl.int64) * d_lse_stride_h
        delta = delta - gl.load(d_lse_row, mask=seeing, other=0.0)
    gl.store(total_ptr + at, gl.where(seeing, total * LOG2_E, PLUS_INF), mask=here)
    gl.store(delta_ptr + at, delta, mask=here)
