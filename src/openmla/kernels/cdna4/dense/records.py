"""Records of the dense CDNA4 kernel; kernels/cdna4/records.py has more."""

from typing import Any, NamedTuple


class DenseBlock(NamedTuple):
    """Sizes of a block (BLOCK), chosen by its plan."""

    queries: int
    keys: int
    """Keys of a tile."""
    part_width: int
    """Columns of each part of K without rope."""
    nope_parts: int
    """Parts of K without rope; rope is one more."""
    d_rope: int
    d_v: int
    k_slots: int
    v_slots: int
    frag_columns: int
    """Columns of a fragment of Q and K."""
    across: int
    """Waves side by side, which share keys and columns among them."""
    q_frags: int
    """Fragments of Q."""


class DenseLayouts(NamedTuple):
    """Layouts of the products (MatrixLayouts) and of tiles in LDS (TileLayouts): LAYOUTS."""

    matrices: Any
    q: Any
    """None if Q goes to registers."""
    k: tuple[Any, ...]
    """One for each part of K."""
    v: Any


class HeadGroups(NamedTuple):
    """How many query heads share one head (GROUPS)."""

    kv: int
    """Query heads per head of K and V."""
    rope: int
    """Query heads per head of rope."""


class How(NamedTuple):
    """Constants of the walk over keys (HOW)."""

    is_causal: bool
    sign: int
    """The sign of the scale: 1, -1, or 0 for a scale that vanishes."""
    p_dtype: Any
    """The type of the weights in the second product."""
    page_size: int
    """Rows of a page of rope; 0: rope is a tensor."""


class Scales(NamedTuple):
    """Factors of scores. None: there are none."""

    rows: Any
    """One for each query of the tile, in registers."""
    keys_ptr: Any
    """One for each key of the sequence."""


class MaskRows(NamedTuple):
    """Bits that say which keys the queries of a WorkItem see."""

    ptr: Any
    """The words of its first query; None: every query sees every key."""
    row_stride: Any
    last_row: Any
    """The number of its last query."""
    words: Any
    """Words of a query."""
    shift: Any
    """Which bit of its first word belongs to the first key of the WorkItem; None: the lowest."""


class HeadRows(NamedTuple):
    """K, V or rope of one head, from the sequence's first key on."""

    ptr: Any
    row_stride: Any


class RopeRows(NamedTuple):
    """Rope columns of a paged cache."""

    ptr: Any
    row_stride: Any
    page_stride: Any
    last_page: Any
    """The number of the pool's last page."""
    line: Any
    """TableLine of the sequence."""


class Sources(NamedTuple):
    """Where the tiles of a sequence are copied from."""

    k: Any
    """HeadRows."""
    rope: Any
    """RopeRows if rope comes from pages, HeadRows if from a tensor, None if there is no rope."""
    v: Any
    """HeadRows."""
    mask: Any
    """MaskRows."""
    scales: Any
    """Scales."""


class Rings(NamedTuple):
    """Rings of tiles in LDS."""

    k: Any
    """One ring per part of K."""
    v: Any
    scales: Any
    """Scales of the keys of two tiles; None without."""
