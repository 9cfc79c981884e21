"""Records of the CDNA4 kernel over latent rows; kernels/cdna4/records.py has more."""

from typing import Any, NamedTuple


class RowsBlock(NamedTuple):
    """Sizes of a block (BLOCK), chosen by its plan."""

    queries: int
    """Rows of scores, each one head of one token."""
    keys: int
    """Cache rows that are visited at a time."""
    slots: int
    """Slots of the rings of cache rows."""
    latent: int
    """Columns of a row without rope, which are V too."""
    rope: int
    """Rope columns."""


class RowsLayouts(NamedTuple):
    """Layouts of the products (MatrixLayouts) and of cache rows in LDS (TileLayouts): LAYOUTS."""

    matrices: Any
    latent: Any
    rope: Any


class RowFormat(NamedTuple):
    """Constants of cache rows and of what names them (HOW)."""

    is_paged: bool
    """Rows are those of a sequence's pages; else a list names them."""
    page_size: int
    """Rows per page; 0 if pages lie end to end and a list names rows."""
    rope: int
    """Rope columns."""
    scale_block: int
    """Columns that share a scale; 0 without scales."""
    has_tail: bool
    """Whether rows are DeepSeek-V4's: their last 64 columns are 16-bit numbers, and belong to V."""
    is_span: bool = False
    """Consecutive positions of a request's pages, which any number may be wrong of: -1 in a table
    names no page."""


class PagedRows(NamedTuple):
    """One part of the cache rows, or their scales, in global memory."""

    ptr: Any
    page_stride: Any
    row_stride: Any


class CacheParts(NamedTuple):
    """The parts of cache rows, each a PagedRows. Strides of scales count elements."""

    latent: Any
    rope: Any
    """The tail, in DeepSeek-V4's rows."""
    scales: Any
    """fp32; in DeepSeek-V4's rows two words, an exponent in each byte."""


class RowSource(NamedTuple):
    """What names the rows that a block visits."""

    ptr: Any
    """The list of a token, or the line of the block table of a sequence."""
    places: Any
    """Places of the list, or keys of the sequence, that are visited; places after them do not
    count."""
    rows: Any
    """Rows in the pool."""
    origin: Any = None
    """The position, in a sequence or in a request, of the key or row that is place 0; None: places
    are positions."""


class Slot(NamedTuple):
    """A slot of the rings of cache rows."""

    latent: Any
    rope: Any
    """None without rope."""


class Rings(NamedTuple):
    """Rings of cache rows in LDS."""

    latent: Any
    rope: Any
    """None without rope."""


class FetchedRows(NamedTuple):
    """Rows on their way through registers, as they are stored. None: there are none."""

    latent: Any
    rope: Any
    latent_scales: Any
    rope_scales: Any


class FetchedV4Rows(NamedTuple):
    """DeepSeek-V4's rows on their way through registers."""

    chunks: Any
    """e4m3, 64 columns each."""
    tail: Any
    low: Any
    """A word of each row: the exponents of chunks 0 to 3."""
    high: Any
    """A word of each row: the exponents of chunks 4 to 6."""


class TokenLists(NamedTuple):
    """The lists of all tokens."""

    ptr: Any
    stride: Any
    lengths_ptr: Any
    """How many places of each list count; None: all."""
    topk: Any
    blocks: Any
    """Blocks of heads of a token."""


class TokenSpans(NamedTuple):
    """Consecutive positions that each token sees of one request."""

    ptr: Any
    """The block table."""
    stride: Any
    request_ptr: Any
    begin_ptr: Any
    end_ptr: Any
    requests: Any
    """Lines of the table; another number is no request."""
    most_keys: Any
    """Positions that a line of the table has room for."""


class OnlineSoftmax(NamedTuple):
    """The running softmax of the rows so far: see cdna4/softmax.py."""

    output: Any
    shift: Any
    row_sum: Any


class PageTables(NamedTuple):
    """Sequences of a paged cache."""

    ptr: Any
    """The block table."""
    stride: Any
    lengths_ptr: Any
    """Keys of each sequence."""
    most_keys: Any
    """Keys that a line of the block table has room for."""
    cu_ptr: Any
    batch: Any
    total_q: Any
    tiles: Any
    """Tiles of all sequences."""
    window: Any
    """Keys that a token sees at most: those up to its own position that are nearest to it. None:
    all of them."""
    ranges: Any
    """`RangePrograms` where keys of sequences may be split; else None."""


class RangePrograms(NamedTuple):
    """The first programs of a launch: each has a range of the keys of a split sequence."""

    programs: Any
    slots: Any
    """Programs of each sequence: enough for the tiles of all of its ranges."""
    first_sequence: Any
    """The sequence of the first program."""
    part_rows: Any
    """Rows of partial results of a sequence."""


class RowsWork(NamedTuple):
    """A tile of rows of scores: heads of a token, or packed heads of a sequence's tokens."""

    token: Any
    """The token, or the first token of the sequence."""
    first: Any
    """The tile's first row, counted from that token's first; heads run fastest."""
    here: Any
    """Rows from there on; 0 or less: there is nothing to do."""
    list_ptr: Any
    """The list or the line of the block table."""
    begin: Any
    """The first place that is visited."""
    keys: Any
    """Places of the list, or keys of the sequence: those before the end of a range."""
    seen: Any
    """Keys that the sequence's first token sees, if causal; may be negative. Unused for lists."""
    window: Any
    """See PageTables; None for lists."""
    origin: Any
    """With a window, how many keys of the sequence come before the first that some row sees:
    neither `keys` nor `seen` counts them. Else None."""
    part_row: Any
    """Where partial results of a range begin, in rows; -1: the tile has all keys of its sequence.
    Unused for lists."""
