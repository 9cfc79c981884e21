# mypy: disable-error-code="no-untyped-def, untyped-decorator"

"""Online softmax of the latent kernel: one reference maximum, two warp-groups that move it in turn.

Scores are in log2 units (times factor = scale * log2 e). In every step of two key blocks

| | sees | moves the reference | tells the other |
|---|---|---|---|
| left warp-group | block 0 | from `top` to `top0` | P0, top0 |
| right warp-group | block 1 | from `top0` to `top1` | P1, top1 |

so both multiply P0 · V0 with O relative to top0, and P1 · V1 with O relative to top1; no weight is
ever rescaled. The reference moves only when a score exceeds it by more than THRESHOLD (see
openmla.kernels.hopper.softmax): weights then reach 2^6.

Each warp-group keeps the sums of its own block's weights; they meet at the end of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.softmax import quad_sums
from openmla.kernels.scores import MINUS_INF

THRESHOLD = gl.constexpr(6.0)
KEYS = gl.constexpr(64)  # of a block


@gluon.jit
def finite(top):
    """What to subtract for a reference: that of a row that saw nothing is -inf, and becomes 0."""
    return gl.where(top == MINUS_INF, 0.0, top)


@gluon.jit
def follow(top, new_top):
    """The factor for everything relative to `top` when the reference becomes `new_top`.

    1 for a row that has seen nothing: its sums are zeros, and O need not be multiplied for it.
    """
    return gl.where(top == MINUS_INF, 1.0, gl.exp2(top - finite(new_top)))


@gluon.jit
def shrunk(total, factor):
    """Partial sums [64, 4] times a factor per row."""
    return total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def first_sums(S):
    """Partial sums of no keys, in the layout of `quad_sums`."""
    return quad_sums(gl.zeros_like(S), KEYS)


@gluon.jit
def row_max(S):
    """The largest score of each row of [64, 64].

    Halves against halves: a plain reduction compares a thread's 16 scores one after the other, and
    the other warp-group waits for the result.
    """
    parts = gl.reshape(S, [64, 2, 2, 2, 4, 2])
    parts = gl.max(gl.max(gl.max(gl.max(parts, 5), 3), 2), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, S.type.layout))


@gluon.jit
def moved(S, top, factor):
    """The reference after a block: it moves only to a score that exceeds it by much."""
    highest = row_max(S) * factor
    return gl.where(highest > top + THRESHOLD, highest, top)


@gluon.jit
def weigh(S, top, total, factor):
    """(weights of a block, partial sums with them), relative to `top`."""
    P = gl.exp2(S * factor - finite(top)[:, None])
    return P, total + quad_sums(P, KEYS)


@gluon.jit
def row_sums(total, top):
    """One sum per row of partial sums, in the layout of `top`."""
    return gl.convert_layout(gl.sum(total, 1), top.type.layout)
