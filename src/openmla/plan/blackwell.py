"""Plans for dense attention on Blackwell: every number a kernel needs, before any GPU is touched.

Start at `select_mla_prefill_config`. The rules live beside what they decide:

    blackwell_units    what a B200 offers
    blackwell_tile     BN and the tensor-memory columns
    blackwell_ring     how many K/V tiles shared memory holds
    blackwell_fa4      FA4Config: one attention block
    blackwell_mla      MLAConfig: one MLA prefill block, 1Q or 2Q, and the choice between variants
    blackwell_barriers the barriers and their arrivals
    blackwell_smem     the byte map of shared memory
    blackwell_masks    which key tiles a query tile visits
"""

from openmla.plan.blackwell_barriers import Barriers
from openmla.plan.blackwell_fa4 import FA4Config
from openmla.plan.blackwell_masks import CausalMask, KeyTiles, NullMask
from openmla.plan.blackwell_mla import MLAConfig, select_mla_prefill_config
from openmla.plan.blackwell_smem import SM100AttentionSMem
from openmla.plan.blackwell_units import Swizzle

__all__ = [
    "Barriers",
    "CausalMask",
    "FA4Config",
    "KeyTiles",
    "MLAConfig",
    "NullMask",
    "SM100AttentionSMem",
    "Swizzle",
    "select_mla_prefill_config",
]
