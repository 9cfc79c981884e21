"""The k-th largest of keys in registers, by counts.

A key is a score as an int32 of the same order. `kth` keeps an interval of keys that holds the
answer, and counts how many keys are at least some key inside it. Which one:

| step | key | because |
|---|---|---|
| first | 0, and then 1 | a plateau of zeros is what relu leaves |
| 3 of 4 | by interpolation between the scores at the ends | about 9 steps for random scores |
| each fourth | half way between the ends | ends any case, in 4 x 32 steps |
| from the 8th on, every second | one above the least key there is | ties anywhere: they end it |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.indexer.tile import greatest, least, places, total

NOTHING = gl.constexpr(-(2**31))  # the key of a place that holds no score
NAN_KEY = gl.constexpr(1 - 2**31)
MINUS_INF_KEY = gl.constexpr(-2139095041)
HIGHEST = gl.constexpr(2**31 - 1)
PATIENCE = gl.constexpr(8)  # steps before ties are looked for


@gluon.jit
def key_of(x):
    """Scores as integers of the same order: -0.0 as +0.0, NaN below everything."""
    x = x + 0.0
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@gluon.jit
def score_of(key):
    """The way back."""
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
    step = rank * 0
    while (lo < hi) & (at_lo > rank + slack):
        if (step >= PATIENCE) & ((step & 1) == 0):
            lo = least(gl.where(keys >= lo, keys, HIGHEST))
            key = lo + 1
        else:
            f = score_of(lo)
            part = (at_lo - rank).to(gl.float32) / (at_lo - over_hi).to(gl.float32)
            guess = f + (score_of(hi) - f) * part
            near = gl.minimum(gl.maximum(key_of(guess), lo + 1), hi)
            half = (lo | hi) - ((lo ^ hi) >> 1)
            key = gl.where((guess == guess) & ((step & 3) != 3), near, half)
            key = gl.where((step == 0) & (lo < 0) & (hi >= 0), 0, key)
            key = gl.where((step == 1) & (lo == 0), 1, key)
        count = total((keys >= key).to(gl.int32))
        enough = count >= rank
        lo = gl.where(enough, key, lo)
        at_lo = gl.where(enough, count, at_lo)
        hi = gl.where(enough, hi, key - 1)
        over_hi = gl.where(enough, over_hi, count)
        step += 1
    return lo, at_lo


@gluon.jit
def choose(keys, cut, above, k):
    """Which keys are the k best (of those equal to the cut the first), and their places.

    above: at most so many keys are at least the cut.
    """
    if above > k:
        rank, _ = places(keys == cut)
        ties = k - total((keys > cut).to(gl.int32))
        keys = gl.where((keys == cut) & (rank >= ties), NOTHING, keys)
    chosen = keys >= cut
    place, _ = places(chosen)
    return chosen, place
