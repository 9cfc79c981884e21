"""Records of CDNA4's backward kernels; kernels/cdna4/records.py has more.

Either pass has a side of its own, whose rows it keeps in registers and writes gradients of, and
walks the other: the query pass keeps queries and walks keys, the key pass keeps keys and walks
queries. Strides of rows count pieces of 16 bytes.
"""

from typing import Any, NamedTuple

# Constants.


class BackwardBlock(NamedTuple):
    """Sizes of a block (BLOCK), chosen by its plan."""

    own_rows: int
    """Rows of the side that a pass owns."""
    step_rows: int
    """Rows of the other side that lie in LDS together."""
    slots: int
    d_nope: int
    d_rope: int
    """0: there is no rope."""
    d_qk: int
    d_v: int


class BackwardLayouts(NamedTuple):
    """Layouts of the products (MatrixLayouts) and of tiles in LDS (Columns of TileLayouts)."""

    matrices: Any
    tiles: Any


class How(NamedTuple):
    """What is done to scores (HOW)."""

    is_causal: bool
    sign: int
    """The sign of the scale: 1, -1, or 0 for a scale that vanishes."""
    holds_reads: bool
    """Whether the compiler is kept from reading operands of scores late."""


# Values.


class Columns(NamedTuple):
    """What there is of each kind of columns; `rope` is the same as `nope` where there is none."""

    nope: Any
    rope: Any
    v: Any
    """V's beside keys, d_out's beside queries."""


class Own(NamedTuple):
    """A tile's own rows as left operands of scores and dP: a fragment for each 32 columns."""

    columns: Any
    """Fragments of Q or K, rope behind the others."""
    v: Any
    """Fragments of d_out or V."""


class Walked(NamedTuple):
    """Rows of the other side of a sequence, for one head."""

    columns: Columns
    """HeadRows of each kind."""
    limit: Any
    """Rows that exist; what is copied past them is zeros."""


class Saved(NamedTuple):
    """What statistics of query rows are made of: TokenRows."""

    out: Any
    d_out: Any
    lse: Any
    """Its strides, and those of d_lse, count elements."""
    d_lse: Any
    sink_ptr: Any
    """One logit per head, or None."""


class Statistics(NamedTuple):
    """Where statistics of query rows lie."""

    ptr: Any
    """fp32 [2, heads, rows]: totals, then deltas. Tile t of the query pass has rows t * BM and
    up, all its own."""
    rows: Any
    heads: Any


class RowStatistics(NamedTuple):
    """What weights and score gradients of query rows are made of, [rows] in fp32."""

    total: Any
    """What exponents are relative to, log2: lse and the sink; +inf where no key is seen."""
    delta: Any
    """sum(out * d_out), less the gradient of lse."""


class Turns(NamedTuple):
    """Statistics of the queries that a key pass walks."""

    totals_ptr: Any
    """At those of the sequence's first query, for the head."""
    deltas_ptr: Any
    total: Any
    """In LDS, those of a step for each slot."""
    delta: Any


class KeyItem(NamedTuple):
    """A tile of keys of one head, and the queries that it walks."""

    head: Any
    token: Any
    """The first key."""
    rows: Any
    """Keys from there to the sequence's end; 0 or less: there is nothing to do."""
    query: Any
    """The first query of the sequence."""
    queries: Any
    """Queries of the sequence."""
    seeing: Any
    """The first query that sees the first key, if causal; may be negative."""
    place: Any
    """Where statistics of the sequence's queries begin."""
