"""Records of the sparse kernel; the pair kernel shares the first ones.

Fields of type Any hold values of the running kernel; all others are known when it is compiled. A
field that a problem does not need is None.
"""

from typing import Any, NamedTuple

from openmla.kernels.blackwell.records import HeadRows


class Indexing(NamedTuple):
    """How a position in a token's list becomes a row of the pool; see rows.py."""

    page_size: int
    """Rows of a page of the pool; 0 where all rows lie evenly."""
    table_page_size: int
    """Keys of a page of the block table; 0: every token has a list of indices."""
    is_causal: bool
    """With a block table: tokens see no keys after their own."""
    ctas: int
    is_span: bool
    """A token sees positions of a line of the block table, which may name pages that are none."""
    second: Any
    """The `Indexing` of a second source of rows, or None."""


class Ranges(NamedTuple):
    """What the ranges of split requests follow from, besides lengths; see gluon/ranges/rule.py."""

    heads: Any
    rest_q: Any
    """Where the tokens end that follow the last sequence; 0 where another launch clears them."""
    part_rows: Any
    """Rows of the workspace that a request has."""


class Spans(NamedTuple):
    """Which positions of a block table each token sees; their ends are TokenLists.lengths."""

    request: Any
    """Pointer to the line of each token."""
    begin: Any
    """Pointer to the first position of each token."""
    requests: Any
    """Lines of the table."""


class TokenLists(NamedTuple):
    """The lists of all tokens, or the block table that they follow from."""

    indices: Any
    """Pointer to the lists, or to the block table."""
    lengths: Any
    """Pointer to the valid length of every list, or to the keys of every sequence."""
    cu_seqlens: Any
    """Pointer to the sequences' offsets, which a block table needs."""
    stride: Any
    """Entries from list to list, or from sequence to sequence."""
    topk: Any
    """Most keys of a token."""
    tokens: Any
    batch: Any
    """Sequences of a block table."""
    ranges: Any
    """`Ranges`; None where a work item has all keys of its token."""
    spans: Any
    """`Spans`, or None."""
    second: Any
    """`SecondLists`, or None."""
    window: Any
    """Keys of a sequence that a token sees at most, the last up to its own; None: all of them."""


class Pool(NamedTuple):
    """The rows that indices name. Steps are in rows of a TMA descriptor, which may be shorter."""

    rows: Any
    page_step: Any
    row_step: Any
    base: Any
    """Descriptor row of its first row; None: the first."""


class SecondLists(NamedTuple):
    """The lists of a second source, whose keys follow those of the first in steps of their own."""

    indices: Any
    lengths: Any
    stride: Any
    topk: Any
    spans: Any
    """`Spans`, or None."""
    pool: Pool


class Seen(NamedTuple):
    """What a token sees of one source."""

    line: Any
    """Its list, or its line of the block table."""
    first: Any
    length: Any


class KeyList(NamedTuple):
    """The keys of one token."""

    indices: Any
    """Pointer to its indices, or to its sequence's line of the block table."""
    length: Any
    """Valid length of the list."""
    pool: Pool
    first: Any
    """Entries before the first that counts, where there is a window or a span; None: none."""
    second: Any
    """The `SecondKeys` of a second source, or None."""


class SecondKeys(NamedTuple):
    """The keys of one token of a second source, in steps of their own."""

    after: Any
    """Steps over the first source, which come before."""
    indices: Any
    """Pointer to its indices; length and first are those of a KeyList too."""
    length: Any
    first: Any
    rows: Any
    """Rows of its pool; the steps are those of a Pool too."""
    page_step: Any
    row_step: Any


class Results(NamedTuple):
    """What a kernel writes."""

    out: Any
    """A TMA descriptor."""
    lse: HeadRows
    max_logits: HeadRows
    parts: Any
    """The workspace for ranges of keys, gluon.ranges.records.Parts; None where none are split."""
    angles: Any
    """gluon.turning.Angles; not looked at where nothing is turned back."""


class SoftmaxState(NamedTuple):
    """What the softmax partition knows of its rows; see softmax.py."""

    row_max: Any
    row_sum: Any
    highest: Any


