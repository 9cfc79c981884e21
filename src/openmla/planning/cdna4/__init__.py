"""Plans for MLA prefill on CDNA4 (gfx950, MI355X): every number a kernel needs, before any GPU.

Start at `MlaConfigV2`, then ask `MlaPrefillV2(config)`. The rules live beside what they decide:

    config      MhaConfigV2, MlaConfigV2: what a caller chooses
    mma         MhaMmaOp, MlaMmaOp: products, sub-blocks, register tiles, fragment addresses
    core        MlaPrefillV2Core: counts and strides of a block
    prefill     MlaPrefillV2: rings, LDS budget, limits (FP8)
    prefill16   MlaPrefill16: the same for bf16 and fp16
    sparse      MlaSparse16: the sparse latent prefill
    family      what the kernels serve
    layout/     where bytes lie inside a slot
"""

from openmla.planning.cdna4.config import MhaConfigV2, MlaConfigV2
from openmla.planning.cdna4.core import MlaPrefillV2Core
from openmla.planning.cdna4.mma import MhaMmaOp, MlaMmaOp, RegisterTile
from openmla.planning.cdna4.prefill import LANE_REGISTERS, LDS_BYTES, MlaPrefillV2
from openmla.planning.cdna4.prefill16 import MlaPrefill16
from openmla.planning.cdna4.sparse import MlaSparse16

__all__ = [
    "LANE_REGISTERS", "LDS_BYTES", "MhaConfigV2", "MhaMmaOp", "MlaConfigV2", "MlaMmaOp",
    "MlaPrefill16", "MlaPrefillV2", "MlaPrefillV2Core", "MlaSparse16", "RegisterTile",
]  # fmt: skip
