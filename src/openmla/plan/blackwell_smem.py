"""The byte map of a dense block's shared memory, and its barriers.

From low to high: Q nope, Q rope, K and V, correction, Q scales, K scales, barriers, the
tensor-memory address. The output tile reuses Q's bytes.

* Separate rings: all K stages (nope and rope together), then all V stages.
* Shared ring: all slots, K and V in turn from the same base, then the rope buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.plan.blackwell_fa4 import FA4Config
from openmla.plan.blackwell_mla import MLAConfig
from openmla.plan.blackwell_ring import (
    CORRECTION_BYTES,
    CROSS_P_BARRIERS,
    RING_BARRIERS,
    packed_slot_bytes,
    q_scale_bytes,
)
from openmla.plan.blackwell_units import (
    MBAR_BYTES,
    TMEM_ADDR_BYTES,
    WARPGROUP,
    operand_swizzle,
)


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
        return 0

    @property
    def S1_consumer_offset(self) -> int:
        return self.num_pv_stages

    @property
    def C0_offset(self) -> int:
        return self.S1_consumer_offset + self.num_pv_stages

    @property
    def C1_offset(self) -> int:
        return self.C0_offset + 2

    @property
    def order_offset(self) -> int:
        return self.C1_offset + 2

    @property
    def S0_producer_offset(self) -> int:
        return self.order_offset + self.num_order_barriers

    @property
    def S1_producer_offset(self) -> int:
        return self.S0_producer_offset + 1

    @property
    def Q1SyncIdx(self) -> int:
        return self.S1_producer_offset + 1

    @property
    def K_offset(self) -> int:
        return self.Q1SyncIdx + self.Q1Sync_count

    @property
    def V_offset(self) -> int:
        return self.K_offset + self.K_barriers

    @property
    def O_producer_offset(self) -> int:
        return self.V_offset + self.V_barriers

    @property
    def Publish_offset(self) -> int:
        return self.O_producer_offset + 2

    @property
    def CrossP_offset(self) -> int:
        return self.Publish_offset + self.Publish_count

    @property
    def size(self) -> int:
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


@dataclass(frozen=True)
class SM100AttentionSMem:
    """Where everything lies in the shared memory of one block, in bytes.

    >>> mla = MLAConfig(
    ...     qkv_dtype="bfloat16", rope_gmem_dtype="bfloat16", rope_mma_dtype="bfloat16",
    ...     num_q_heads=128, group=128, depth=192, page_size=128,
    ... )
    >>> smem = SM100AttentionSMem(mla.fa4_config)
    >>> smem.kv_byte_offset, smem.rope_byte_offset, smem.mbar_byte_offset, smem.smem_size()
    (98304, 196608, 230400, 230556)

    ``smem_size()`` is what the map takes; the plan may have reserved more (``config_smem_used``):
    a plan with one accumulator reserves the wider of K and V for both.
    """

    config: FA4Config

    @classmethod
    def for_mla(
        cls,
        *,
        qkv_dtype: str,
        rope_gmem_dtype: str,
        rope_mma_dtype: str,
        scale_dtype: str | None = None,
        num_q_heads: int,
        depth: int,
        page_size: int,
        v_depth: int = -1,
        num_q: int = 2,
        single_o: bool = False,
        bn_cap: int = 0,
    ) -> SM100AttentionSMem:
        """The map of an MLA prefill block; all query heads share one latent head."""
        mla = MLAConfig(
            qkv_dtype=qkv_dtype,
            rope_gmem_dtype=rope_gmem_dtype,
            rope_mma_dtype=rope_mma_dtype,
            scale_dtype=scale_dtype,
            num_q_heads=num_q_heads,
            group=num_q_heads,
            depth=depth,
            page_size=page_size,
            v_depth=v_depth,
            num_qo=num_q,
            single_o=single_o,
            bn_cap=bn_cap,
        )
        return cls(mla.fa4_config)

    @classmethod
    def for_mha(
        cls, *, qkv_dtype: str, depth: int, page_size: int, BM: int = 256, pair_cta: bool = False
    ) -> SM100AttentionSMem:
        """The map of a plain attention block. Head counts do not enter it."""
        config = FA4Config(
            qkv_dtype=qkv_dtype,
            num_q_heads=1,
            group=1,
            qk_depth=depth,
            ov_depth=depth,
            swizzle_mode=operand_swizzle(qkv_dtype),
            page_size=page_size,
            is_mla=False,
            pair_cta=pair_cta,
            BM=BM,
            cross_stage_p=True,
        )
        return cls(config)

    @cached_property
    def mbars(self) -> Barriers:
        return plan_barriers(self.config)

    # Q.

    @property
    def q_byte_offset(self) -> int:
        return 0

    @property
    def q_nope_bytes(self) -> int:
        return self.config.q_nope_bytes()

    @property
    def q_rope_byte_offset(self) -> int:
        return self.q_byte_offset + self.q_nope_bytes

    @property
    def q_rope_bytes(self) -> int:
        return self.config.q_rope_bytes()

    @property
    def q_bytes(self) -> int:
        return self.q_nope_bytes + self.q_rope_bytes

    # K, V and, for a shared ring, K's rope columns.

    @property
    def kv_byte_offset(self) -> int:
        return self.q_byte_offset + self.q_bytes

    @property
    def k_stage_bytes(self) -> int:
        config = self.config
        if config.packs_rows:
            return packed_slot_bytes(config, config.BN)
        if config.use_fused_kv:
            return max(self._tile_bytes(config.nope_cols_per_cta()), self.v_stage_bytes)
        rope = self.rope_depth * config.k_rows_per_cta() * config.rope_dtype_size
        return self._tile_bytes(config.nope_cols_per_cta()) + rope

    @property
    def v_stage_bytes(self) -> int:
        return self._tile_bytes(self.config.v_box_cols())

    def _tile_bytes(self, cols: int) -> int:
        return cols * self.config.BN * self.config.qkv_dtype_size

    @property
    def k_total_bytes(self) -> int:
        return self.config.num_kv_stages * self.k_stage_bytes

    @property
    def v_byte_offset(self) -> int:
        shared = self.config.use_fused_kv
        return self.kv_byte_offset + (0 if shared else self.k_total_bytes)

    @property
    def rope_depth(self) -> int:
        return self.config.rope_depth()

    @property
    def rope_stage_elems(self) -> int:
        return self.config.BN * self.rope_depth

    @property
    def num_rope_bufs(self) -> int:
        return self.config.num_rope_buffers()

    @property
    def rope_byte_offset(self) -> int:
        return self.kv_byte_offset + self.k_total_bytes

    @property
    def rope_bytes(self) -> int:
        return self.num_rope_bufs * self.rope_stage_elems * self.config.rope_dtype_size

    @property
    def kv_bytes(self) -> int:
        if self.config.use_fused_kv:
            return self.k_total_bytes + self.rope_bytes
        return self.k_total_bytes + self.config.num_kv_stages * self.v_stage_bytes

    # What follows.

    @property
    def correction_byte_offset(self) -> int:
        return self.kv_byte_offset + self.kv_bytes

    @property
    def correction_bytes(self) -> int:
        return CORRECTION_BYTES

    @property
    def q_scale_byte_offset(self) -> int:
        return self.correction_byte_offset + self.correction_bytes

    @property
    def q_scale_bytes(self) -> int:
        return q_scale_bytes(self.config)

    @property
    def k_scale_byte_offset(self) -> int:
        return self.q_scale_byte_offset + self.q_scale_bytes

    @property
    def num_k_scale_bufs(self) -> int:
        return self.config.num_k_scale_bufs()

    @property
    def k_scale_stride_bytes(self) -> int:
        return self.config.BN * self.config.scale_dtype_size

    @property
    def k_scale_bytes(self) -> int:
        return self.num_k_scale_bufs * self.k_scale_stride_bytes

    @property
    def mbar_byte_offset(self) -> int:
        return self.k_scale_byte_offset + self.k_scale_bytes

    @property
    def mbar_bytes(self) -> int:
        return self.mbars.size * MBAR_BYTES

    @property
    def tmem_addr_byte_offset(self) -> int:
        return self.mbar_byte_offset + self.mbar_bytes

    def smem_size(self) -> int:
        return self.tmem_addr_byte_offset + TMEM_ADDR_BYTES

    @property
    def config_smem_used(self) -> int:
        """What the plan reserved; never less than the map takes."""
        return self.config.smem_used

    def explain(self) -> list[str]:
        """One line per region: where it starts and how many bytes it takes."""
        regions = (
            ("Q nope", self.q_byte_offset, self.q_nope_bytes),
            ("Q rope", self.q_rope_byte_offset, self.q_rope_bytes),
            ("K and V", self.kv_byte_offset, self.kv_bytes),
            ("correction", self.correction_byte_offset, self.correction_bytes),
            ("Q scales", self.q_scale_byte_offset, self.q_scale_bytes),
            ("K scales", self.k_scale_byte_offset, self.k_scale_bytes),
            ("barriers", self.mbar_byte_offset, self.mbar_bytes),
            ("TMEM address", self.tmem_addr_byte_offset, TMEM_ADDR_BYTES),
        )
        lines = [f"{at:>7}  {name}: {size} bytes" for name, at, size in regions if size]
        return [*lines, f"{self.smem_size():>7}  end; the plan reserves {self.config_smem_used}"]
