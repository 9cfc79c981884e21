"""Records of the indexer's scores on CDNA4."""

from typing import Any, NamedTuple


class ScoresLayouts(NamedTuple):
    """Register layouts of a product and of its operands (LAYOUTS)."""

    products: Any
    keys: Any
    queries: Any


class Halves(NamedTuple):
    """Columns 0 … 63 and 64 … 127 of an operand."""

    low: Any
    high: Any


class PagedRows(NamedTuple):
    """Rows of a paged cache, or of one tensor, in global memory."""

    ptr: Any
    page_stride: Any
    row_stride: Any
    last_page: Any


class WindowPointers(NamedTuple):
    """Arrays with one value per query: which keys it sees, and of which sequence it is."""

    starts_ptr: Any
    ends_ptr: Any
    sequences_ptr: Any
    """None unless keys are in pages."""


class Matrix(NamedTuple):
    """A row-major matrix in global memory whose rows are contiguous."""

    ptr: Any
    row_stride: Any