class How(NamedTuple):
    """How the kernel walks the list of a token."""

    b_topk: int
    """Keys of a step."""
    num_mbars: int
    """Barriers of a kind."""
    v_atoms: int
    """Atoms of 256 columns that V has."""
    indexing: Indexing


class QSplit(NamedTuple):
    """Columns of Q that the products read from shared memory and from tensor memory."""

    smem: int
    tmem: int


class Fp8Cache(NamedTuple):
    """The format of FP8 rows: fp8_block64 has (64, 9), 656 bytes have (128, 8), 584 bytes have
    (64, 7), fp8_token has (576, 9), rows without scales have (0, 9) as their first two fields."""

    scale_columns: int
    """Columns that share a scale; 0: rows have no scales."""
    raw_tiles: int
    """64-column tiles of K that are dequantized; the others are 16-bit columns."""
    v_tiles: int
    """64-column tiles of V that are dequantized; in rows of 584 bytes it has one of 16 bits too."""
    plain_column: int
    """Where 16-bit columns begin in a row, counted in 16-bit columns; 0 where there are none."""
    has_exponents: bool
    """Scales are powers of two, whose exponents are bytes (ue8m0); otherwise they are fp32."""
    scale_page_size: int
    """Rows of a page of scales; 0 where all scales lie evenly."""
    second: Any
    """The `Fp8Cache` of a second source, which differs in its pages alone; None: there is none."""


class ScaleBlocks(NamedTuple):
    """Scales of a key: for its K columns and for its V columns."""

    k: int
    v: int


class TmemMap(NamedTuple):
    """First columns of tensor memory."""

    output: int
    scores: int
    q: int


class TmemLayouts(NamedTuple):
    """Tensor memory layouts."""

    output: Any
    """256 columns of O."""
    scores: Any
    q: Any
    """64 columns of Q as a left operand."""
    q_copy: Any
    """64 columns of Q while they are copied, as 32-bit words in all lanes."""
    whole: Any
    """The allocation."""


class RegisterLayouts(NamedTuple):
    """Register layouts of the softmax partition."""

    scores: Any
    output: Any
    """`output_columns` columns of O."""
    output_columns: int


class Registers(NamedTuple):
    """Registers per thread; softmax, the default partition, gets what is left."""

    load_k: int
    load_v: int
    mma: int
    kv_valid_producer: int


class WorkItem(NamedTuple):
    """What a CTA works on: one token and up to 64 of its heads."""

    token: Any
    first_head: Any
    heads: Any
    """Heads of the problem."""
    steps: Any
    """Steps over the list of the token."""


class ScaleSource(NamedTuple):
    """Where the scales of FP8 rows are."""

    base: Any
    page_stride: Any
    row_stride: Any


class Sources(NamedTuple):
    """Where the producers read: TMA descriptors, and the scales."""

    q: Any
    q_warp: Any
    """Q by 32 heads, the lanes of a warp."""
    k: Any
    plain: Any
    """The 16-bit columns of rows of 656 or 584 bytes."""
    v: Any
    scales: ScaleSource
    second: Any
    """`SecondRows`, or None."""


class SecondRows(NamedTuple):
    """Where the rows of a second source are read: TMA descriptors, and the scales."""

    raw: Any
    plain: Any
    scales: ScaleSource


class Tiles(NamedTuple):
    """Shared memory; see the table in kernel.py."""

    q: Any
    k: Any
    k_raw: Any
    k_scales: Any
    v: Any
    v_scales: Any
    p: Any
    is_k_valid: Any


class Barriers(NamedTuple):
    """All mbarriers; the table in kernel.py says what completes each, and which partition waits."""

    q_ready: Any
    q_copied: Any
    qk_ss_done: Any
    qk_ts_done: Any
    k_p0_ready: Any
    k_p1_ready: Any
    k_fp8_tma_done: Any
    k_plain_done: Any
    sv_p0_done: Any
    sv_p1_done: Any
    v_p0_ready: Any
    v_p1_ready: Any
    v_fp8_tma_done: Any
    p_free: Any
    so_ready: Any
    k_valid_ready: Any
    k_valid_free: Any
