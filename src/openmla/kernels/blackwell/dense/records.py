"""Records of the dense kernel.

Fields of type Any hold values of the running kernel; all others are known when it is compiled. A
field that a problem does not need is None.
"""

from typing import Any, NamedTuple

from openmla.kernels.blackwell.records import HeadRows


class Sequences(NamedTuple):
    """The batch of ragged sequences."""

    cu_seqlens_q: Any
    """Pointer to batch + 1 offsets into the rows of q."""
    cu_seqlens_k: Any
    k_start: Any
    """Pointer to the row at which the keys of a request begin, where requests may share keys; the
    offsets then only count them."""
    batch: Any
    total_q: Any
    total_k: Any
    heads: Any
    window: Any
    """Keys that a query sees at most, those up to its own; None: all of them."""


class WorkItem(NamedTuple):
    """One head and up to BM queries of one request, with the keys that they visit; see tiles.py."""

    head: Any
    token: Any
    """First row of q and out."""
    rows: Any
    """Rows from `token` to the end of the request; may exceed BM."""
    first_key: Any
    """First row of k and v of the request."""
    keys: Any
    """Keys of the request."""
    seen: Any
    """Keys that the first row sees under a causal mask; may be negative."""
    blocks: Any
    """Blocks of BN keys that are visited; 0: there is no such work item."""
    unmasked: Any
    """How many of these blocks, the last ones visited, need no mask."""
    request: Any
    skipped: Any
    """How many of these blocks, the first ones visited, no row of the first query tile sees."""


class Windows(NamedTuple):
    """The windows of the rows of a work item."""

    keys: Any
    """Keys that a query sees at most, as in `Sequences`."""
    blocks: Any
    """How many of the unmasked blocks, the last ones visited, begin before the window of some row,
    and need a mask for that; None without windows."""


class Columns(NamedTuple):
    """Columns of the tiles. Q and K come in parts, because the width of a tile is a power of two:
    192 + 64 columns are main 128, tail 64, rope 64."""

    main: int
    tail: int
    """0 where main holds all columns without rope."""
    rope: int
    """0 without rope."""
    v: int


class TileLayouts(NamedTuple):
    """Shared memory layouts of the tiles that `Columns` describes."""

    main: Any
    tail: Any
    rope: Any
    v: Any
    fused: Any
    """A slot of a fused ring, which holds K's main columns or V."""


class Parts(NamedTuple):
    """The parts of Q or of K: their TMA descriptors, or their tiles in shared memory."""

    main: Any
    tail: Any
    rope: Any


class Sources(NamedTuple):
    """Where the load warp reads: TMA descriptors of Q, K and V."""

    q: Parts
    k: Parts
    v: Any
    key_scales: Any
    """Pointer to the scales of keys."""


class Tiles(NamedTuple):
    """Tiles in shared memory; their first dimension counts query tiles or slots of a ring."""

    q: Parts
    k: Parts
    v: Any
    key_scales: Any


class Ring(NamedTuple):
    """How K and V pass through shared memory; see ring.py."""

    is_fused: bool
    """K and V take turns in one ring of `stages` slots; otherwise each has a ring of its own."""
    stages: int
    rope_buffers: int
    """Buffers of K's rope, and of the scales of keys."""


class Rope(NamedTuple):
    """Where the rope columns of K are."""

    source: str
    """"shared" by all heads, "per_head", in the pages of a "cache", or "none"."""
    page_size: int


class RawRope(NamedTuple):
    """Which rope columns arrive in FP8, to be dequantized to 16 bits; see dequantize.py."""

    q: bool
    k: bool
    layout: Any
    """Shared memory layout of FP8 rows."""


class RopeScales(NamedTuple):
    """The scales of a cache row that its rope columns need."""

    number: int
    """0: rows have no scales."""
    second_column: int
    """First rope column that has the second scale."""
    columns: int
    """Columns per scale from there on."""


class CacheScales(NamedTuple):
    """Where the rope's scales are in a paged cache."""

    base: Any
    page_stride: Any
    row_stride: Any
    last_page: Any


