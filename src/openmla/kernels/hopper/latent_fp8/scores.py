"""Scores of a step of 128 keys, and weights as the values' products take them.

| rows | scores | weights |
|---|---|---|
| e4m3 | FP8 products | P |
| e4m3, with `k_scale` | FP8 products, times the key's scale | P |
| rows of a cache with a scale per row | FP8 products, times the row's scale | P, times it |

Weights are fp16, in which e4m3 values are exact. It reaches from 2^-24 to 65504, so the reference
of a row is OFFSET below its maximum, and weights lie below 2^(OFFSET + THRESHOLD). Where weights
contain scales, so does the maximum: what counts is how much a key adds to the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.accumulator import quad_sums
from openmla.kernels.hopper.latent.epilogue import rows_of
from openmla.kernels.hopper.latent.records import LISTED
from openmla.kernels.hopper.latent.softmax import THRESHOLD, finite
from openmla.kernels.hopper.latent.source import STEP
from openmla.kernels.hopper.latent_fp8.plan import WEIGHT_OFFSET
from openmla.kernels.hopper.latent_fp8.rows import PARTS, WARPS

OFFSET = gl.constexpr(WEIGHT_OFFSET)


@gluon.jit
def begin_scores(q, k, slot, HOW: gl.constexpr, SL: gl.constexpr):
    """Start the scores of a step. q, k: `RowTiles`."""
    z = opaque_zero()
    S = gl.zeros([64, STEP], gl.float32, SL)
    columns = k.latent.index(z + slot).permute((1, 0))
    S = warpgroup_mma(q.latent.index(z), columns, S, use_acc=False, is_async=True)
    if HOW.has_rope:
        columns = k.rope.index(z + slot).permute((1, 0))
        S = warpgroup_mma(q.rope.index(z), columns, S, is_async=True)
    return S


@gluon.jit
def scales_of(scales, slot, SL: gl.constexpr):
    """The scales of the keys of a step."""
    return scales.index(slot).load(gl.SliceLayout(0, SL))


@gluon.jit
def finish_scores(S, scales, slot, row_scale, HOW: gl.constexpr, SL: gl.constexpr):
    """Wait for the scores of a step that `begin_scores` started, and scale them.

    row_scale: what `row_scales` returned. Without scales of queries the softmax factor is left out.
    """
    S = warpgroup_mma_wait(0, deps=(S,))
    if HOW.has_row_scales:
        S = S * scales_of(scales, slot, SL)[None, :]
    if HOW.has_q_scale:
        S = S * row_scale[:, None]
    return S


@gluon.jit
def row_scales(q_scale_ptr, place, heads, factor, HOW: gl.constexpr, SL: gl.constexpr):
    """q_scale times the softmax factor for 64 rows, 0 where there is no row; or without q_scale the
    factor alone. place: see place_of of latent/epilogue.py."""
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    if HOW.has_q_scale:
        token, _head, ok = rows_of(place, heads, HOW.mask, RL)
        scale = gl.load(q_scale_ptr + token + gl.zeros([64], gl.int32, RL), mask=ok, other=0.0)
        return scale * factor
    else:
        return factor


@gluon.jit
def any_missing(validity, slot, MASK: gl.constexpr):
    """Whether a step of a list has a key that is not there (`Validity`). It is asked while the
    step's scores are computed."""
    if MASK == LISTED:
        # Every thread has all flags.
        ALL: gl.constexpr = gl.BlockedLayout([PARTS * WARPS], [32], [WARPS], [0])
        return gl.max(validity.flags.index(slot).load(ALL), 0)
    else:
        return 0


@gluon.jit
def max_of_rows(S):
    """The largest score of each row of [64, 128], halves against halves as in latent/softmax.py."""
    parts = gl.reshape(S, [64, 2, 2, 2, 2, 4, 2])
    parts = gl.max(gl.max(gl.max(gl.max(gl.max(parts, 6), 4), 3), 2), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, S.type.layout))


@gluon.jit
def exponents(x):
    """126 + log2 of the power of two above |x|; log2 itself would be a polynomial of 30 steps."""
    return (x.to(gl.int32, bitcast=True) >> 23 & 255).to(gl.float32)


@gluon.jit
def next_reference(S, row_max, factor, scales, slot, HOW: gl.constexpr, SL: gl.constexpr):
    """The reference after a step: it moves only to a maximum that exceeds it by much."""
    if HOW.scales_values:
        reached = max_of_rows(S * factor + exponents(scales_of(scales, slot, SL))[None, :]) - 126.0
    else:
        reached = max_of_rows(S) * factor
    reached -= OFFSET
    return gl.where(reached > row_max + THRESHOLD, reached, row_max)


@gluon.jit
def higher(highest, S, factor, LOGITS: gl.constexpr):
    """The largest score so far, if max_logits are wanted."""
    if LOGITS:
        highest = gl.maximum(highest, max_of_rows(S) * factor)
    return highest


@gluon.jit
def weigh(S, row_max, row_sum, factor, scales, slot, HOW: gl.constexpr, SL: gl.constexpr):
    """(weights of a step, partial sums of P with them), relative to `row_max`."""
    P = gl.exp2(S * factor - finite(row_max)[:, None])
    row_sum += quad_sums(P, STEP)
    if HOW.scales_values:
        P = P * scales_of(scales, slot, SL)[None, :]
    return P, row_sum
