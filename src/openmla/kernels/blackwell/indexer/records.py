"""Records of the indexer's scores on Blackwell; kernels/gluon/indexer_records.py has more."""

from typing import Any, NamedTuple


class ProductBarriers(NamedTuple):
    """Arrays of mbarriers, one per query tile, for its product in tensor memory."""

    ready: Any
    empty: Any
