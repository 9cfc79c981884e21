"""Records of the pair kernel; others are the sparse kernel's.

Fields of type Any hold values of the running kernel; all others are known when it is compiled.
"""

from typing import Any, NamedTuple


class Item(NamedTuple):
    """What a pair works on: one token, or a range of its keys."""

    token: Any
    indices: Any
    """Pointer to its list, or to its sequence's line of the block table."""
    first: Any
    """Where the range begins in the list."""
    length: Any
    """Where it ends: the valid length of the list, or before."""
    steps: Any
    part: Any
    """Row of the workspace that belongs to head 0; -1: the item has all keys of the token."""
    second: Any
    """The `Second` source of its token, or None."""


class Second(NamedTuple):
    """What an item has of a second source."""

    after: Any
    """Steps over the first source, which come before."""
    indices: Any
    first: Any
    length: Any


class Counted(NamedTuple):
    """Requests of a chunk, one to a lane."""

    lanes: Any
    items: Any
    """How many work items each has."""


class Sources(NamedTuple):
    """TMA descriptors of the operands."""

    q: Any
    k: Any
    v: Any


class ScoreScale(NamedTuple):
    """What scores are multiplied by."""

    factor: Any
    """scale * log2 e"""
    q_scale: Any
    """Pointer to the scale of each query, or None."""


class Tiles(NamedTuple):
    """Shared memory; see the table in kernel.py."""

    q: Any
    ring: Any
    p: Any
    is_k_valid: Any


class TensorMemory(NamedTuple):
    """Allocations in tensor memory."""

    outputs: Any
    """The two atoms of O, 256 columns each."""
    scores: Any
    """Two score tiles, one for even and one for odd steps."""


class Barriers(NamedTuple):
    """All mbarriers; the table in kernel.py says what completes each, and which partition waits."""

    q_full: Any
    q_free: Any
    full: Any
    empty: Any
    s_full: Any
    p_full: Any
    o_done: Any
    valid_full: Any
    valid_free: Any


class Registers(NamedTuple):
    """Registers per thread; softmax, the default partition, gets what is left."""

    load: int
    multiply: int
    kv_valid_producer: int
