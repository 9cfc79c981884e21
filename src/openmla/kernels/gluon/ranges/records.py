"""Records of requests whose keys are split into ranges, and of the merge.

Fields of type Any hold values of the running kernel.
"""

from typing import Any, NamedTuple


class Requests(NamedTuple):
    """The sequences of a launch."""

    cu_seqlens_q: Any
    """Prefix sums of their query tokens."""
    lengths: Any
    """Their numbers of keys."""
    most_keys: Any
    """Keys of a line of the block table."""
    batch: Any
    total_q: Any
    rest_q: Any
    """Where the tokens end that follow the last sequence, and whose outputs are cleared."""


class Output(NamedTuple):
    """A tensor of results."""

    base: Any
    """None where it is not wanted."""
    token_stride: Any
    head_stride: Any


class Parts(NamedTuple):
    """The workspace for ranges of keys (see rule.py)."""

    sums: Any
    """[rows, d_v], unnormalized."""
    state: Any
    """[rows, 2]: the reference, and the sum of weights."""


class SplitRequest(NamedTuple):
    """A request whose ranges of keys are merged."""

    first_row: Any
    """Its first row in the workspace."""
    first_token: Any
    rows: Any
    """Its rows."""
    step: Any
    """Rows of the workspace from one range of a row to the next."""
    ranges: Any


class MergedRows(NamedTuple):
    """Rows of a split request that a program merges; range p of a row lies p x `step` after range
    0."""

    first_row: Any
    """Where range 0 of each row lies in the workspace."""
    exists: Any
    """Whether the request has the row."""
    step: Any
    ranges: Any


class MergeTile(NamedTuple):
    """What a program of the merge loads at a time (constants)."""

    slots: int
    """Of each row."""
    columns: int
    lanes: int
    """Threads of a warp."""


class Slots(NamedTuple):
    """Partial results of the ranges that the merge has put into each slot of a row."""

    sums: Any
    """[rows, slots, columns]"""
    row_max: Any
    """References, [rows, slots]."""
    row_sum: Any
    """Sums of weights, [rows, slots]."""
