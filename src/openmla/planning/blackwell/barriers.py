"""The barriers of a dense block: their order, and the arrivals each waits for."""

from dataclasses import dataclass
from functools import cached_property
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
    S0_consumer_offset: ClassVar[int] = 0

    S1_consumer_offset = cached_property[int](lambda b: b.num_pv_stages)
    C0_offset = cached_property[int](lambda b: b.S1_consumer_offset + b.num_pv_stages)
    C1_offset = cached_property[int](lambda b: b.C0_offset + 2)  # a producer and a consumer each
    order_offset = cached_property[int](lambda b: b.C1_offset + 2)
    S0_producer_offset = cached_property[int](lambda b: b.order_offset + b.num_order_barriers)
    S1_producer_offset = cached_property[int](lambda b: b.S0_producer_offset + 1)
    Q1SyncIdx = cached_property[int](
        lambda b: b.S1_producer_offset + 1
    )  # pieces of the second Q tile
    K_offset = cached_property[int](lambda b: b.Q1SyncIdx + b.Q1Sync_count)  # or of the shared ring
    V_offset = cached_property[int](lambda b: b.K_offset + b.K_barriers)
    O_producer_offset = cached_property[int](lambda b: b.V_offset + b.V_barriers)
    Publish_offset = cached_property[int](lambda b: b.O_producer_offset + 2)
    CrossP_offset = cached_property[int](lambda b: b.Publish_offset + b.Publish_count)
    size = cached_property[int](lambda b: b.CrossP_offset + b.CrossP_count)

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
