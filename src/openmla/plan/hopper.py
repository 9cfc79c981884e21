"""Plans for MLA prefill on Hopper (H100, H200): every number a kernel needs, before any GPU.

Start at `select_hopper_dense_config` or `select_hopper_sparse_config`. The rules live beside what
they decide:

    hopper_units    what an SM offers: shared memory, registers, wgmma tiles
    hopper_dense    HopperDenseConfig: per-head K and V, one rope row for all heads
    hopper_sparse   HopperSparseConfig: latent rows, from token lists or whole pages
    hopper_split    SplitRule: short chunks on long contexts
    hopper_cache    CacheRead: where an FP8 cache is widened
"""

from openmla.plan.hopper_cache import CacheRead
from openmla.plan.hopper_dense import HopperDenseConfig, select_hopper_dense_config
from openmla.plan.hopper_sparse import HopperSparseConfig, select_hopper_sparse_config
from openmla.plan.hopper_split import SplitRule

__all__ = [
    "CacheRead",
    "HopperDenseConfig",
    "HopperSparseConfig",
    "SplitRule",
    "select_hopper_dense_config",
    "select_hopper_sparse_config",
]