class BlockTable(NamedTuple):
    """The block table of all requests."""

    base: Any
    entries: Any
    """Entries of a request, and the stride from request to request."""


class TableLine(NamedTuple):
    """The entries of one request in the block table."""

    base: Any
    entries: Any


class TileBytes(NamedTuple):
    """TMA bytes that one CTA brings to the barrier of a tile."""

    q: int
    k: int
    v: int


class LoadHow(NamedTuple):
    """What the load warp is compiled for."""

    columns: Columns
    ring: Ring
    rope: Rope
    raw: RawRope
    tile_bytes: TileBytes
    group: int
    """Query heads that share a head of K and V."""


class MultiplyHow(NamedTuple):
    """What the MMA warp is compiled for."""

    columns: Columns
    ring: Ring
    raw: RawRope


class SoftmaxHow(NamedTuple):
    """What the softmax groups are compiled for."""

    is_causal: bool
    sign: int
    """Sign of the softmax scale."""
    threshold: float
    """How far the maximum of a row may grow before its accumulator is rescaled."""
    dtype: Any
    """Type of the weights."""
    scale_buffers: int
    """Buffers of the scales of keys."""


class TmemMap(NamedTuple):
    """Columns of tensor memory; see columns.py."""

    scores: tuple[int, int]
    """First columns of the two score tiles."""
    outputs: tuple[int, int]
    """First columns of the two output accumulators."""
    keys: int
    """Columns of a score tile: BN."""
    d_v: int
    """Columns of an output accumulator."""
    ctas: int
    """CTAs among which the rows of a tile are divided, 128 to each."""


class Registers(NamedTuple):
    """Registers per thread of the partitions."""

    softmax: int
    """The second softmax group; the first, the default partition, gets what is left."""
    correction: int
    single: int
    """Every other partition."""


class RingBarriers(NamedTuple):
    """Barriers of the slots of a ring."""

    full: Any
    empty: Any


class Barriers(NamedTuple):
    """All mbarriers; the table in kernel.py says what completes each, and which partition waits."""

    ring: RingBarriers
    second: Any
    s_full: Any
    p_full: Any
    o_full: Any
    c_full: Any
    t_full: Any
    scales: RingBarriers | None
    q_raw: Any
    q_wide: Any
    k_raw: Any
    k_wide: Any


class TokenScales(NamedTuple):
    """Per-token scales of an FP8 problem."""

    keys: Any
    """Buffers in shared memory that hold the scales of a block of keys."""
    queries: Any
    """Pointer to one scale per row of q."""


class TileScales(NamedTuple):
    """Per-token scales of a query tile and its keys, as a softmax group has them."""

    keys: Any
    """Buffers in shared memory that hold the scales of a block of keys."""
    rows: Any
    """A scale per row of the tile, in registers."""


class KeyMask(NamedTuple):
    """Which keys queries see, besides causal: a bit each, in words of 32."""

    base: Any
    """Pointer to the words of row 0 of q; None where all keys are seen."""
    row_stride: Any
    words: Any
    """Words of a row; keys after them are not seen."""


class Visibility(NamedTuple):
    """Which keys the rows of a work item see, besides causal."""

    key_mask: KeyMask
    windows: Windows


class KeyBits(NamedTuple):
    """The part of a `KeyMask` that the rows of one query tile have."""

    base: Any
    """Pointer to the words of the tile's first row."""
    row_stride: Any
    words: Any
    """Words of a row; keys after them are not seen."""
    rows: Any
    """Rows of the tile that exist; may exceed it."""


class Limits(NamedTuple):
    """Which columns of a score tile count, counted from its first key."""

    seen: Any
    """Columns that row 0 sees under a causal mask."""
    keys: Any
    """Columns that are keys of the request."""
    since: Any
    """First column that row 0 sees, one more with every row; None without a window."""


class SoftmaxState(NamedTuple):
    """What a softmax group knows of its rows; see softmax.py."""

    row_max: Any
    row_sum: Any


class Results(NamedTuple):
    """What the kernel writes."""

    out: HeadRows
    """Strides in units of 16 bytes."""
    lse: HeadRows
