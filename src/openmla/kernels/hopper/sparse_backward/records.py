"""Records of Hopper's sparse backward: what its partitions hand around.

Fields annotated `Any` hold run-time values of a kernel: registers, pointers, TMA descriptors,
shared memory. The others are constants, and a record of constants alone is a constexpr.
"""

from typing import Any, NamedTuple

# Constants.


class Columns(NamedTuple):
    """DIMS: columns of a row; V is its latent columns. rope is 0 where there is none."""

    latent: int
    rope: int


class TileLayouts(NamedTuple):
    """LAYOUTS: shared-memory layouts of [64, columns] tiles."""

    half: Any
    panel: Any
    """Tiles of 64 columns of Q and d_out."""
    narrow: Any
    """Tiles of 64 columns of which each warp-group has half, swizzled by 64 bytes: 32 columns are
    whole patterns. Rope columns, P and dS."""


class Registers(NamedTuple):
    """REGISTERS: of a thread, by partition."""

    consumer: int
    producer: int


class How(NamedTuple):
    """HOW: what a launch is."""

    sign: int
    """Sign of the softmax scale: -1, 0 or 1."""
    wants_rows: bool
    """Whether rows have gradients."""


# Arguments of a kernel.


class Rows(NamedTuple):
    """A tensor [tokens, heads, ...] in global memory; `base` None: it does not exist."""

    base: Any
    stride_t: Any
    stride_h: Any


class Lists(NamedTuple):
    """The lists of all queries, and the rows that they name."""

    indices: Any
    stride: Any
    rows: Any
    """Pointer to the first row."""
    row_stride: Any
    """In units of 8 elements."""
    row_count: Any


class Descriptors(NamedTuple):
    """TMA descriptors of 64 heads of a query, 64 columns; `rope` None: there is none."""

    panel: Any
    rope: Any


class Sources(NamedTuple):
    """What the producer loads once."""

    q: Descriptors
    d_out: Any


class Statistics(NamedTuple):
    """float32 [total_q, heads]: see statistics.py."""

    total: Any
    delta: Any


class Parts(NamedTuple):
    """What entries give to their rows: 16-bit [entries x blocks of heads, columns]."""

    base: Any
    first: Any
    """Number of the list's first entry in the workspace."""
    blocks: Any
    """Blocks of heads: an entry has so many rows, side by side."""


class WorkItem(NamedTuple):
    """64 heads of a query and its list."""

    token: Any
    head_block: Any
    heads: Any
    count: Any
    """Entries of the list that are looked at."""


# Inside the kernel.


class ColumnTiles(NamedTuple):
    """Halves of the latent columns, and the rope columns; without rope an alias of `left`."""

    left: Any
    right: Any
    rope: Any


class Queries(NamedTuple):
    """Q of 64 heads: panels of 64 latent columns, and rope columns; without them an alias."""

    latent: Any
    rope: Any


class Smem(NamedTuple):
    """Shared memory: Q, d_out and rows; weights, gradients of scores and validity of a step."""

    q: Queries
    d_out: Any
    """Panels of 64 columns."""
    k: ColumnTiles
    p: Any
    d_s: Any
    bias: Any
    """0 or -inf for each of the 64 entries."""


class Barriers(NamedTuple):
    """mbarriers: see the table in kernel.py."""

    q_ready: Any
    k_ready: Any
    k_empty: Any
    valid_ready: Any


class RowStatistics(NamedTuple):
    """Statistics of 64 heads, in the layout of scores' rows."""

    total: Any
    delta: Any


class QueryGradient(NamedTuple):
    """Accumulators of d_q: half of the latent columns, and half of the rope columns."""

    half: Any
    rope: Any
