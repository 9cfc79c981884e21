"""The barriers of a dense block: their order, and the arrivals each waits for."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.modular.blackwell.fa4 import FA4Config
from openmla.modular.blackwell.ring import CROSS_P_BARRIERS, RING_BARRIERS
from openmla.modular.blackwell.units import WARPGROUP


@dataclass(frozen=True)
class Barriers:
    """The barriers in order: index of the first of each kind, and the arrivals each expects.

    S0 and S1 are the two score tiles, C0 and C1 their correction factors. A consumer barrier of
    a score tile is arrived at by its softmax group, and the first of each by the correction
    group too, 256 threads; in a CTA pair by both CTAs. TMA and MMA arrive once.
    """

    num_pv_stages: int
    Q1Sync_count: int
    K_barriers: int
    V_barriers: int
    CrossP_count: int
    pair_cta: bool

    num_order_barriers: ClassVar[int] = 0  # forced ordering between the softmax groups is not built
    Publish_count: ClassVar[int] = 0  # only a split-key kernel publishes partial results
    S0_consumer_offset: ClassVar[int] = 0

    @property
    def S1_consumer_offset(self) -> int:
        return self.num_pv_stages

    @cached_property
    def C0_offset(self) -> int:
        return self.S1_consumer_offset + self.num_pv_stages

    @cached_property
    def C1_offset(self) -> int:
        """C0 has a barrier of its producer and one of its consumer; so has C1."""
        return self.C0_offset + 2

    @cached_property
    def order_offset(self) -> int:
        return self.C1_offset + 2

    @cached_property
    def S0_producer_offset(self) -> int:
        return self.order_offset + self.num_order_barriers

    @cached_property
    def S1_producer_offset(self) -> int:
        return self.S0_producer_offset + 1

    @cached_property
    def Q1SyncIdx(self) -> int:
        """The first barrier of the second Q tile: one for each piece that arrives."""
        return self.S1_producer_offset + 1

    @cached_property
    def K_offset(self) -> int:
        """The K ring, or the ring that K and V share."""
        return self.Q1SyncIdx + self.Q1Sync_count

    @cached_property
    def V_offset(self) -> int:
        return self.K_offset + self.K_barriers

    @cached_property
    def O_producer_offset(self) -> int:
        return self.V_offset + self.V_barriers

    @cached_property
    def Publish_offset(self) -> int:
        return self.O_producer_offset + 2

    @cached_property
    def CrossP_offset(self) -> int:
        return self.Publish_offset + self.Publish_count

    @cached_property
    def size(self) -> int:
        """How many barriers there are."""
        return self.CrossP_offset + self.CrossP_count

    @property
    def init_counts(self) -> list[int]:
        """Arrivals that complete each barrier, in order."""
        ctas = 2 if self.pair_cta else 1
        score = [2 * WARPGROUP * ctas] + [WARPGROUP * ctas] * (self.num_pv_stages - 1)
        correction = [WARPGROUP] * 4
        single = [1] * (self.Publish_offset - self.S0_producer_offset)
        return score + score + correction + single + [WARPGROUP] * self.CrossP_count


def plan_barriers(config: FA4Config) -> Barriers:
    """The barriers of a plan; the K ring signals each piece, a ring of pieces has one pair each."""
    pieces = 1 if config.packs_rows else config.num_qk_stages
    ring = RING_BARRIERS * config.num_kv_stages
    return Barriers(
        num_pv_stages=config.num_pv_stages,
        Q1Sync_count=config.num_qk_stages if config.num_qo == 2 else 0,
        K_barriers=ring * pieces,
        V_barriers=0 if config.use_fused_kv else ring,
        CrossP_count=CROSS_P_BARRIERS if config.ring.cross_p else 0,
        pair_cta=config.pair_cta,
    )
