"""MLAPrefillSparse: sparse MLA prefill on Blackwell, a list of latent rows for each query token.

Start at `select_mla_sparse_config`. Every class takes the same keyword arguments and looks at one
side of the block:

    shape      the arguments, checked, and the geometry they imply
    smem       the byte map of shared memory, for a bf16 and for an fp8 cache
    prefill    limits, tensor memory, TMA boxes
    qkv_fp8    both for the kernel that computes in fp8
"""

from openmla.modular.blackwell.sparse.prefill import (
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    MLASparseConfig,
    select_mla_sparse_config,
)
from openmla.modular.blackwell.sparse.qkv_fp8 import (
    MLAPrefillSparseQKVFP8,
    MLASparseSharedMemoryQKVFP8,
)
from openmla.modular.blackwell.sparse.smem import (
    MLASparseSharedMemory,
    MLASparseSharedMemoryFP8,
    Offsets,
)

__all__ = [
    "MLAPrefillSparse",
    "MLAPrefillSparseFP8",
    "MLAPrefillSparseQKVFP8",
    "MLASparseConfig",
    "MLASparseSharedMemory",
    "MLASparseSharedMemoryFP8",
    "MLASparseSharedMemoryQKVFP8",
    "Offsets",
    "select_mla_sparse_config",
]
