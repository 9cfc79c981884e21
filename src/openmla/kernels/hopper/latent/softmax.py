"""Online softmax of the latent kernel: one reference maximum, two warp-groups that move it in turn.

Scores are in log2 units (times factor = scale * log2 e). In every step of two key blocks

| | sees | moves the reference | tells the other |
|---|---|---|---|
| left warp-group | block 0 | from `row_max` to `row_max0` | P0, row_max0 |
| right warp-group | block 1 | from `row_max0` to `row_max1` | P1, row_max1 |

so both multiply P0 · V0 with O relative to row_max0, and P1 · V1 with O relative to row_max1; no
weight is ever rescaled. The reference moves only when a score exceeds it by more than THRESHOLD
(see openmla.kernels.hopper.dense.softmax): weights then reach 2^6.

Each warp-group keeps the sums of its own block's weights; they meet at the end of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF
from openmla.kernels.hopper.accumulator import quad_sums
from openmla.kernels.hopper.latent.plan import HopperLatentConfig

THRESHOLD = gl.constexpr(HopperLatentConfig.rescale_threshold)
KEYS = gl.constexpr(64)  # of a block


@gluon.jit
def finite(row_max):
    """The reference as it is subtracted from scores: 0 instead of -inf, for a row that has seen
    nothing."""
    return gl.where(row_max == MINUS_INF, 0.0, row_max)


@gluon.jit
def follow(row_max, new_max):
    """The factor for everything relative to `row_max` when the reference becomes `new_max`.

    1 for a row that has seen nothing: its sums are zeros, and O need not be multiplied for it.
    """
    return gl.where(row_max == MINUS_INF, 1.0, gl.exp2(row_max - finite(new_max)))


@gluon.jit
def rescaled(row_sum, factor):
    """Partial sums [64, 4] times a factor per row."""
    return row_sum * gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None]


@gluon.jit
def first_sums(S):
    """Partial sums of no keys, in the layout of `quad_sums`."""
    return quad_sums(gl.zeros_like(S), KEYS)


@gluon.jit
def max_of_rows(S):
    """The largest score of each row of [64, 64].

    Halves against halves: a plain reduction compares a thread's 16 scores one after the other, and
    the other warp-group waits for the result.
    """
    parts = gl.reshape(S, [64, 2, 2, 2, 4, 2])
    parts = gl.max(gl.max(gl.max(gl.max(parts, 5), 3), 2), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, S.type.layout))


@gluon.jit
def moved(S, row_max, factor):
    """The reference after a block: it moves only to a score that exceeds it by much."""
    highest = max_of_rows(S) * factor
    return gl.where(highest > row_max + THRESHOLD, highest, row_max)


@gluon.jit
def weigh(S, row_max, row_sum, factor):
    """(weights of a block, partial sums with them), relative to `row_max`."""
    P = gl.exp2(S * factor - finite(row_max)[:, None])
    return P, row_sum + quad_sums(P, KEYS)


@gluon.jit
def row_sums(row_sum, row_max):
    """The sum of a row's partial sums, in the layout of `row_max`."""
    return gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
