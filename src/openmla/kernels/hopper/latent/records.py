"""Records of the latent Hopper kernels: what partitions and helpers pass to one another.

Fields are run-time values (pointers, numbers, registers, shared memory), or None where there is no
value. Records of constants say so: Triton turns every other constant but None into a run-time value
when a record is assigned to a variable. (Triton 3.6 cannot return None in a record, and forgets the
fields of a record that is added to a tuple.)

Rows of a cache, their format and their columns have the records of dequantize/records.py.

A partition gets the records that it needs through shared memory, field by field in their order.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

# What the keys of a launch are (MASK).
LISTED = gl.constexpr(0)  # rows that lists name, a list for each token
FULL = gl.constexpr(1)  # keys of sequences, all of which every token of the sequence sees
CAUSAL = gl.constexpr(2)  # keys of sequences, whose last tokens are the queries
WINDOW = gl.constexpr(3)  # CAUSAL, and each token sees only the last `window` keys up to its own
# Arguments of a second source of rows: those of the first, with `second_` in front.
SECOND_COUNTS = ["second_topk", "second_rows", "second_page_rows", "second_requests"]
SECOND_STRIDES = [
    "second_indices_stride",
    "second_stride_page",
    "second_stride_row",
    "second_scale_page",
    "second_scale_row",
]
SECOND_VECTORS = [
    "second_indices_ptr",
    "second_lengths_ptr",
    "second_request_ptr",
    "second_begin_ptr",
    "second_scale_ptr",
]


class How(NamedTuple):
    """Constants: what the latent kernel is compiled for."""

    sign: Any
    """Sign of the softmax scale: 1, -1, or 0 where all scores are 0."""
    mask: Any
    """LISTED, FULL, CAUSAL or WINDOW."""
    wants_logits: Any
    """Whether the largest score of each row is written."""
    p_overlays_rope: Any
    """Whether P aliases the rope columns of K."""
    is_copied: Any
    """Whether K arrives by cp.async or TMA; else the producer dequantizes it and stores it."""
    is_split: Any
    """Whether requests may be split into ranges of keys."""
    turned: Any = 0
    """Columns of the results that are turned back; 0: none."""


class TileLayouts(NamedTuple):
    """Constants: layouts of tiles in shared memory (LAYOUTS)."""

    latent: Any
    """A tile of latent columns: half of them for bf16 and fp16, all of them for e4m3."""
    rope: Any
    p: Any
    """None where weights do not pass through shared memory."""


class Registers(NamedTuple):
    """Constants: registers per thread of the partitions besides the default one (REGISTERS)."""

    consumer: int
    producer: int


class RowDescriptors(NamedTuple):
    """TMA descriptors of Q or of pages."""

    latent: Any
    """Boxes of latent columns, as many as a tile has; None where rows are not loaded by TMA."""
    rope: Any
    """None where rows have no rope."""


class BoxStart(NamedTuple):
    """Where a box of 64 rows begins, in the first two dimensions of a TMA descriptor."""

    outer: Any
    """Token of Q, or page; 0 where tiles hold heads of several tokens."""
    row: Any


class Sequences(NamedTuple):
    """Sequences that a source reads; see `Requests`."""

    cu_seqlens_q: Any
    batch: Any
    total_q: Any
    heads: Any
    pages: Any
    """`Pages`, in which entries of the block table count."""
    mean_tiles: Any
    """Tiles of a request that has as many tokens as there are on average; any number from 1 on."""
    mask: Any
    """FULL, CAUSAL or WINDOW."""
    rest_q: Any


class Source(NamedTuple):
    """Where keys come from: a list of rows for each token, or the pages of sequences."""

    table: Any = None
    """The lists, or the block table."""
    lengths: Any = None
    """Keys of each token or sequence; None: all of a list."""
    most_keys: Any = None
    """Keys of a line of the table."""
    table_stride: Any = None
    pool_rows: Any = None
    """Rows of the pool: row numbers go from 0 to pool_rows - 1."""
    sequences: Any = None
    """`Sequences`; None for lists."""
    counter: Any = None
    """Atomic counter of work items; None: programs take turns."""
    part_rows: Any = None
    """Rows of the workspace that each request has, or that each range has where ranges are fixed;
    None where no request is split."""
    range_bits: Any = None
    """Logarithm of the keys of a range where ranges are fixed; None where they follow from a
    request's own rows and keys."""
    begin: Any = None
    """First positions, where a token sees consecutive positions of a request (a span) instead of a
    list: `table` is then the block table, and `lengths` are the positions after the last."""
    request: Any = None
    """The line of the block table that the span of a token is of."""
    requests: Any = None
    """Lines of the block table; other numbers name no request."""
    page_rows: Any = None
    """Rows of a page, in which entries of the block table count."""
    second_keys: Any = None
    """`most_keys` of `second`; None where there is none. (Triton 3.6 cannot ask whether a record is
    None if it has fields that are.)"""
    second: Any = None
    """A `Source` of further rows of each token, in the same softmax."""
    window: Any = None
    """Keys that a token of a sequence sees at most; None: all up to its own."""


