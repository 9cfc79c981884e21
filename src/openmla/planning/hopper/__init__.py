"""Plans for MLA prefill on Hopper (H100, H200): every number a kernel needs, before any GPU.

Start at `select_hopper_dense_config` or `select_hopper_sparse_config`. The rules live beside what
they decide:

    chip      what an SM offers: shared memory, registers, wgmma tiles
    dense     HopperDenseConfig: per-head K and V, one rope row for all heads
    dense_fp8 HopperDenseFp8Config: the same with FP8 queries and keys
    latent    HopperSparseConfig: latent rows, from token lists or whole pages
    sparse_fp8 HopperSparseFp8Config: the same with FP8 queries
    family    what the kernels serve

Shared with other families: planning.split (short chunks on long contexts) and planning.dequantize
(where an FP8 cache is dequantized).
"""

from openmla.planning.dequantize import CacheRead
from openmla.planning.hopper.dense import HopperDenseConfig, select_hopper_dense_config
from openmla.planning.hopper.dense_fp8 import (
    HopperDenseFp8Config,
    select_hopper_dense_fp8_config,
)
from openmla.planning.hopper.latent import HopperSparseConfig, select_hopper_sparse_config
from openmla.planning.hopper.sparse_fp8 import (
    HopperSparseFp8Config,
    select_hopper_sparse_fp8_config,
)
from openmla.planning.split import SplitRule

__all__ = [
    "CacheRead",
    "HopperDenseConfig",
    "HopperDenseFp8Config",
    "HopperSparseConfig",
    "HopperSparseFp8Config",
    "SplitRule",
    "select_hopper_dense_config",
    "select_hopper_dense_fp8_config",
    "select_hopper_sparse_config",
    "select_hopper_sparse_fp8_config",
]
