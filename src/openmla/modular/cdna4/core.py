"""MlaPrefillV2Core: counts and strides of one CDNA4 MLA prefill block.

One block is `num_warps` waves; each owns `q_block_size` query rows, and all share K and V. This is
the part that follows from the shape alone; `prefill` adds the rings in LDS.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.arithmetic import Part
from openmla.modular.cdna4.config import MlaConfigV2, given_or_made
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.modular.cdna4.layout.v import STRIP_KEYS
from openmla.modular.cdna4.mma import MlaMmaOp, RegisterTile


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

    Q_BLOCK_SIZE = Part[int]("config.q_block_size")
    """Query rows of a warp."""
    KV_BLOCK = Part[int]("config.kv_block")
    """Keys of a tile."""
    DEPTH = Part[int]("config.depth")
    """Columns of V and the output."""
    NUM_HEADS = Part[int]("config.num_heads")
    NUM_KV_HEADS = Part[int]("config.num_kv_heads")
    NUM_WARPS = Part[int]("config.num_warps")
    D_QK = Part[int]("config.d_qk")
    D_NOPE = Part[int]("config.depth")
    D_ROPE = Part[int]("config.d_rope")
    CACHE_DEPTH = Part[int]("config.cache_depth")
    """Columns of a latent cache row."""
    ROPE_CACHE_OFFSET = Part[int]("config.rope_cache_offset")
    """The first rope column of a cache row."""

    @cached_property
    def NUM_THREADS(self) -> int:
        return self.NUM_WARPS * WAVE

    @cached_property
    def mma(self) -> MlaMmaOp:
        """The products of this block."""
        return MlaMmaOp(self.config.mha())

    @cached_property
    def _KV_ROW_STRIDE_MLA(self) -> int:
        """Elements between two keys in the cache, where all kv heads' rows lie side by side."""
        return self.NUM_KV_HEADS * self.CACHE_DEPTH

    @cached_property
    def _Q_ROW_STRIDE(self) -> int:
        """Elements between two tokens of Q."""
        return self.NUM_HEADS * self.D_QK

    # Products along the columns, and sub-blocks along them.

    @cached_property
    def _NUM_Q_K_TILES(self) -> int:
        return self.D_QK // self.mma.MMA_K

    @cached_property
    def _NUM_K_NOPE_TILES(self) -> int:
        return self.D_NOPE // self.mma.MMA_K

    @cached_property
    def _NUM_K_ROPE_TILES(self) -> int:
        return self.D_ROPE // self.mma.MMA_K

    @cached_property
    def _NUM_BLOCK_COLS_K_NOPE(self) -> int:
        return self.D_NOPE // self.mma.K_SUB_COLS

    @cached_property
    def _NUM_BLOCK_COLS_K_ROPE(self) -> int:
        return self.D_ROPE // self.mma.K_SUB_COLS

    @cached_property
    def _NUM_BLOCK_COLS_K(self) -> int:
        return self._NUM_BLOCK_COLS_K_NOPE + self._NUM_BLOCK_COLS_K_ROPE

    @cached_property
    def _NUM_BLOCK_COLS_V(self) -> int:
        return self.DEPTH // self.mma.V_SUB_COLS

    # A tile as rows of one sub-block's width (64 bytes).

    @cached_property
    def _K_NOPE_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K_NOPE

    @cached_property
    def _K_ROPE_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K_ROPE

    @cached_property
    def _K_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_K

    @cached_property
    def _V_SLOT_ROWS(self) -> int:
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_V

    @cached_property
    def _K_ROPE_SUBBLOCK_OFFSET(self) -> int:
        """Number of the first rope sub-block of a slot."""
        return self.KV_BLOCK // self.mma.K_SUB_ROWS * self._NUM_BLOCK_COLS_K_NOPE

    @cached_property
    def _K_ROPE_TILE_IDX(self) -> int:
        """Where rope starts, in rope-sized steps; 0 if rope is narrower than a sub-block."""
        return self._K_NOPE_SLOT_ROWS // self._K_ROPE_SLOT_ROWS if self._K_ROPE_SLOT_ROWS else 0

    _PV_A_FRAG = Part[int]("mma.PV_A_FRAG_ELTS")

    @cached_property
    def _NUM_PV_SUBTILES(self) -> int:
        """Strips of keys in the second product, as V is read from LDS.

        A strip is 64 keys in fp8, whatever the depth of the product, and MMA_K = 16 in 16 bits.
        """
        return self.KV_BLOCK // (STRIP_KEYS if self.config.is_fp8 else self.mma.MMA_K)

    @cached_property
    def _FP8_KV128_32x64(self) -> bool:
        """Whether this is the shape that the streamed kernel is written for."""
        return self.config.is_fp8 and self.KV_BLOCK >= 128 and not self.mma.FP8_MMA_K_128

    @property
    def _FP32_SOFTMAX_SCORES(self) -> bool:
        """Whether softmax works in place on fp32 scores and packs P once."""
        return self._FP8_KV128_32x64

    @property
    def _CADENCE(self) -> bool:
        """Whether K's fragments are streamed inside the first product rather than held."""
        return self._FP8_KV128_32x64

    @cached_property
    def _SOFTMAX_DTYPE(self) -> str:
        """Large fp8 tiles outside the streamed shape must save registers."""
        large_fp8 = self.config.is_fp8 and self.KV_BLOCK >= 128
        return "float16" if large_fp8 and not self._FP32_SOFTMAX_SCORES else "float32"

    @cached_property
    def prescale_q(self) -> bool:
        """Whether scale·log2(e) is folded into Q: in fp8, rounding the product costs accuracy."""
        return not self.config.is_fp8

    @cached_property
    def Q_LAYOUT_MLA(self) -> RegisterTile:
        """A warp's Q at its full width, nope first."""
        return (self.Q_BLOCK_SIZE // self.mma.MMA_M, self._NUM_Q_K_TILES, self.mma.FRAG_ELTS)

    K_NOPE_LAYOUT = Part[RegisterTile]("mma.K_LAYOUT")

    @cached_property
    def K_ROPE_LAYOUT(self) -> RegisterTile:
        """The rope part of a K tile."""
        return (self.KV_BLOCK // self.mma.MMA_M, self._NUM_K_ROPE_TILES, self.mma.FRAG_ELTS)
