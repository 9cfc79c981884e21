"""Records of the kernels for few queries, besides the ones that they share with the latent kernel
(latent/records.py)."""

from typing import Any, NamedTuple


class Registers(NamedTuple):
    """Constants: registers per thread of the partitions besides the default one (REGISTERS)."""

    copy: int
    add_up: int


class Chunks(NamedTuple):
    """Columns of rows of an FP8 cache as they are stored, chunk by chunk; no chunks for plain rows.

    The latent columns come first, then rope that is e4m3.
    """

    words: tuple[Any, ...]
    scales: tuple[Any, ...]


class Tile(NamedTuple):
    """What a program of values_kernel computes: 64 heads of a query, and some columns of V."""

    steps: Any
    """Steps of the query's list."""
    first_block: Any
    """Its first block of keys, counted over all queries."""
    first_head: Any
    chunk: Any
    """Number of the columns, in units of a program's."""


class Ring(NamedTuple):
    """Shared memory of values_kernel, for the steps that are on their way."""

    p: Any
    v: Any
    factors: Any
    """What O is multiplied by before each block of a step."""


class Barriers(NamedTuple):
    """mbarriers of values_kernel; the head of values.py lists them."""

    step_ready: Any
    step_empty: Any
    done: Any


class StepDescriptors(NamedTuple):
    """TMA descriptors of what weights_kernel and scores_kernel wrote."""

    weights: Any
    v: Any


class WeightSums(NamedTuple):
    """What weights_kernel wrote of every block, head by head."""

    references: Any
    factors: Any
    """What O is multiplied by before the block."""
    quads: Any
    """Four partial sums of the weights."""


class StepSums(NamedTuple):
    """Factors and partial sums of the two blocks of a step, in registers."""

    factor0: Any
    factor1: Any
    quads: Any
    """[heads, blocks, partial sums]"""
