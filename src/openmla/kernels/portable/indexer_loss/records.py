"""Records of the kernels of an indexer's loss."""

from typing import Any, NamedTuple


class QueryTile(NamedTuple):
    """BM query rows of one sequence, and the keys that one of them sees."""

    first: Any
    """Its first row, counted within the sequence."""
    q_start: Any
    """Token of the sequence's first query."""
    q_len: Any
    k_start: Any
    k_len: Any
    stop: Any
    """One past the last key that a row of the tile sees; 0 where the tile has no rows."""
