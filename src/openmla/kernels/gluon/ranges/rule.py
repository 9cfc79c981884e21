"""How the keys of a request are cut into ranges: openmla.planning.latent_split, on the device.

The host never sees lengths. A kernel finds the ranges of a request from its own rows (queries x
heads) and keys. The rows of a range that is not all of its request's keys go to a workspace,
unnormalized, for merge.py.

The rows of range p begin p x (rows of the request) after the request's first, and each request has
`part_rows` rows of the workspace, the most that one can need. In an invariant call ranges are
fixed: they have 2^range_bits keys, whatever the rows. Range p of row r of the launch (heads of
tokens, counted over all requests) is then row p x `part_rows` + r of the workspace. A row that sees
nothing of a range has a reference of -inf and zeros there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.requests import cut, span_of
from openmla.planning import latent_split as rule

# Logarithms of LatentSplit's numbers: all are powers of two.
KEYS_PER_ROW = gl.constexpr(rule.KEYS_PER_ROW.bit_length() - 1)
LONG_RANGES = gl.constexpr(rule.LONG_RANGES.bit_length() - 1)
MIN_RANGE = gl.constexpr(rule.MIN_RANGE.bit_length() - 1)
PART_ROWS = gl.constexpr(rule.MOST_PART_ROWS.bit_length() - 1)
SHORT = gl.constexpr(rule.SHORT)
NEVER = gl.constexpr(2**20)  # rows of a request that is not split
ALL_KEYS = gl.constexpr(31)  # logarithm of more keys than a request can have


@gluon.jit
def request_of(number, requests):
    """(first token, tokens, keys) of one or several requests of `Requests`, by their numbers."""
    here = gl.minimum(number, requests.batch)
    start = gl.load(requests.cu_seqlens_q + here)
    stop = gl.load(requests.cu_seqlens_q + gl.minimum(here + 1, requests.batch))
    stop = gl.where(here < requests.batch, stop, requests.rest_q)
    start, tokens = span_of(start, stop, requests.total_q)
    keys = gl.load(requests.lengths + here, mask=number < requests.batch, other=0)
    tokens = gl.where(number <= requests.batch, tokens, 0)
    return start, tokens, cut(keys, requests.most_keys)


@gluon.jit
def log2(x):
    """The logarithm of the smallest power of two that is not below x, 1 … 2^31 - 1."""
    below = x - 1
    large = below >= 2**23  # and no longer exact in fp32
    exponent = gl.where(large, below >> 8, below).to(gl.float32).to(gl.int32, bitcast=True) >> 23
    return gl.where(below > 0, exponent - 126 + gl.where(large, 8, 0), 0)


@gluon.jit
def range_bits(rows, keys):
    """Logarithm of the keys of a range, from the request's own rows and keys alone: see
    LatentSplit. ALL_KEYS where these are one range. Nothing is divided: every program looks at all
    requests, and each does so 4 requests to a thread."""
    rows = gl.maximum(gl.minimum(rows, NEVER), 1)
    keys = gl.maximum(keys, 1)
    rows_bits = log2(rows)
    long = rows_bits + KEYS_PER_ROW
    bits = gl.where((keys >> LONG_RANGES) >> long > 0, long, long - 1)
    bits = gl.maximum(gl.maximum(bits, MIN_RANGE), log2(keys) + rows_bits - PART_ROWS)
    whole = (keys <= gl.maximum(1 << long, SHORT)) | (bits > ALL_KEYS)
    return gl.where(whole, ALL_KEYS, bits)


@gluon.jit
def ranges_of(rows, keys, fixed_bits, SPLIT: gl.constexpr):
    """(ranges of a request, logarithm of the keys of each but the last). fixed_bits: see
    Source.range_bits."""
    bits = rows * 0 + ALL_KEYS
    parts = rows * 0 + 1
    if SPLIT:
        if fixed_bits is None:
            bits = range_bits(rows, keys)
        else:
            bits = rows * 0 + fixed_bits
        parts = (gl.maximum(keys - 1, 0) >> bits) + 1
    return parts, bits
