"""What the dense CDNA4 kernel runs on: a ring of K slots and a ring of V slots in LDS.

A block is `NUM_WARPS` waves. Counts, strides and register tiles are those of the original's block
(`MlaPrefillV2Core`, which this extends); the FP8 block fills the LDS as the original does, the
16-bit block has no original.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import Limited
from openmla.modular.cdna4.core import MlaPrefillV2Core
from openmla.modular.cdna4.layout.k import SUB_ROW_BYTES
from openmla.modular.cdna4.layout.v import VMap

# Before 3.8, copies to LDS take their addresses only in layouts that cannot describe K and V slots.
FIRST_TRITON = (3, 8)
LANE_REGISTERS = 256
"""Of a lane: the 512 threads of a block share the 512 registers of each SIMD's lanes two by two."""


@dataclass(frozen=True, init=False)
class DenseBlock(Limited, MlaPrefillV2Core):
    """What the launcher reads of an FP8 or a 16-bit block."""

    k_slots: ClassVar[int] = 2
    """Tiles of K in flight: one is written while the tile before it is read."""

    @property
    def v_slots(self) -> int:
        """Tiles of V in flight."""
        raise NotImplementedError

    @property
    def v_slot(self) -> VMap:
        """Where the bytes of a V slot lie."""
        raise NotImplementedError

    @property
    def p_dtype(self) -> str:
        """Type of the weights in the second product."""
        raise NotImplementedError

    @property
    def across(self) -> int:
        """Waves that share 32 query rows."""
        return 1

    @property
    def k_widths(self) -> tuple[int, ...]:
        """Columns of the parts of K without rope, each a tensor of its own."""
        return (self.D_NOPE,)

    @property
    def frag_columns(self) -> int:
        """Columns of a fragment of Q and K."""
        return SUB_ROW_BYTES // self.config.element_bytes

    @cached_property
    def BM(self) -> int:
        """Query rows of the block."""
        return self.NUM_WARPS // self.across * self.Q_BLOCK_SIZE

    @property
    def q_bytes(self) -> int:
        """Bytes of a resident Q; 0 where it is in registers."""
        return 0

    @property
    def k_slot_bytes(self) -> int:
        return self._K_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def v_slot_bytes(self) -> int:
        """Padding included."""
        return self._V_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def k_ring_bytes(self) -> int:
        return self.k_slots * self.k_slot_bytes

    @property
    def v_ring_bytes(self) -> int:
        return self.v_slots * self.v_slot_bytes

    @property
    def smem_used(self) -> int:
        """LDS that the plan asks for."""
        return self.q_bytes + self.k_ring_bytes + self.v_ring_bytes

    @property
    def launch_smem_used(self) -> int:
        """LDS that the compiler asks for."""
        return self.smem_used

    def explain(self) -> list[str]:
        """How the LDS is filled, and whether the block can run."""
        raise NotImplementedError
