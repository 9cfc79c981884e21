"""The byte map of a dense block's shared memory.

From low to high: Q nope, Q rope, K and V, correction, Q scales, K scales, barriers, the
tensor-memory address. The output tile reuses Q's bytes.

* Separate rings: all K stages (nope and rope together), then all V stages.
* Shared ring: all slots, K and V in turn from the same base, then the rope buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from openmla.planning.blackwell.barriers import Barriers, plan_barriers
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.mla import MLAConfig
from openmla.planning.blackwell.ring import (
    CORRECTION_BYTES,
    packed_slot_bytes,
    q_scale_bytes,
)
from openmla.planning.blackwell.units import MBAR_BYTES, TMEM_ADDR_BYTES, operand_swizzle


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
        """The barriers, by index within their region."""
        return plan_barriers(self.config)

    # Q.

    @property
    def q_byte_offset(self) -> int:
        """Q comes first; the output tile takes its place at the end."""
        return 0

    @property
    def q_nope_bytes(self) -> int:
        """Q without its rope columns."""
        return self.config.q_nope_bytes()

    @property
    def q_rope_byte_offset(self) -> int:
        """Q's rope columns follow."""
        return self.q_byte_offset + self.q_nope_bytes

    @property
    def q_rope_bytes(self) -> int:
        """Q's rope columns."""
        return self.config.q_rope_bytes()

    @property
    def q_bytes(self) -> int:
        """The whole of Q."""
        return self.q_nope_bytes + self.q_rope_bytes

    # K, V and, for a shared ring, K's rope columns.

    @property
    def kv_byte_offset(self) -> int:
        """The first K tile."""
        return self.q_byte_offset + self.q_bytes

    @property
    def k_stage_bytes(self) -> int:
        """From one K tile to the next; in a shared ring, from slot to slot."""
        config = self.config
        if config.packs_rows:
            return packed_slot_bytes(config, config.BN)
        if config.use_fused_kv:
            return max(self._tile_bytes(config.nope_cols_per_cta()), self.v_stage_bytes)
        rope = self.rope_depth * config.k_rows_per_cta() * config.rope_dtype_size
        return self._tile_bytes(config.nope_cols_per_cta()) + rope

    @property
    def v_stage_bytes(self) -> int:
        """One V tile, or one piece of it."""
        return self._tile_bytes(self.config.v_box_cols())

    def _tile_bytes(self, cols: int) -> int:
        return cols * self.config.BN * self.config.qkv_dtype_size

    @property
    def k_total_bytes(self) -> int:
        """All K tiles; in a shared ring, all slots."""
        return self.config.num_kv_stages * self.k_stage_bytes

    @property
    def v_byte_offset(self) -> int:
        """The first V tile: behind K, or the same bytes in a shared ring."""
        shared = self.config.use_fused_kv
        return self.kv_byte_offset + (0 if shared else self.k_total_bytes)

    @property
    def rope_depth(self) -> int:
        """Rope columns of Q and K."""
        return self.config.rope_depth()

    @property
    def rope_stage_elems(self) -> int:
        """Values of one rope buffer."""
        return self.config.BN * self.rope_depth

    @property
    def num_rope_bufs(self) -> int:
        """Rope buffers beside a shared ring."""
        return self.config.num_rope_buffers()

    @property
    def rope_byte_offset(self) -> int:
        """The first rope buffer, behind the slots."""
        return self.kv_byte_offset + self.k_total_bytes

    @property
    def rope_bytes(self) -> int:
        """All rope buffers."""
        return self.num_rope_bufs * self.rope_stage_elems * self.config.rope_dtype_size

    @property
    def kv_bytes(self) -> int:
        """K, V and the rope buffers together."""
        if self.config.use_fused_kv:
            return self.k_total_bytes + self.rope_bytes
        return self.k_total_bytes + self.config.num_kv_stages * self.v_stage_bytes

    # What follows.

    @property
    def correction_byte_offset(self) -> int:
        """The correction factors."""
        return self.kv_byte_offset + self.kv_bytes

    @property
    def correction_bytes(self) -> int:
        """One fp32 per softmax thread."""
        return CORRECTION_BYTES

    @property
    def q_scale_byte_offset(self) -> int:
        """The scales of the query rows."""
        return self.correction_byte_offset + self.correction_bytes

    @property
    def q_scale_bytes(self) -> int:
        """One scale per query row, when there are scales."""
        return q_scale_bytes(self.config)

    @property
    def k_scale_byte_offset(self) -> int:
        """The scales of the keys."""
        return self.q_scale_byte_offset + self.q_scale_bytes

    @property
    def num_k_scale_bufs(self) -> int:
        """Buffers of K scales, one per K tile in flight."""
        return self.config.num_k_scale_bufs()

    @property
    def k_scale_stride_bytes(self) -> int:
        """From one buffer of K scales to the next."""
        return self.config.BN * self.config.scale_dtype_size

    @property
    def k_scale_bytes(self) -> int:
        """All buffers of K scales."""
        return self.num_k_scale_bufs * self.k_scale_stride_bytes

    @property
    def mbar_byte_offset(self) -> int:
        """The first barrier."""
        return self.k_scale_byte_offset + self.k_scale_bytes

    @property
    def mbar_bytes(self) -> int:
        """All barriers."""
        return self.mbars.size * MBAR_BYTES

    @property
    def tmem_addr_byte_offset(self) -> int:
        """Where the tensor-memory allocator writes its address."""
        return self.mbar_byte_offset + self.mbar_bytes

    def smem_size(self) -> int:
        """Bytes the map takes."""
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
