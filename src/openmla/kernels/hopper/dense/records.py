# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Records of the dense Hopper kernels, bf16 and FP8 alike: what their partitions hand around.

Fields annotated `Any` hold run-time values of a kernel: registers, pointers, TMA descriptors,
shared memory. The others are constants, and a record of constants alone is a constexpr. A field
may be None, but not in a record that a function returns: Triton 3.6 makes tensors of constants.
"""

from typing import Any, NamedTuple

# Constants.


class Columns(NamedTuple):
    """DIMS: columns of the tiles of Q, K and V; 0 where there is no such tile.

    d_nope is `main`, or `main` + `tail`, because tile widths are powers of two.
    """

    main: int
    tail: int
    rope: int
    v: int


class TileLayouts(NamedTuple):
    """LAYOUTS of a kernel: shared-memory layouts of [rows, columns] tiles; None: no such tile."""

    main: Any
    tail: Any
    rope: Any
    """Rope columns in the type of Q."""
    v: Any
    k_rope: Any
    """Rope columns in the type of K's rope, which FP8 queries may meet in 16 bits."""


class MmaLayouts(NamedTuple):
    """LAYOUTS of a consumer: register layouts of its wgmma."""

    scores: Any
    """The accumulator of QK."""
    weights: Any
    """P, the left operand of PV."""
    rope_scores: Any = None
    """The accumulator of a 16-bit rope product beside FP8 ones: same registers, another layout."""


class Rope(NamedTuple):
    """ROPE: where the rope columns of K are."""

    source: str
    """Problem.rope: "shared", "per_head", "cache" or "none"."""
    page_size: int
    """Rows of a page of the cache; 0 where the source is another."""


class Registers(NamedTuple):
    """REGISTERS: of a thread, by partition. The scheduler has as many as the producer."""

    consumer: int
    producer: int


class How(NamedTuple):
    """HOW: what a consumer does to scores."""

    is_causal: bool
    sign: int
    """Sign of the softmax scale: -1, 0 or 1."""
    min_split: int
    """Fewest keys of a range of a split request; 0: requests are never split."""
    has_key_mask: bool = False
    has_q_scale: bool = False
    has_window: bool = False


class Tiling(NamedTuple):
    """TILE: how requests are cut into work items."""

    block_m: int
    """Queries of a tile."""
    block_n: int
    """Keys of a block."""
    is_causal: bool
    group_keys: int
    """Keys, counted for each head, that a group of heads which shares L2 may have."""
    min_split: int
    """Fewest keys of a range of a split request; 0: requests are never split."""
    sm_count: int


# Arguments of a kernel.


class Requests(NamedTuple):
    """The requests of a launch."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    batch: Any
    total_q: Any
    rest_q: Any
    """Rows up to here belong to request number `batch`, which has no keys; 0: there is none."""
    total_k: Any
    heads: Any
    k_start: Any
    """First key row of each request, where requests may share keys; else None."""
    window: Any = None
    """Keys that a query sees at most, the last up to its position; None: all up to there."""


class ColumnTiles(NamedTuple):
    """Q or K by columns: tiles in shared memory, or the TMA descriptors that fill them.

    The descriptor of a part that does not exist is None; its tile is an alias of `main`, because
    with Triton 3.6 no function can return None.
    """

    main: Any
    tail: Any
    rope: Any


class Sources(NamedTuple):
    """What the producer loads from: TMA descriptors, and a pointer to scales."""

    q: ColumnTiles
    k: ColumnTiles
    k_scale: Any
    """One fp32 scale per key row, or None."""
    v: Any
    key_mask: Any
    """Words of 32 bits, a bit per key, or None."""


class SharedMemory(NamedTuple):
    """Tiles of Q, one per consumer; of all else rings of ST stages, one for a block of keys."""

    q: ColumnTiles
    q_wide_rope: Any
    """Rope columns of Q in the type of K's rope, if that is wider; else None."""
    k: ColumnTiles
    k_scale: Any
    v: Any
    key_mask: Any
    """Four words per query; number stage * NC + consumer."""


class Barriers(NamedTuple):
    """mbarriers; the table in kernel.py says what completes each, and which partition waits."""

    q_ready: Any
    q_empty: Any
    k_ready: Any
    k_empty: Any
    v_ready: Any
    v_empty: Any
    t_ready: Any
    t_empty: Any
    t_request: Any


class BlockTable(NamedTuple):
    """Pages of all requests: [batch, stride] page numbers."""

    base: Any
    stride: Any


class TableLine(NamedTuple):
    """Pages of one request, as gluon/boxes.py `load_pages` takes them."""

    base: Any
    entries: Any


class Output(NamedTuple):
    """A tensor [tokens, heads, ...] that the epilogue writes; `base` None: it is not wanted."""

    base: Any
    stride_t: Any
    stride_h: Any


class Results(NamedTuple):
    """What the epilogue writes, and the sink that it normalizes with."""

    out: Output
    lse: Output
    sink: Any
    """One logit per head, or None."""
    part_sums: Any
    """Workspace of split requests: bare sums, fp32 [slot, 64, d_v]. None where nothing is split."""
    part_state: Any
    """Workspace of split requests: row_max and row_sum, fp32 [slot, 2, 64]."""


# Values in registers.


class RequestRows(NamedTuple):
    """Rows of one request in the tensors of queries and keys.

    With a window, keys begin at the first that any of its queries sees.
    """

    q_start: Any
    q_len: Any
    k_start: Any
    k_len: Any


class WorkItem(NamedTuple):
    """A tile of queries of one head, and the range of keys it is multiplied with."""

    head: Any
    token: Any
    """First row of q and out."""
    rows: Any
    """Queries from there to the request's end."""
    key: Any
    """First row of k and v."""
    keys: Any
    """Keys of the range."""
    seen: Any
    """Keys of the range that the first query sees, if causal; may be negative."""
    skipped: Any
    """Keys of the request before the range."""
    parts: Any
    """Ranges of the request; 1 unless it is split."""


class KeyBlock(NamedTuple):
    """Where a block of keys is loaded from."""

    head: Any
    row: Any
    """Its first row in the tensors of keys."""
    keys: Any
    """Keys of the request up to the end of the work item's range."""
    key: Any
    """Number of its first key in the request."""
    line: Any
    """The TableLine of the request, if rope comes from pages; else None."""


class OutputTile(NamedTuple):
    """Where the epilogue writes a tile."""

    head: Any
    token: Any
    rows: Any
    """Queries from `token` to the request's end."""
    slot: Any
    """Workspace slot of a range of a split request; negative: the tile is whole."""


class ConsumerItem(NamedTuple):
    """What a consumer reads of a work item; scheduler.py has more of its fields."""

    tile: OutputTile
    blocks: Any
    """Key blocks to visit; 0: no more work."""
    whole: Any
    """Blocks that need no mask."""
    keys: Any
    """Keys of the range."""
    seen: Any
    """Keys of the range that the first row sees, if causal; may be negative."""


class Limits(NamedTuple):
    """Which keys of a work item's range a consumer's rows see."""

    seen: Any
    """Keys that the first row sees, if causal; each row sees one more than the row before."""
    keys: Any
    """Keys of the range."""
    since: Any = None
    """With a window, the first key that the first row sees, which may be negative; each row's is
    one after that of the row before."""


class SoftmaxState(NamedTuple):
    """What a consumer carries from block to block; softmax.py defines row_max and row_sum."""

    words: Any
    """P of the block before, packed in pairs."""
    O: Any
    """The output accumulator without that block."""
    row_max: Any
    row_sum: Any
    rescale: Any
    """What O must still be multiplied by."""
