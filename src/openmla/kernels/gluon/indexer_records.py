"""Records of the indexer's scores kernels on Hopper and Blackwell.

Records of constants come from the launcher; the others are made inside the kernel of its arguments.
"""

from typing import Any, NamedTuple


class ScoresConfig(NamedTuple):
    """Constants of a scores kernel (CFG), chosen by its plan."""

    tiles: int
    """Query tiles of a work item, 128 / HEADS queries each."""
    block_keys: int
    """Keys of one stage."""
    key_stages: int
    query_stages: int
    chunk: int
    """Most keys of a work item."""


class Descriptors(NamedTuple):
    """TMA descriptors of the operands."""

    q: Any
    k: Any
    scales: Any


class Matrix(NamedTuple):
    """A row-major matrix in global memory whose rows are contiguous."""

    ptr: Any
    row_stride: Any


class WindowPointers(NamedTuple):
    """Arrays with one value per query: which keys it sees, and of which sequence it is."""

    starts_ptr: Any
    ends_ptr: Any
    sequences_ptr: Any
    """None unless keys are in pages."""
    longest_ptr: Any
    """One value for all queries, the largest `ends`; None where it is not known."""


class Sources(NamedTuple):
    """What the producer finds work items with, and what it loads."""

    descs: Descriptors
    windows: WindowPointers
    table: Matrix
    """Pages of the sequences; not read unless keys are in pages."""
    counter: Any
    """Pointer to the next work item's number."""
    total_q: Any
    columns: Any
    """Columns of the scores that can be written."""
    chunks: Any
    """Ranges of keys of a block of queries."""


class Window(NamedTuple):
    """Keys low … high - 1."""

    low: Any
    high: Any


class WorkItem(NamedTuple):
    """A block of queries and a range of keys."""

    query: Any
    """The first query."""
    key: Any
    """The first key, a multiple of 64."""
    last: Any
    """The key after the last that any query of the block sees; may be beyond the range."""
    line: Any
    """The sequence, as a line of the block table; queries of other sequences are skipped."""


class SharedTiles(NamedTuple):
    """Rings in shared memory."""

    items: Any
    """Fields of announced work items (indexer_work.FIELDS numbers a slot)."""
    q: Any
    k: Any
    scales: Any
    """Scales of the keys."""


class ScoresBarriers(NamedTuple):
    """Arrays of mbarriers, one per slot or stage."""

    q_ready: Any
    q_empty: Any
    k_ready: Any
    k_empty: Any
    item_ready: Any
    """A work item is announced."""
