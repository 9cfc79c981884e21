"""Records of the latent FP8 kernel, besides the ones that it shares with the latent kernel
(latent/records.py)."""

from typing import Any, NamedTuple


class How(NamedTuple):
    """Constants: what the kernel is compiled for."""

    sign: Any
    """Sign of the softmax scale: 1, -1, or 0 where all scores are 0."""
    mask: Any
    """LISTED, FULL or CAUSAL of latent/records.py."""
    wants_logits: Any
    """Whether the largest score of each row is written."""
    has_rope: Any
    has_q_scale: Any
    """Whether each query token has a scale."""
    has_row_scales: Any
    """Whether each row has a scale, for its scores."""
    scales_values: Any
    """Whether the scale of a row is that of its values too."""


class Registers(NamedTuple):
    """Constants: registers per thread of the partitions besides the default one (REGISTERS)."""

    consumer: int
    scores: int
    producer: int


class RowTiles(NamedTuple):
    """Tiles of Q or K in shared memory, by columns."""

    latent: Any
    rope: Any
    """Aliases `latent` where rows have no rope."""


class Stats(NamedTuple):
    """Values per row that the scores' partition leaves for left and right in shared memory."""

    factors: Any
    """Factor of O before a step."""
    moved: Any
    """1 for each warp whose rows have a factor that is not 1, else 0."""
    inverses: Any
    """1 / denominators of a work item."""


class Smem(NamedTuple):
    """Shared memory of the kernel."""

    q: Any
    """`RowTiles`, one of each."""
    k: Any
    """`RowTiles`, one of each for every stage."""
    p: Any
    validity: Any
    """`Validity` of latent/records.py."""
    stats: Any
    scales: Any
    """Scales of rows; aliases `validity.bias` where rows have none."""


class Barriers(NamedTuple):
    """mbarriers of the kernel; the head of kernel.py lists them."""

    q_ready: Any
    q_empty: Any
    k_ready: Any
    p_empty: Any
    sums_ready: Any
    item_ready: Any
    item_empty: Any


class State(NamedTuple):
    """Online softmax of a tile's scores."""

    row_max: Any
    row_sum: Any
    """Partial sums of weights."""
    highest: Any
    """The largest score of each row."""
