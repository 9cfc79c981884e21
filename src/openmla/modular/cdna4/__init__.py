"""MlaConfigV2 and MlaMmaOp: the original's plan for MLA prefill on CDNA4 (gfx950, MI355X).

Start at `MlaConfigV2`, then ask `MlaPrefillV2(config)`. The rules live beside what they decide:

    config      MhaConfigV2, MlaConfigV2: what a caller chooses
    mma         MhaMmaOp, MlaMmaOp: products, sub-blocks, register tiles, fragment addresses
    core        MlaPrefillV2Core: counts and strides of a block
    prefill     MlaPrefillV2: rings, LDS budget, limits (FP8)
    layout/     where bytes lie inside a slot
"""

from openmla.modular.cdna4.config import MhaConfigV2, MlaConfigV2
from openmla.modular.cdna4.core import MlaPrefillV2Core
from openmla.modular.cdna4.mma import MhaMmaOp, MlaMmaOp, RegisterTile
from openmla.modular.cdna4.prefill import LDS_BYTES, MlaPrefillV2

__all__ = [
    "LDS_BYTES",
    "MhaConfigV2",
    "MhaMmaOp",
    "MlaConfigV2",
    "MlaMmaOp",
    "MlaPrefillV2",
    "MlaPrefillV2Core",
    "RegisterTile",
]
