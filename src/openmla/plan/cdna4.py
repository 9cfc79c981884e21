"""Plans for MLA prefill on CDNA4 (gfx950, MI355X): every number a kernel needs, before any GPU.

Start at `MlaConfigV2`, then ask `MlaPrefillV2(config)`. The rules live beside what they decide:

    cdna4_config    MhaConfigV2, MlaConfigV2: what a caller chooses
    cdna4_mma       MhaMmaOp, MlaMmaOp: products, sub-blocks, register tiles, fragment addresses
    cdna4_core      MlaPrefillV2Core: counts and strides of a block
    cdna4_prefill   MlaPrefillV2: rings, LDS budget, limits (FP8)
    cdna4_16bit     MlaPrefill16: the same for bf16 and fp16
    cdna4_sparse    MlaSparse16: the sparse latent prefill

Where bytes lie inside a slot is the business of `openmla.layout.cdna4_lds`.
"""

from openmla.plan.cdna4_16bit import MlaPrefill16
from openmla.plan.cdna4_config import MhaConfigV2, MlaConfigV2
from openmla.plan.cdna4_core import MlaPrefillV2Core
from openmla.plan.cdna4_mma import MhaMmaOp, MlaMmaOp, RegisterTile
from openmla.plan.cdna4_prefill import LDS_BYTES, MlaPrefillV2
from openmla.plan.cdna4_sparse import MlaSparse16

__all__ = [
    "LDS_BYTES",
    "MhaConfigV2",
    "MhaMmaOp",
    "MlaConfigV2",
    "MlaMmaOp",
    "MlaPrefill16",
    "MlaPrefillV2",
    "MlaPrefillV2Core",
    "MlaSparse16",
    "RegisterTile",
]
