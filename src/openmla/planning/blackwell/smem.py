"""The byte map of a dense block's shared memory, as the original kernel has it.

From low to high: Q nope, Q rope, K and V, correction, Q scales, K scales, barriers, the
tensor-memory address. The output tile reuses Q's bytes.

* Separate rings: all K stages (nope and rope together), then all V stages.
* Shared ring: all slots, K and V in turn from the same base, then the rope buffers.

What our kernel allocates for the same plan is in kernel.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from openmla.planning.arithmetic import Part
from openmla.planning.blackwell.barriers import Barriers, plan_barriers
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.mla import MLAConfig
from openmla.planning.blackwell.ring import CORRECTION_BYTES, packed_slot_bytes, q_scale_bytes
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

    q_byte_offset: ClassVar[int] = 0  # Q comes first; the output tile takes its place at the end
    correction_bytes: ClassVar[int] = CORRECTION_BYTES  # one fp32 per softmax thread

    q_nope_bytes = cached_property[int](lambda m: m.config.q_nope_bytes())
    q_rope_bytes = cached_property[int](lambda m: m.config.q_rope_bytes())
    q_rope_byte_offset = cached_property[int](lambda m: m.q_nope_bytes)
    q_bytes = cached_property[int](lambda m: m.q_nope_bytes + m.q_rope_bytes)

    kv_byte_offset = cached_property[int](lambda m: m.q_bytes)  # the first K tile
    v_stage_bytes = cached_property[int](lambda m: m._tile_bytes(m.config.v_box_cols()))
    k_total_bytes = cached_property[int](
        lambda m: m.config.num_kv_stages * m.k_stage_bytes
    )  # or all slots
    v_byte_offset = cached_property[int](
        lambda m: m.kv_byte_offset + (0 if m.config.use_fused_kv else m.k_total_bytes)
    )
    rope_depth = cached_property[int](lambda m: m.config.rope_depth())
    rope_stage_elems = cached_property[int](lambda m: m.config.BN * m.rope_depth)
    num_rope_bufs = cached_property[int](lambda m: m.config.num_rope_buffers())
    rope_byte_offset = cached_property[int](lambda m: m.kv_byte_offset + m.k_total_bytes)
    rope_bytes = cached_property[int](
        lambda m: m.num_rope_bufs * m.rope_stage_elems * m.config.rope_dtype_size
    )

    correction_byte_offset = cached_property[int](lambda m: m.kv_byte_offset + m.kv_bytes)
    q_scale_byte_offset = cached_property[int](
        lambda m: m.correction_byte_offset + m.correction_bytes
    )
    q_scale_bytes = cached_property[int](lambda m: q_scale_bytes(m.config))
    k_scale_byte_offset = cached_property[int](lambda m: m.q_scale_byte_offset + m.q_scale_bytes)
    num_k_scale_bufs = cached_property[int](lambda m: m.config.num_k_scale_bufs())
    k_scale_stride_bytes = cached_property[int](lambda m: m.config.BN * m.config.scale_dtype_size)
    k_scale_bytes = cached_property[int](lambda m: m.num_k_scale_bufs * m.k_scale_stride_bytes)
    mbar_byte_offset = cached_property[int](lambda m: m.k_scale_byte_offset + m.k_scale_bytes)
    mbar_bytes = cached_property[int](lambda m: m.mbars.size * MBAR_BYTES)
    tmem_addr_byte_offset = cached_property[int](lambda m: m.mbar_byte_offset + m.mbar_bytes)
    config_smem_used = Part[int]("config.smem_used")

    @classmethod
    def for_mla(cls, *, num_q_heads: int, num_q: int = 2, **more: Any) -> SM100AttentionSMem:
        """The map of an MLAConfig of these arguments; all query heads share one latent head."""
        mla = MLAConfig(num_q_heads=num_q_heads, group=num_q_heads, num_qo=num_q, **more)
        return cls(mla.fa4_config)

    @classmethod
    def for_mha(
        cls, *, qkv_dtype: str, depth: int, page_size: int, BM: int = 256, pair_cta: bool = False
    ) -> SM100AttentionSMem:
        """The map of a plain attention block. Head counts do not enter it."""
        config = FA4Config(
            qkv_dtype=qkv_dtype, num_q_heads=1, group=1, qk_depth=depth, ov_depth=depth,
            swizzle_mode=operand_swizzle(qkv_dtype), page_size=page_size, is_mla=False,
            pair_cta=pair_cta, BM=BM, cross_stage_p=True,
        )  # fmt: skip
        return cls(config)

    @cached_property
    def mbars(self) -> Barriers:
        """The barriers, by index within their region."""
        return plan_barriers(self.config)

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

    def _tile_bytes(self, cols: int) -> int:
        return cols * self.config.BN * self.config.qkv_dtype_size

    @property
    def kv_bytes(self) -> int:
        """K, V and the rope buffers together."""
        if self.config.use_fused_kv:
            return self.k_total_bytes + self.rope_bytes
        return self.k_total_bytes + self.config.num_kv_stages * self.v_stage_bytes

    def smem_size(self) -> int:
        """Bytes the map takes."""
        return self.tmem_addr_byte_offset + TMEM_ADDR_BYTES
