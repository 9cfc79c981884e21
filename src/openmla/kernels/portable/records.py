"""Records of the portable kernels."""

from typing import Any, NamedTuple


class CacheRow(NamedTuple):
    """What a cache row holds (ROW), as openmla.formats describes it."""

    quantized: int
    """Columns that have scales; 0: values are as they are in the tensor."""
    scale_block: int
    """Columns that share a scale."""
    scales_at: int
    """Byte of the row's first scale; 0: scales are a tensor of their own."""
    tail_at: int
    """Byte of the first column without a scale."""
    is_unaligned: bool
    """Rows may begin at any byte, rather than at multiples of 4, and have wider elements."""
    has_exponents: bool
    """Scales are exponents (ue8m0), rather than fp32."""
    has_e4m3_scales: bool = False
    """Scales are e4m3, rather than fp32."""
    scale_lanes: int = 1
    """Scales of blocks b, b + lanes, b + 2 lanes … lie side by side."""
    is_fp4: bool = False
    """Columns are e2m1, two in a byte, rather than e4m3."""
    has_e4m3_tail: bool = False
    """Columns without scales are e4m3, rather than bf16."""


PLAIN_ROW = CacheRow(0, 0, 0, 0, is_unaligned=False, has_exponents=False)


class DenseRule(NamedTuple):
    """When keys of the dense form are split (RULE): see tiles.split_count."""

    programs: int
    """Most ranges of a request; two per SM."""
    min_keys: int
    """Least keys of a range."""


class TableLine(NamedTuple):
    """A sequence's line of the block table."""

    ptr: Any
    entries: Any
    last_page: Any
    """The number of the pool's last page."""


class RowBlock(NamedTuple):
    """A block of cache rows in global memory."""

    data_ptr: Any
    scale_ptr: Any
    """None unless scales are a tensor of their own."""
    data_row: Any
    """int64 offsets of the rows, in elements of data_ptr: bytes, if rows have scales."""
    scale_row: Any
    """int64 offsets of their scales, in elements of scale_ptr."""
    ok: Any
    """Which rows may be read."""


class QueryTile(NamedTuple):
    """A tile of queries, ready to be multiplied."""

    latent: Any
    latent_rest: Any
    """The second term; used where a query is two terms."""
    rope: Any
    """Not read without rope."""
    rope_rest: Any


class Factors(NamedTuple):
    """What scores are multiplied by; `factor` > 0 turns them into log2 units."""

    factor: Any
    key: Any
    """One factor per key, or None."""
    row: Any
    """One factor per row, or None."""


class SoftmaxState(NamedTuple):
    """The state of an online softmax: see softmax.py."""

    acc: Any
    row_max: Any
    row_sum: Any


class TokenTile(NamedTuple):
    """Powers of two that hold the parts of a token to quantize (TILE)."""

    heads: int
    columns: int
    rope: int
