"""MlaPrefillV2Core: counts and strides of one CDNA4 MLA prefill block.

One block is `num_warps` waves; each owns `q_block_size` query rows, and all share K and V. This is
the part that follows from the shape alone; `prefill` adds the rings in LDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.planning.cdna4.config import MlaConfigV2, given_or_made
from openmla.planning.cdna4.layout.dma import WAVE
from openmla.planning.cdna4.layout.v import STRIP_KEYS
from openmla.planning.cdna4.mma import MlaMmaOp, RegisterTile


@dataclass(frozen=True, init=False)
class MlaPrefillV2Core:
    """Counts and strides of one MLA block.

    >>> core = MlaPrefillV2Core(MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=1,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn"))
    >>> core._K_SLOT_ROWS, core._V_SLOT_ROWS             # rows of 64 bytes
    (384, 256)
    """

    config: MlaConfigV2

    def __init__(self, config: MlaConfigV2 | None = None, **shape: Any) -> None:
        """From a config, or from the fields of one."""
        object.__setattr__(self, "config", given_or_made(config, shape))

    @property
    def mma(self) -> MlaMmaOp:
        """The products of this block."""
        return MlaMmaOp(self.config.mha())

    @property
    def Q_BLOCK_SIZE(self) -> int:
        """Query rows per warp."""
        return self.config.q_block_size

    @property
    def KV_BLOCK(self) -> int:
        """Keys per tile."""
        return self.config.kv_block

    @property
    def DEPTH(self) -> int:
        """Depth of V and the output."""
        return self.config.depth

    @property
    def NUM_HEADS(self) -> int:
        """Query heads."""
        return self.config.num_heads

    @property
    def NUM_KV_HEADS(self) -> int:
        """Heads of K and V."""
        return self.config.num_kv_heads

    @property
    def NUM_WARPS(self) -> int:
        """Waves per block."""
        return self.config.num_warps

    @property
    def NUM_THREADS(self) -> int:
        """Threads per block."""
        return self.NUM_WARPS * WAVE

    @property
    def D_QK(self) -> int:
        """Depth of Q and K."""
        return self.config.d_qk

    @property
    def D_NOPE(self) -> int:
        """Depth without rope."""
        return self.config.d_nope()

    @property
    def D_ROPE(self) -> int:
        """Depth of rope."""
        return self.config.d_rope

    @property
    def CACHE_DEPTH(self) -> int:
        """Width of a latent cache row."""
        return self.config.cache_depth

    @property
    def ROPE_CACHE_OFFSET(self) -> int:
        """First rope column of a cache row."""
        return self.config.rope_cache_offset

    @property
    def _NUM_Q_K_TILES(self) -> int:
        return self.D_QK // self.mma.MMA_K

    @property
    def _NUM_K_NOPE_TILES(self) -> int:
        return self.D_NOPE // self.mma.MMA_K

    @property
    def _NUM_K_ROPE_TILES(self) -> int:
        return self.D_ROPE // self.mma.MMA_K

    @property
    def _KV_ROW_STRIDE_MLA(self) -> int:
        """Elements between two keys in the cache: all kv heads' rows lie side by side."""
        return self.NUM_KV_HEADS * self.CACHE_DEPTH

    @property
    def _Q_ROW_STRIDE(self) -> int:
        """Elements between two tokens of Q."""
        return self.NUM_HEADS * self.D_QK

    @property
    def _NUM_BLOCK_COLS_K_NOPE(self) -> int:
        return self.D_NOPE // self.mma.K_SUB_COLS

    @property
    def _NUM_BLOCK_COLS_K_ROPE(self) -> int:
        return self.D_ROPE // self.mma.K_SUB_COLS

    @property
    def _NUM_BLOCK_COLS_K(self) -> int:
        return self._NUM_BLOCK_COLS_K_NOPE + self._NUM_BLOCK_COLS_K_ROPE

    @property
    def _NUM_BLOCK_COLS_V(self) -> int:
        return self.DEPTH // self.mma.V_SUB_COLS

    @property
    def _K_NOPE_SLOT_ROWS(self) -> int:
        """A tile's nope part as rows of one sub-block's width (64 bytes)."""
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K_NOPE

    @property
    def _K_ROPE_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K_ROPE

    @property
    def _K_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K

    @property
    def _V_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_V

    @property
    def _K_ROPE_SUBBLOCK_OFFSET(self) -> int:
        """Number of the first rope sub-block of a slot."""
        return self.KV_BLOCK // self.mma.K_SUB_ROWS * self._NUM_BLOCK_COLS_K_NOPE

    @property
    def _K_ROPE_TILE_IDX(self) -> int:
        """Where rope starts, in rope-sized steps; 0 if rope is narrower than a sub-block."""
        rope = self._K_ROPE_SLOT_ROWS
        return self._K_NOPE_SLOT_ROWS // rope if rope else 0

    @property
    def _PV_A_FRAG(self) -> int:
        return self.mma.PV_A_FRAG_ELTS

    @property
    def _NUM_PV_SUBTILES(self) -> int:
        """Strips of keys in the second product, as V is read from LDS: 64 keys in fp8, whatever
        the depth of the product; MMA_K = 16 keys in 16 bits."""
        return self.KV_BLOCK // (STRIP_KEYS if self.config.is_fp8 else self.mma.MMA_K)

    @property
    def _FP8_KV128_32x64(self) -> bool:
        """The shape the streamed kernel is written for."""
        return self.config.is_fp8 and self.KV_BLOCK >= 128 and not self.mma.FP8_MMA_K_128

    @property
    def _FP32_SOFTMAX_SCORES(self) -> bool:
        """Softmax works in place on the fp32 scores and packs P to fp8 once."""
        return self._FP8_KV128_32x64

    @property
    def _CADENCE(self) -> bool:
        """K fragments are streamed inside the first product rather than held."""
        return self._FP8_KV128_32x64

    @property
    def _SOFTMAX_DTYPE(self) -> str:
        """fp32, except that large fp8 tiles outside the streamed shape must save registers."""
        large_fp8 = self.config.is_fp8 and self.KV_BLOCK >= 128
        return "float16" if large_fp8 and not self._FP32_SOFTMAX_SCORES else "float32"

    @property
    def prescale_q(self) -> bool:
        """Fold scale·log2(e) into Q. Not for fp8: rounding the product would cost accuracy."""
        return not self.config.is_fp8

    @property
    def Q_LAYOUT_MLA(self) -> RegisterTile:
        """A warp's Q at its full width, nope tiles first."""
        return self.Q_BLOCK_SIZE // self.mma.MMA_M, self._NUM_Q_K_TILES, self.mma.FRAG_ELTS

    @property
    def K_NOPE_LAYOUT(self) -> RegisterTile:
        """The nope part of a K tile."""
        return self.mma.K_LAYOUT

    @property
    def K_ROPE_LAYOUT(self) -> RegisterTile:
        """The rope part of a K tile."""
        return self.KV_BLOCK // self.mma.MMA_M, self._NUM_K_ROPE_TILES, self.mma.FRAG_ELTS
