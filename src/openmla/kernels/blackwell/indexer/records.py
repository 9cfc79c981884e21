"""Records of the indexer's scores on Blackwell; kernels/gluon/indexer_records.py has more."""

from typing import Any, NamedTuple


class ProductBarriers(NamedTuple):
    """Arrays of mbarriers, one per query tile, for its product in tensor memory."""

    ready: Any
    empty: Any


class Scores(NamedTuple):
    """Operands of the scores, and what the partitions share that add them up."""

    smem: Any
    """SharedTiles."""
    weight_tiles: Any
    """Halved weights of the columns of every query tile, in shared memory."""
    bars: Any
    """ScoresBarriers."""
    products: ProductBarriers
    tmem: Any
    """Products, one per query tile."""
    windows: Any
    """WindowPointers."""
    weights: Any
    """Matrix."""
    out: Any
    """Matrix."""
    total_q: Any
    columns: Any
    """Columns of the scores that can be written."""