class TileCounts(NamedTuple):
    """Tiles of a launch over lists."""

    tiles: Any
    head_blocks: Any
    """Tiles of 64 heads that a token has."""


class ListedTile(NamedTuple):
    """64 heads of a token that has its own list of keys."""

    token: Any
    first_head: Any


class SequenceTile(NamedTuple):
    """64 rows of a sequence, which are heads of its tokens, and a range of its keys.

    Keys are counted from the first one of the range.
    """

    first_token: Any
    """First token of the sequence."""
    first_row: Any
    """First row of the tile, counted from the first one of the sequence."""
    rows: Any
    """Rows of the sequence."""
    seen: Any
    """Keys that the rows of the sequence's first token see."""
    whole: Any
    """Keys that all rows of the tile see."""
    keys: Any
    """Keys of the range."""


class RangeTile(NamedTuple):
    """A `SequenceTile` with the place of its range, which matters where requests may be split."""

    first_token: Any
    first_row: Any
    rows: Any
    seen: Any
    whole: Any
    keys: Any
    slot: Any
    """First row of the tile in the workspace; -1 if the range is all keys of the sequence."""


class WindowTile(NamedTuple):
    """A `SequenceTile` whose keys begin with the window of its first row."""

    first_token: Any
    first_row: Any
    rows: Any
    seen: Any
    whole: Any
    keys: Any
    since: Any
    """First key that the rows of the sequence's first token see; may be negative."""


class Beginning(NamedTuple):
    """The work item that a program begins with, found by looking at one request alone."""

    request: Any
    turn: Any
    """Turns that every request had before this one."""
    number: Any
    """Number of the work item among those of the request."""


class Found(NamedTuple):
    """Where a work item of sequences was found."""

    number: Any
    """Its number among all work items."""
    chunk: Any
    """First request of the chunk of requests that it belongs to."""
    before: Any
    """Work items of all requests before the chunk."""
    sequence: Any
    """Its request; -1 if the number is past the last work item."""
    within: Any
    """Its number among the work items of the request that have the same rank."""
    full: Any
    """How many of those are full ranges of keys; they come before the last range."""


class Work(NamedTuple):
    """The work items of a chunk of requests, one number per request each."""

    full: Any
    """Work items of all ranges of keys but the last."""
    full_rank: Any
    """Their rank: the longer, the higher."""
    last: Any
    """Work items of the last range, or of the only one."""
    last_rank: Any


class WorkItem(NamedTuple):
    """What the producer knows of a work item, but for its steps."""

    tile: Any
    """A `ListedTile`, a `RangeTile` or a `WindowTile`."""
    box: Any
    """`BoxStart` of Q."""
    first_entry: Any
    """Where its list, or its line of the block table, begins."""
    skipped: Any
    """Places (entries of the list, or keys of the sequence) before the first of its range."""
    stop: Any
    """Place after the last one that counts."""


class TokenRange(NamedTuple):
    """The places of a source that a token sees."""

    line: Any
    """The list, or the line of the block table."""
    skipped: Any
    """Places before the first."""
    stop: Any
    """Place after the last."""


class TokenList(NamedTuple):
    """The rows of a source that a token sees."""

    first_entry: Any
    """Where its list, or its line of the block table, begins."""
    skipped: Any
    """Places before the first."""
    stop: Any
    """Place after the last."""


class Listing(NamedTuple):
    """What a producer needs of a `WorkItem` to look up the rows of its keys."""

    first_entry: Any
    stop: Any


