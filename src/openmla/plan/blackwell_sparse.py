"""Plans for sparse MLA prefill on Blackwell: each query token attends to its own latent rows.

Start at `select_mla_sparse_config`. Every class takes the same keyword arguments and looks at one
side of the block:

    blackwell_sparse_shape     the arguments, checked, and the geometry they imply
    blackwell_sparse_smem      the byte map of shared memory, for a bf16 and for an fp8 cache
    blackwell_sparse_prefill   limits, tensor memory, TMA boxes
    blackwell_sparse_qkv_fp8   both for the kernel that computes in fp8
"""

from openmla.plan.blackwell_sparse_prefill import (
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    MLASparseConfig,
    select_mla_sparse_config,
)
from openmla.plan.blackwell_sparse_qkv_fp8 import (
    MLAPrefillSparseQKVFP8,
    MLASparseSharedMemoryQKVFP8,
)
from openmla.plan.blackwell_sparse_smem import (
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
