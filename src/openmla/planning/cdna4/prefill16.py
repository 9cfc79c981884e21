"""MlaPrefill16: a CDNA4 MLA prefill block for bf16 and fp16.

Values are twice as wide as FP8, so Q does not fit beside the rings. Its fragments go straight to
registers (48 of a lane's 256 at d_qk 192), tiles have 64 keys, and V has no padding:

    K ring   2 × 24576      = 49152     64 keys × (128 nope + 64 rope) × 2 B per slot
    V ring   3 × 16384      = 49152     64 keys × 128 × 2 B
                              98304     of 163840
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openmla.planning.cdna4.core import MlaPrefillV2Core
from openmla.planning.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.planning.cdna4.layout.k import KSlot
from openmla.planning.cdna4.layout.v import DefaultV
from openmla.planning.cdna4.prefill import K_RING_DEPTH, LDS_BYTES

#: A copy is issued one tile ahead while the tile before is still being read.
V_RING_DEPTH = 3
_DTYPES = ("bfloat16", "float16")
#: 32 × 128 fp32 outputs, 32 × 192 queries and 32 × 64 scores are 144 registers of a lane; twice the
#: output's width would not leave room for fragments.
_MOST_DEPTH = 128


@dataclass(frozen=True, init=False)
class MlaPrefill16(MlaPrefillV2Core):
    """The block with its LDS: a ring of K slots and a ring of V slots.

    >>> from openmla.planning.cdna4.config import MlaConfigV2
    >>> block = MlaPrefill16(MlaConfigV2(
    ...     q_block_size=32, kv_block=64, depth=128, num_heads=128, num_kv_heads=128,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512))
    >>> block.BM, block.k_ring_bytes, block.v_ring_bytes, block.smem_used
    (256, 49152, 49152, 98304)
    >>> block.supported()
    True
    """

    @property
    def BM(self) -> int:
        """Query rows of the block."""
        return self.NUM_WARPS * self.Q_BLOCK_SIZE

    @property
    def p_dtype(self) -> str:
        """Type of the weights in the second product: that of V."""
        return self.config.dtype

    @property
    def k_slot(self) -> KSlot:
        """Where the bytes of a K slot lie."""
        config = self.config
        return KSlot(
            config.kv_block, config.depth, config.d_rope, config.element_bytes, config.num_warps
        )

    @property
    def v_slot(self) -> DefaultV:
        """Where the bytes of a V slot lie."""
        return DefaultV(self.KV_BLOCK, self.DEPTH, self.config.element_bytes, self.NUM_THREADS)

    @property
    def _RING_DEPTH(self) -> int:
        return K_RING_DEPTH

    @property
    def _V_RING_DEPTH(self) -> int:
        return V_RING_DEPTH

    @property
    def k_slots(self) -> int:
        """Tiles of K in flight."""
        return self._RING_DEPTH

    @property
    def v_slots(self) -> int:
        """Tiles of V in flight."""
        return self._V_RING_DEPTH

    @property
    def k_ring_bytes(self) -> int:
        """LDS of all K slots."""
        return self._RING_DEPTH * self.KV_BLOCK * self.D_QK * self.config.element_bytes

    @property
    def v_ring_bytes(self) -> int:
        """LDS of all V slots."""
        return self._V_RING_DEPTH * self.KV_BLOCK * self.DEPTH * self.config.element_bytes

    @property
    def smem_used(self) -> int:
        """LDS of the block."""
        return self.k_ring_bytes + self.v_ring_bytes

    @property
    def launch_smem_used(self) -> int:
        """LDS that the compiler asks for."""
        return self.smem_used

    def supported(self) -> bool:
        """Whether the kernel can run this block."""
        return not self.why_unsupported()

    def why_unsupported(self) -> str:
        """The first limit the block breaks, with its arithmetic; empty when supported."""
        return next(self._broken_limits(), "")

    def explain(self) -> list[str]:
        """How the LDS is filled, and whether the block can run."""
        size, used = self.config.element_bytes, self.smem_used
        lines = [
            f"block: {self.NUM_WARPS} waves × {self.Q_BLOCK_SIZE} query rows = {self.BM} rows, "
            f"{self.KV_BLOCK} keys per tile, {self.config.dtype}",
            "Q: in registers",
            f"K ring: {self._RING_DEPTH} slots × {self.KV_BLOCK} keys × ({self.D_NOPE} nope + "
            f"{self.D_ROPE} rope) × {size} B = {self.k_ring_bytes}",
            f"V ring: {self._V_RING_DEPTH} slots × {self.KV_BLOCK} keys × {self.DEPTH} × {size} B "
            f"= {self.v_ring_bytes}",
            f"LDS: {self.k_ring_bytes} + {self.v_ring_bytes} = {used} of {LDS_BYTES}",
        ]
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_limits(self) -> Iterator[str]:
        config = self.config
        if config.dtype not in _DTYPES:
            yield f"dtype {config.dtype}: this block multiplies {' and '.join(_DTYPES)}"
        if self.D_QK != self.D_NOPE + self.D_ROPE:
            total = self.D_NOPE + self.D_ROPE
            yield f"d_qk {self.D_QK} != depth {self.D_NOPE} + d_rope {self.D_ROPE} = {total}"
        if self.DEPTH > _MOST_DEPTH:
            yield f"depth {self.DEPTH} > {_MOST_DEPTH}: a lane's output would not fit its registers"
        for name in ("depth", "d_rope"):
            columns = getattr(config, name)
            pieces = self.KV_BLOCK * columns * config.element_bytes // (WAVE * DMA_BYTES)
            if pieces % self.NUM_WARPS or pieces == 0 or pieces & (pieces - 1):
                yield (
                    f"{name}: {self.KV_BLOCK} keys × {columns} columns are {pieces} copies of "
                    f"{WAVE * DMA_BYTES} bytes, not a power of two that {self.NUM_WARPS} waves "
                    "can share evenly"
                )
        if self.smem_used > LDS_BYTES:
            yield f"LDS: {self.smem_used} > {LDS_BYTES}"
