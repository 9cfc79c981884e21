"""The byte map of a dense block's shared memory, as the original kernel has it.

From low to high: Q nope, Q rope, K and V, correction, Q scales, K scales, barriers, the
tensor-memory address. The output tile reuses Q's bytes.

* Separate rings: all K stages (nope and rope together), then all V stages.
* Shared ring: all slots, K and V in turn from the same base, then the rope buffers.

What our kernel allocates for the same plan is in kernels/blackwell/dense/resources.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Part
from openmla.modular.blackwell.barriers import Barriers, plan_barriers
from openmla.modular.blackwell.fa4 import FA4Config
from openmla.modular.blackwell.mla import MLAConfig
from openmla.modular.blackwell.ring import CORRECTION_BYTES, packed_slot_bytes, q_scale_bytes
from openmla.modular.blackwell.units import MBAR_BYTES, TMEM_ADDR_BYTES, operand_swizzle


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

    @cached_property
    def q_nope_bytes(self) -> int:
        return self.config.q_nope_bytes()

    @cached_property
    def q_rope_bytes(self) -> int:
        return self.config.q_rope_bytes()

    @property
    def q_rope_byte_offset(self) -> int:
        return self.q_nope_bytes

    @cached_property
    def q_bytes(self) -> int:
        return self.q_nope_bytes + self.q_rope_bytes

    @property
    def kv_byte_offset(self) -> int:
        """Where the first K tile lies."""
        return self.q_bytes

    @cached_property
    def v_stage_bytes(self) -> int:
        return self._tile_bytes(self.config.v_box_cols())

    @cached_property
    def k_total_bytes(self) -> int:
        """All K tiles; in a shared ring, all slots."""
        return self.config.num_kv_stages * self.k_stage_bytes

    @cached_property
    def v_byte_offset(self) -> int:
        return self.kv_byte_offset + (0 if self.config.use_fused_kv else self.k_total_bytes)

    @cached_property
    def rope_depth(self) -> int:
        return self.config.rope_depth()

    @cached_property
    def rope_stage_elems(self) -> int:
        return self.config.BN * self.rope_depth

    @cached_property
    def num_rope_bufs(self) -> int:
        return self.config.num_rope_buffers()

    @cached_property
    def rope_byte_offset(self) -> int:
        return self.kv_byte_offset + self.k_total_bytes

    @cached_property
    def rope_bytes(self) -> int:
        return self.num_rope_bufs * self.rope_stage_elems * self.config.rope_dtype_size

    @cached_property
    def correction_byte_offset(self) -> int:
        return self.kv_byte_offset + self.kv_bytes

    @cached_property
    def q_scale_byte_offset(self) -> int:
        return self.correction_byte_offset + self.correction_bytes

    @cached_property
    def q_scale_bytes(self) -> int:
        return q_scale_bytes(self.config)

    @cached_property
    def k_scale_byte_offset(self) -> int:
        return self.q_scale_byte_offset + self.q_scale_bytes

    @cached_property
    def num_k_scale_bufs(self) -> int:
        return self.config.num_k_scale_bufs()

    @cached_property
    def k_scale_stride_bytes(self) -> int:
        return self.config.BN * self.config.scale_dtype_size

    @cached_property
    def k_scale_bytes(self) -> int:
        return self.num_k_scale_bufs * self.k_scale_stride_bytes

    @cached_property
    def mbar_byte_offset(self) -> int:
        return self.k_scale_byte_offset + self.k_scale_bytes

    @cached_property
    def mbar_bytes(self) -> int:
        return self.mbars.size * MBAR_BYTES

    @cached_property
    def tmem_addr_byte_offset(self) -> int:
        return self.mbar_byte_offset + self.mbar_bytes

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
