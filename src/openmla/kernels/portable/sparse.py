"""Token-sparse MLA prefill in latent form, plain Triton.

| | |
|---|---|
| a program computes | one token, BM of its heads, all the rows its indices name |
| programs run | all head blocks of a token side by side: they gather the same rows through L2 |
| Q tile | [BM, LATENT] + [BM, ROPE], read once |
| a step reads | BN indices, then those rows (row_block.py); where an index does not count, `lead` |
| writes | out, lse, max_logits |

Masks cost a tenth of the time on an H200, most of it for carrying them from the threads that read
indices to those that hold scores. So a program first looks its list through: blocks before the
first index that does not count need no mask. After it such an index reads `lead`, a row that the
list names elsewhere and that may therefore be read, with a weight of 0.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import Factors, RowBlock, SoftmaxState
from openmla.kernels.portable.row_block import row_step
from openmla.kernels.portable.rows import load_query_tile
from openmla.kernels.portable.softmax import LN_2, MINUS_INF, PARTS, normalize
from openmla.kernels.portable.tiles import cut

SURVEY = tl.constexpr(1024)  # indices looked at together
COUNTS = ["factor", "rows", "topk", "heads", "head_blocks"]


@triton.jit
def survey(indices, count, rows):
    """A row that the first `count` indices name (-1: none), and how many precede a bad index."""
    lead = -1
    good = count
    for start in range(0, count, SURVEY):
        at = start + tl.arange(0, SURVEY)
        index = tl.load(indices + at, mask=at < count, other=-1)
        ok = (index >= 0) & (index < rows)
        lead = tl.maximum(lead, tl.max(tl.where(ok, index, -1), 0))
        good = tl.minimum(good, tl.min(tl.where(ok, count, at), 0))
    return lead, good


@triton.jit(do_not_specialize=COUNTS)
def sparse_kernel(
    q_ptr,
    data_ptr,
    scale_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    sink_ptr,
    q_scale_ptr,
    k_scale_ptr,
    factor,
    rows,
    topk,
    heads,
    head_blocks,
    q_stride_t,
    q_stride_h,
    data_stride_page,
    data_stride_t,
    scale_stride_page,
    scale_stride_t,
    indices_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    SIGN: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    BRANCH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One token and BM of its heads; see the top of the file."""
    program = tl.program_id(0)
    token = (program // head_blocks).to(tl.int64)
    head = program % head_blocks * BM + tl.arange(0, BM)
    head_ok = head < heads
    count = topk
    if lengths_ptr is not None:
        count = cut(tl.load(lengths_ptr + token), topk)

    column = tl.arange(0, LATENT)
    q_row = q_ptr + token * q_stride_t + (head * tl.cast(q_stride_h, tl.int64))[:, None]
    q = load_query_tile(q_row, head_ok, D_LATENT, D_ROPE, LATENT, ROPE, TYPE, SIGN, TWO_TERMS)
    row_factor = None
    if q_scale_ptr is not None:
        row_factor = tl.load(q_scale_ptr + token) + tl.zeros([BM], tl.float32)

    indices = indices_ptr + token * indices_stride
    lead, good = survey(indices, count, rows)
    count = tl.where(lead < 0, 0, count)
    middle = good // BN * BN
    place = tl.arange(0, BN)
    state = SoftmaxState(
        acc=tl.zeros([BM, LATENT], tl.float32),
        row_max=tl.full([BM], MINUS_INF, tl.float32),
        row_sum=tl.zeros([BM, PARTS], tl.float32),
    )
    for masked in tl.static_range(2):
        if masked == 0:
            begin = 0
            end = middle
        else:
            begin = middle
            end = count
        for start in tl.range(begin, end, BN, num_stages=STAGES):
            at = start + place
            if masked == 0:
                index = tl.load(indices + at)
                ok = at < count
            else:
                index = tl.load(indices + at, mask=at < count, other=-1)
                ok = (index >= 0) & (index < rows)
                index = tl.where(ok, index, lead)
            index = index.to(tl.int64)
            if PAGE > 0:
                data_row = index // PAGE * data_stride_page + index % PAGE * data_stride_t
                scale_row = index // PAGE * scale_stride_page + index % PAGE * scale_stride_t
            else:
                data_row = index * data_stride_t
                scale_row = index * scale_stride_t
            key_factor = None
            if k_scale_ptr is not None:
                key_factor = tl.load(k_scale_ptr + index)
            rows_here = RowBlock(data_ptr, scale_ptr, data_row, scale_row, ok)
            factors = Factors(factor=factor, key=key_factor, row=row_factor)
            state = row_step(
                state,
                q,
                rows_here,
                ok[None, :],
                factors,
                start < end,
                rows > 0,
                D_LATENT,
                D_ROPE,
                LATENT,
                ROPE,
                TYPE,
                ROW,
                TWO_TERMS,
                BN,
                BRANCH,
                False,
                masked == 1,
            )

    sink = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=head_ok, other=0.0)
    out, lse = normalize(state.acc, state.row_max, tl.sum(state.row_sum, 1), sink)
    out_row = out_ptr + token * out_stride_t + (head * tl.cast(out_stride_h, tl.int64))[:, None]
    tl.store(
        out_row + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=head_ok[:, None] & (column < D_V)[None, :],
    )
    if lse_ptr is not None:
        at = token * lse_stride_t + head * tl.cast(lse_stride_h, tl.int64)
        tl.store(lse_ptr + at, lse, mask=head_ok)
    if max_logits_ptr is not None:
        at = token * logits_stride_t + head * tl.cast(logits_stride_h, tl.int64)
        tl.store(max_logits_ptr + at, state.row_max * LN_2, mask=head_ok)
