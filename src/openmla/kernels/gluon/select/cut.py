"""The k-th largest of keys in registers, found by counting.

A key is a score as an int32 of the same order. `kth` keeps an interval of keys that holds the
answer, and counts how many keys are at least some key inside it. Which one:

| step | key | because |
|---|---|---|
| usually | by interpolation between the scores at the ends | 8 to 10 steps for random scores |
| from the 8th on, every second | one above the least key there is | ties: they end it at once |
| from the 16th on, every fourth | half way between the ends | ends any case, in 4 x 32 steps |

An end that two steps in a row left where it was counts half as much in the next interpolation (the
Illinois rule): else the other end would crawl, 48 steps instead of 9 for the top 2 % of a normal
distribution.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.select.tile import greatest, least, places, total

NOTHING = gl.constexpr(-(2**31))  # the key of a place that holds no score
NAN_KEY = gl.constexpr(1 - 2**31)
MINUS_INF_KEY = gl.constexpr(-2139095041)
HIGHEST = gl.constexpr(2**31 - 1)
TIES = gl.constexpr(8)  # steps before ties are looked for
HALVES = gl.constexpr(16)  # steps before the interval is halved


@gluon.jit
def key_of(x):
    """Scores as integers of the same order: -0.0 as +0.0, NaN below everything."""
    x = x + 0.0
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@gluon.jit
def score_of(key):
    """The score of a key: the inverse of `key_of`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def kth(keys, low, above, rank, slack):
    """A key with rank … rank + slack keys at least it, or the rank-th largest if ties forbid that.

    low: a key that `above` >= rank keys are at least. Returns the key and how many are at least it.
    """
    lo = rank * 0 + low
    hi = greatest(keys)
    at_lo = rank * 0 + above  # keys >= lo
    over_hi = rank * 0  # keys > hi
    target = rank.to(gl.float32) + 0.5 * slack + 0.5
    weight_lo = target * 0.0 + 1.0
    weight_hi = weight_lo
    moved = rank * 0  # by the step before: 1 lo, -1 hi
    step = rank * 0
    while (lo < hi) & (at_lo > rank + slack):
        if (step >= TIES) & ((step & 1) == 0):
            lo = least(gl.where(keys >= lo, keys, HIGHEST))
            key = lo + 1
        else:
            from_lo = (at_lo.to(gl.float32) - target) * weight_lo
            from_hi = (target - over_hi.to(gl.float32)) * weight_hi
            f = score_of(lo)
            guess = f + (score_of(hi) - f) * (from_lo / (from_lo + from_hi))
            near = gl.minimum(gl.maximum(key_of(guess), lo + 1), hi)
            half = (lo | hi) - ((lo ^ hi) >> 1)
            stuck = (step >= HALVES) & ((step & 3) == 3)
            key = gl.where((guess == guess) & (stuck == 0), near, half)
        count = total((keys >= key).to(gl.int32))
        enough = count >= rank
        weight_lo = gl.where(enough | (moved >= 0), 1.0, 0.5 * weight_lo)
        weight_hi = gl.where(enough & (moved > 0), 0.5 * weight_hi, 1.0)
        moved = gl.where(enough, 1, -1)
        lo = gl.where(enough, key, lo)
        at_lo = gl.where(enough, count, at_lo)
        hi = gl.where(enough, hi, key - 1)
        over_hi = gl.where(enough, over_hi, count)
        step += 1
    return lo, at_lo


@gluon.jit
def choose(keys, cut, above, k):
    """Which keys are the k best, and their places; among keys equal to the cut the first win.

    above: an upper bound of how many keys are at least the cut.
    """
    if above > k:
        rank, _ = places(keys == cut)
        ties = k - total((keys > cut).to(gl.int32))
        keys = gl.where((keys == cut) & (rank >= ties), NOTHING, keys)
    chosen = keys >= cut
    place, _ = places(chosen)
    return chosen, place
