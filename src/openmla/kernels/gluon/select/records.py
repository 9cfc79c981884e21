"""Records of the selection."""

from typing import Any, NamedTuple


class SelectConfig(NamedTuple):
    """Constants of the selection (CFG), chosen by its plan."""

    warps: int
    chunk_vectors: int
    """Vectors of four scores that a thread holds of a chunk."""
    list_vectors: int
    """Vectors of four scores that a thread holds of a list, or of a row that is loaded whole."""
    stages: int
    """Chunks in the ring."""
    lanes: int
    """Threads of a warp."""
    loads_to_lds: bool
    """Chunks are copied by CDNA4's loads to LDS; else by cp.async."""
    recomputes: bool
    """What is cheap is computed where it is used, hidden from the compiler by zeros in PTX, instead
    of being kept in registers."""


class Lists(NamedTuple):
    """What passed the pivot, in global memory."""

    positions_ptr: Any
    scores_ptr: Any
    """Bits of the scores."""


class Writing(NamedTuple):
    """Constants that say how a selection is written (HOW)."""

    names_rows: bool
    """Positions become physical rows."""
    adds_start: bool
    """Positions become columns of the scores."""
    has_mask: bool
    """A bit mask is written too."""


class RowOutput(NamedTuple):
    """Where the selection of one row goes."""

    out_row: Any
    """A pointer to its positions."""
    mask_row: Any
    """A pointer to its bit mask; None without one."""
    words: Any
    """Words of the bit mask."""
    start: Any
    """The column of position 0."""
    entries: Any
    """A pointer to the sequence's line of the block table; None unless keys are in pages."""
    pages: Any
    """Entries of that line."""
    page: Any
    """`Pages`, by which positions are found in it."""