class TwoListings(NamedTuple):
    """The `TokenRange` of a token in each of two sources: six registers, from which the rest is
    computed where it is needed. Places of the token count from 0."""

    line: Any
    skipped: Any
    stop: Any
    second_line: Any
    second_skipped: Any
    second_stop: Any


class BlockRows(NamedTuple):
    """The rows of a block of keys, quantized in the one format that a launch reads."""

    places: Any
    """`RowPlaces`"""
    scales: Any
    """What `load_scales` of v4_rows.py loaded; () where scales are loaded ahead with the chunks."""


class SourceRows(NamedTuple):
    """The rows of a block of keys, of one of two sources whose formats may differ."""

    places: Any
    """`RowPlaces`"""
    scales: Any
    """Scales as in `BlockRows`; zeros for bf16 rows."""
    way: Any
    """How they are read, 0 or 1: see `ways_of` of rows_v4.py."""


class HeadsOfToken(NamedTuple):
    """Where the rows of a `ListedTile` are written."""

    token: Any
    """-1 before the first tile."""
    first_head: Any


class RowRange(NamedTuple):
    """Where the rows of a `SequenceTile` or `RangeTile` are written."""

    begin: Any
    """First row, counted from the first head of the first token; -2 - the first row of the
    workspace, for a range of keys; -1 before the first tile."""
    end: Any
    """Row after the last one, of the outputs or of the workspace."""


class ColumnTiles(NamedTuple):
    """Tiles of Q or K in shared memory, by columns."""

    left: Any
    """The left half of the latent columns."""
    right: Any
    rope: Any
    """Aliases `left` where rows have no rope."""


class Validity(NamedTuple):
    """Which keys of a list are there."""

    bias: Any
    """0 or -inf for each key."""
    flags: Any
    """1 for each warp of the producer that misses a key of its own, else 0."""


class Stats(NamedTuple):
    """Values per row that the warp-groups exchange through shared memory."""

    row_maxes: Any
    """References after blocks 0 and 1."""
    sums: Any
    """Sums of weights of left and right, and the largest scores of left."""


class Smem(NamedTuple):
    """Shared memory of the latent kernel."""

    q: Any
    """`ColumnTiles`, one of each."""
    k: Any
    """`ColumnTiles`, two of each for every stage."""
    p: Any
    validity: Any
    stats: Any


class Barriers(NamedTuple):
    """mbarriers of the latent kernel; the head of kernel.py lists them."""

    q_ready: Any
    q_empty: Any
    k_ready: Any
    k_empty: Any
    valid_ready: Any
    item_ready: Any
    item_empty: Any


class Results(NamedTuple):
    """What a launch writes, and the sinks it needs for that."""

    out: Any
    lse: Any
    max_logits: Any
    sink: Any
    parts: Any
    """`Parts`; their pointers are None where no request is split."""
    angles: Any = None
    """`Angles`; not looked at where nothing is turned back."""


class State(NamedTuple):
    """Online softmax of a tile: the sums, and what they are relative to (see softmax.py)."""

    O: Any  # noqa: E741
    row_max: Any
    row_sum: Any
    """Partial sums of the weights of a warp-group's own blocks."""
    highest: Any
    """The largest score of each row."""


class Ended(NamedTuple):
    """A work item that has ended and whose left half is still in registers."""

    inverse: Any
    """1 / denominator of each row; 0 where no key was seen."""
    place: Any
    """`HeadsOfToken` or `RowRange`."""


class BoxEntry(NamedTuple):
    """A block of keys that lies in one page."""

    page: Any
    row: Any
    """Row of the page of its first key."""
    keys: Any
    """Its keys, at most 64."""


class StepEntries(NamedTuple):
    """What the producer has looked up for the two blocks of a step: physical rows of keys, or a
    `BoxEntry` each."""

    block0: Any
    block1: Any


class FoundRows(NamedTuple):
    """Where the keys of a block lie."""

    start: Any
    """Pointers to their rows."""
    is_there: Any
    """Whether there is a key."""


class FoundBox(NamedTuple):
    """Where the keys of a block lie that may be a box of one page."""

    start: Any
    """Pointers to their rows."""
    is_there: Any
    """Whether there is a key."""
    box: Any
    """`BoxStart` of the block in its page."""
    is_whole: Any
    """Whether the block has all of its 64 keys."""
