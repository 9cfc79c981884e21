"""Records that the CDNA4 kernels share. Strides of rows count pieces of 16 bytes."""

from typing import Any, NamedTuple


class Queries(NamedTuple):
    """Queries in global memory."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class TokenRows(NamedTuple):
    """Rows in global memory, `Places.per_token` of them for each token."""

    ptr: Any
    """None where an output is not wanted."""
    token_stride: Any
    row_stride: Any
    """From row to row of a token: from head to head."""


class Places(NamedTuple):
    """Which rows a tile has, if the rows of all tokens are numbered."""

    first: Any
    """The number of the tile's first row."""
    per_token: Any


class Sequences(NamedTuple):
    """How tokens are divided into sequences."""

    cu_q_ptr: Any
    cu_k_ptr: Any
    starts_ptr: Any
    """Where the keys of each sequence begin, so that sequences may share keys; `cu_k_ptr` then only
    counts them. None: they lie end to end."""
    batch: Any
    total_q: Any
    total_k: Any
    heads: Any


class WorkItem(NamedTuple):
    """A tile of queries of one head."""

    head: Any
    sequence: Any
    token: Any
    """The first query."""
    rows: Any
    """Queries from there to the sequence's end; 0 or less: there is nothing to do."""
    key: Any
    """The first key row of the sequence."""
    keys: Any
    """Keys of the sequence."""
    seen: Any
    """Keys that the first query sees, if causal; may be negative."""
    window: Any
    """Keys that a query sees at most: those up to its own position that are nearest to it. None:
    all of them."""
    origin: Any
    """With a window, how many keys of the sequence come before `key`: no query of the tile sees
    them, and neither `keys` nor `seen` counts them."""


class TableLine(NamedTuple):
    """A sequence's line of the block table."""

    ptr: Any
    entries: Any
    origin: Any
    """Which key of the sequence is the first that is counted; None: its first."""
