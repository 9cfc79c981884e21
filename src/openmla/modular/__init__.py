"""The five systems of Modular's kernel library that openmla began with, number for number.

    FA4Config          one block of attention on Blackwell: tile, tensor memory, rings
    MLAConfig          one block of dense MLA prefill on Blackwell, for one or two query tiles
    MLAPrefillSparse   one block of sparse MLA prefill on Blackwell: boxes, tiles, columns
    MlaConfigV2        the shape of one block of MLA prefill on CDNA4
    MlaMmaOp           its matrix products, register tiles and LDS addresses

Python has no compile-time members: constants are class attributes, everything else is a property
or a method under the original's name. The values are held to those that the original's own structs
print (tests/modular/oracle). Integers only: no torch, no Triton, no GPU, and nothing of openmla
but errors and arithmetic. What openmla's kernels run on is planned in `openmla.planning`, which
calls what stands here where a kernel follows the original; docs/modular.md has the table.
"""

from openmla.modular.blackwell import (
    Barriers,
    CausalMask,
    FA4Config,
    KeyTiles,
    MLAConfig,
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
    MLAPrefillSparseQKVFP8,
    MLASparseConfig,
    MLASparseSharedMemory,
    MLASparseSharedMemoryFP8,
    MLASparseSharedMemoryQKVFP8,
    NullMask,
    SM100AttentionSMem,
    Swizzle,
    select_mla_prefill_config,
    select_mla_sparse_config,
)
from openmla.modular.cdna4 import (
    MhaConfigV2,
    MhaMmaOp,
    MlaConfigV2,
    MlaMmaOp,
    MlaPrefillV2,
    MlaPrefillV2Core,
    RegisterTile,
)

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
    "MhaConfigV2",
    "MhaMmaOp",
    "MlaConfigV2",
    "MlaMmaOp",
    "MlaPrefillV2",
    "MlaPrefillV2Core",
    "NullMask",
    "RegisterTile",
    "SM100AttentionSMem",
    "Swizzle",
    "select_mla_prefill_config",
    "select_mla_sparse_config",
]
