"""Records of cache rows, of the lists that name them, and of the workspace they go to."""

from typing import Any, NamedTuple


class CacheRows(NamedTuple):
    """Where the rows of a cache and their scales lie. Strides of rows count 16 bytes."""

    data_ptr: Any
    """Words of four e4m3 columns, or the columns of rows that are not dequantized."""
    page_stride: Any
    """None where pages lie end to end: `row_stride` is enough then."""
    row_stride: Any
    scale_ptr: Any
    """fp32: inside the rows, or in a tensor of their own; None: rows have no scales."""
    scale_page_stride: Any
    """Used, as is scale_row_stride, if scales are in a tensor of their own; counts elements."""
    scale_row_stride: Any
    rope_ptr: Any
    """bf16 columns inside e4m3 rows; None if rope is stored as the latent is: scales, if there are
    any, are then in a tensor of their own."""
    pages: Any = None
    """`Pages`, used where there is a page stride."""
    page_rows: Any = None
    """Rows of a page, where that is a run-time value: in rows of DeepSeek-V4 and V4.1 (v4_rows.py),
    whose scales are words, and in bf16 rows beside them, whose data are words too."""
    second: Any = None
    """`CacheRows` of a second source of rows; None where there is one source."""


class Stored(NamedTuple):
    """Constants: formats of the rows of one or two sources (STORED), by the names of v4_rows.py."""

    first: str
    second: str
    """Equal to `first` where there is one source."""


class ChunkedRows(NamedTuple):
    """Constants: how rows of a format hold quantized columns, chunks of 64 bytes."""

    chunks: int
    columns: int
    """How many columns a chunk holds."""
    scale: str
    """Type of the scales."""
    scale_words: int
    """Words of scales that a thread loads for a row: those of its own columns."""
    scale_step: int
    """Words from one of them to the next."""
    scale_chunks: int
    """Chunks whose scales are in one of them."""
    has_tail: bool
    """Whether 64 bf16 columns follow."""


class CacheFormat(NamedTuple):
    """Constants of a cache (CACHE)."""

    scale_block: int
    """Columns that share a scale; 0 if rows are not dequantized."""


class RowColumns(NamedTuple):
    """Columns of a row (DIMS)."""

    latent: int
    rope: int
    """0 if rows have none."""


class RowPlaces(NamedTuple):
    """Where rows of DeepSeek-V4 or V4.1, or bf16 rows, lie, one per key."""

    words: Any
    """Pointers to the words of the rows."""
    scales: Any
    """Pointers to the words of their scales."""
    is_there: Any
    """Whether there is a key."""
    is_quantized: Any
    """Whether there is one whose columns are quantized."""
    start: Any
    """Where the rows begin, in units of 16 bytes."""


class RowScales(NamedTuple):
    """Scales of rows of DeepSeek-V4's, one exponent a byte."""

    low: Any
    """Scales of chunks 0 to 3."""
    high: Any
    """Scales of chunks 4 to 6."""


class UnitLists(NamedTuple):
    """Lists of units, rows or pages of the pool: a matrix of their numbers."""

    ptr: Any
    lengths_ptr: Any
    """How many rows or keys of each list count; None: all."""
    columns: Any
    stride: Any
    """Elements from a list to the next."""
    units: Any
    """Units in the pool; other numbers name nothing."""
    rows: Any
    """Rows of a unit: `Pages`."""


class Entries(NamedTuple):
    """A block of entries of one list, one per thread and register."""

    number: Any
    """Its number among the entries of all lists."""
    unit: Any
    """What the entry names; 0 if it names nothing."""
    valid: Any
    """Whether it names a unit of the pool and counts."""
    exists: Any
    """Whether the list has such an entry."""


class WorkspaceRows(NamedTuple):
    """Rows of the workspace that a program fills."""

    ptr: Any
    start: Any
    """First element of each row."""
