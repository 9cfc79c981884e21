"""The barriers of a dense block: their order, and the arrivals each waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.ring import CROSS_P_BARRIERS, RING_BARRIERS
from openmla.planning.blackwell.units import WARPGROUP


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

    @property
    def S0_consumer_offset(self) -> int:
        """First of the barriers that free score tile 0."""
        return 0

    @property
    def S1_consumer_offset(self) -> int:
        """First of the barriers that free score tile 1."""
        return self.num_pv_stages

    @property
    def C0_offset(self) -> int:
        """Producer and consumer of correction 0."""
        return self.S1_consumer_offset + self.num_pv_stages

    @property
    def C1_offset(self) -> int:
        """Producer and consumer of correction 1."""
        return self.C0_offset + 2

    @property
    def order_offset(self) -> int:
        """Where ordering barriers would be."""
        return self.C1_offset + 2

    @property
    def S0_producer_offset(self) -> int:
        """The MMA finished score tile 0."""
        return self.order_offset + self.num_order_barriers

    @property
    def S1_producer_offset(self) -> int:
        """The MMA finished score tile 1."""
        return self.S0_producer_offset + 1

    @property
    def Q1SyncIdx(self) -> int:
        """The pieces of the second query tile arrived."""
        return self.S1_producer_offset + 1

    @property
    def K_offset(self) -> int:
        """First barrier of K's ring, or of the shared ring."""
        return self.Q1SyncIdx + self.Q1Sync_count

    @property
    def V_offset(self) -> int:
        """First barrier of V's ring."""
        return self.K_offset + self.K_barriers

    @property
    def O_producer_offset(self) -> int:
        """The MMA finished an output tile; two of them."""
        return self.V_offset + self.V_barriers

    @property
    def Publish_offset(self) -> int:
        """Where publishing barriers would be."""
        return self.O_producer_offset + 2

    @property
    def CrossP_offset(self) -> int:
        """First of the cross-stage barriers."""
        return self.Publish_offset + self.Publish_count

    @property
    def size(self) -> int:
        """Barriers in all."""
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
