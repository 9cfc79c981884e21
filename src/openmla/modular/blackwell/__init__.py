"""FA4Config, MLAConfig and MLAPrefillSparse: the original's plans for attention on Blackwell.

Start at `select_mla_prefill_config` or `select_mla_sparse_config`. The rules live beside what they
decide:

    units       what a B200 offers
    tile        BN and the tensor-memory columns
    ring        how many K/V tiles shared memory holds
    fa4         FA4Config: one attention block
    mla         MLAConfig: one MLA prefill block, 1Q or 2Q, and the choice between variants
    barriers    the barriers and their arrivals
    smem        the byte map of shared memory
    masks       which key tiles a query tile visits
    sparse/     the same for token lists
"""

from openmla.modular.blackwell.barriers import Barriers
from openmla.modular.blackwell.fa4 import FA4Config
from openmla.modular.blackwell.masks import CausalMask, KeyTiles, NullMask
from openmla.modular.blackwell.mla import MLAConfig, select_mla_prefill_config
from openmla.modular.blackwell.smem import SM100AttentionSMem
from openmla.modular.blackwell.sparse import (
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    MLAPrefillSparseQKVFP8,
    MLASparseConfig,
    MLASparseSharedMemory,
    MLASparseSharedMemoryFP8,
    MLASparseSharedMemoryQKVFP8,
    select_mla_sparse_config,
)
from openmla.modular.blackwell.units import Swizzle

__all__ = [
    "Barriers",
    "CausalMask",
    "FA4Config",
    "KeyTiles",
    "MLAConfig",
    "MLAPrefillSparse",
    "MLAPrefillSparseFP8",
    "MLAPrefillSparseQKVFP8",
    "MLASparseConfig",
    "MLASparseSharedMemory",
    "MLASparseSharedMemoryFP8",
    "MLASparseSharedMemoryQKVFP8",
    "NullMask",
    "SM100AttentionSMem",
    "Swizzle",
    "select_mla_prefill_config",
    "select_mla_sparse_config",
]
