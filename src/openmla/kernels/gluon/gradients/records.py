"""Records of dense backward kernels: what their partitions hand around.

Fields annotated `Any` hold run-time values of a kernel: registers, pointers, TMA descriptors,
shared memory. The others are constants, and a record of constants alone is a constexpr. A field may
be None, but not in a record that a function returns: Triton 3.6 makes tensors of constants.

Either pass has a side of its own, whose rows it keeps and writes gradients of, and walks the other:
the query pass keeps queries and walks keys, the key pass keeps keys and walks queries.
"""

from typing import Any, NamedTuple

# Constants.


class Columns(NamedTuple):
    """DIMS: columns of the tiles; rope is 0 where there is none.

    Widths of tiles are powers of two. Of 192 columns of Q and K without rope, the last 64 are the
    first ones of the tile of the 64 with rope: nope 128, rope 128, tail 64.
    """

    nope: int
    rope: int
    v: int
    tail: int = 0
    """Columns of the second tile that are without rope."""


class TileLayouts(NamedTuple):
    """LAYOUTS: shared-memory layouts of [rows, columns] tiles; None: no such tile."""

    nope: Any
    rope: Any
    v: Any


class How(NamedTuple):
    """HOW: what is done to scores, and in which order."""

    is_causal: bool
    sign: int
    """Sign of the softmax scale: -1, 0 or 1."""
    rope: str
    """Problem.rope: "shared", "per_head" or "none"."""
    has_key_mask: bool = False
    gradients: str = "all"
    """What the key pass sums: "all", or "k" or "v" alone, where one thread cannot hold both."""


class Tiling(NamedTuple):
    """TILE: how sequences are cut into work items."""

    own_rows: int
    """Rows of a tile of the side that a pass owns."""
    step_rows: int
    """Rows of the other side that a step walks."""
    by_keys: bool
    """Whether the pass owns keys."""
    is_causal: bool
    head_group: int
    """Heads whose work items follow one another, because they share L2."""


# Arguments of a kernel.


class Sequences(NamedTuple):
    """The sequences of a launch."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    batch: Any
    total_q: Any
    total_k: Any
    heads: Any


class Parts(NamedTuple):
    """Q, K or their gradients by columns: tiles, descriptors or accumulators. Where there is no
    rope, a descriptor is None, and a tile an alias of `nope`."""

    nope: Any
    rope: Any


class Rows(NamedTuple):
    """A tensor [tokens, heads, ...] in global memory; `base` None: it does not exist."""

    base: Any
    stride_t: Any
    stride_h: Any


class QuerySources(NamedTuple):
    """What the producer of the query pass loads: TMA descriptors."""

    q: Parts
    d_out: Any
    k: Parts
    v: Any
    bits: Any = None
    """Bits by query, as `seen_bits` wrote them; None: every query sees every key."""
    k_tail: Any = None
    """The last columns of K without rope, if they are in the tile of those with."""


class QueryMemory(NamedTuple):
    """Shared memory of the query pass: a tile of Q and of d_out per consumer, rings of K and V."""

    q: Parts
    d_out: Any
    k: Parts
    v: Any
    bits: Any = None
    """A ring of words [64, BN / 32] per consumer: which keys of the block its rows see."""


class Saved(NamedTuple):
    """What statistics of query rows are made of."""

    out: Rows
    d_out: Rows
    lse: Rows
    d_lse: Rows
    sink: Any
    """One logit per head, or None."""


class Statistics(NamedTuple):
    """Where statistics of query rows go, for the key pass and for the sum of d_sink."""

    base: Any
    """fp32 [2, heads, rows]: totals, then deltas."""
    rows: Any
    """Rows of a head: those of every sequence begin at a multiple of a tile."""
    part_sink: Any
    """fp32 [rows / 64, heads], or None."""
    heads: Any


class KeySources(NamedTuple):
    """What the producer of the key pass loads: TMA descriptors."""

    k: Parts
    v: Any
    q: Parts
    d_out: Any
    statistics: Any
    heads: Any
    bits: Any = None
    """Bits by key, as `seen_bits` wrote them; None: every query sees every key."""
    k_tail: Any = None
    """The last columns of K without rope, if they are in the tile of those with."""


class KeyMemory(NamedTuple):
    """Shared memory of the key pass: a tile of K and of V per consumer, rings of all else."""

    k: Parts
    v: Any
    q: Parts
    d_out: Any
    total: Any
    delta: Any
    bits: Any = None
    """A ring of words [64, BQ / 32] per consumer: which queries of the block see its keys."""


class KeyGradients(NamedTuple):
    """What the key pass writes."""

    k: Rows
    v: Rows
    rope: Rows
    """Where heads share a rope row, the fp32 part of a head."""


# Values in registers.


class SequenceRows(NamedTuple):
    """Rows of one sequence in the tensors of queries and keys."""

    q_start: Any
    q_len: Any
    k_start: Any
    k_len: Any


class WorkItem(NamedTuple):
    """A tile of one head and what it walks, as the scheduler announces it."""

    head: Any
    token: Any
    """First row of the tile."""
    rows: Any
    """Rows from there to the sequence's end."""
    start: Any
    """First row of the sequence on the other side."""
    length: Any
    """Rows of the sequence there."""
    first: Any
    """First block of it that is walked."""
    blocks: Any
    """Blocks that are walked, at least one; 0: no more work."""
    masked: Any
    """Blocks that need a mask: those are walked first."""
    limit: Any
    """By queries: keys that the tile's first row sees. By keys: the first query that sees the
    tile's first row. Both may be negative, and both only matter if causal."""
    place: Any
    """By queries: first row of the tile in the statistics. By keys: that of the sequence."""


class RowStatistics(NamedTuple):
    """What a query row's weights and score gradients are made of, [rows] in fp32."""

    total: Any
    """What exponents are relative to, log2: lse and the sink; +inf where no key is seen."""
    delta: Any
    """sum(out * d_out), less the gradient of lse."""
