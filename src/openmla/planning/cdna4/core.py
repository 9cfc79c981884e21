"""MlaPrefillV2Core: counts and strides of one CDNA4 MLA prefill block.

One block is `num_warps` waves; each owns `q_block_size` query rows, and all share K and V. This is
the part that follows from the shape alone; `prefill` adds the rings in LDS.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.planning.arithmetic import Part
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

    @cached_property
    def mma(self) -> MlaMmaOp:
        """The products of this block."""
        return MlaMmaOp(self.config.mha())

    Q_BLOCK_SIZE = Part[int]("config.q_block_size")  # query rows per warp
    KV_BLOCK = Part[int]("config.kv_block")  # keys per tile
    DEPTH = Part[int]("config.depth")  # of V and the output
    NUM_HEADS = Part[int]("config.num_heads")
    NUM_KV_HEADS = Part[int]("config.num_kv_heads")
    NUM_WARPS = Part[int]("config.num_warps")  # waves per block
    NUM_THREADS = cached_property[int](lambda b: b.NUM_WARPS * WAVE)
    D_QK = Part[int]("config.d_qk")
    D_NOPE = Part[int]("config.depth")
    D_ROPE = Part[int]("config.d_rope")
    CACHE_DEPTH = Part[int]("config.cache_depth")  # width of a latent cache row
    ROPE_CACHE_OFFSET = Part[int]("config.rope_cache_offset")  # first rope column of a cache row

    # Elements between two keys in the cache, where all kv heads' rows lie side by side, and
    # between two tokens of Q.
    _KV_ROW_STRIDE_MLA = cached_property[int](lambda b: b.NUM_KV_HEADS * b.CACHE_DEPTH)
    _Q_ROW_STRIDE = cached_property[int](lambda b: b.NUM_HEADS * b.D_QK)

    # Products along the columns, and sub-blocks along them.
    _NUM_Q_K_TILES = cached_property[int](lambda b: b.D_QK // b.mma.MMA_K)
    _NUM_K_NOPE_TILES = cached_property[int](lambda b: b.D_NOPE // b.mma.MMA_K)
    _NUM_K_ROPE_TILES = cached_property[int](lambda b: b.D_ROPE // b.mma.MMA_K)
    _NUM_BLOCK_COLS_K_NOPE = cached_property[int](lambda b: b.D_NOPE // b.mma.K_SUB_COLS)
    _NUM_BLOCK_COLS_K_ROPE = cached_property[int](lambda b: b.D_ROPE // b.mma.K_SUB_COLS)
    _NUM_BLOCK_COLS_K = cached_property[int](
        lambda b: b._NUM_BLOCK_COLS_K_NOPE + b._NUM_BLOCK_COLS_K_ROPE
    )
    _NUM_BLOCK_COLS_V = cached_property[int](lambda b: b.DEPTH // b.mma.V_SUB_COLS)

    # A tile as rows of one sub-block's width (64 bytes).
    _K_NOPE_SLOT_ROWS = cached_property[int](lambda b: b.KV_BLOCK * b._NUM_BLOCK_COLS_K_NOPE)
    _K_ROPE_SLOT_ROWS = cached_property[int](lambda b: b.KV_BLOCK * b._NUM_BLOCK_COLS_K_ROPE)
    _K_SLOT_ROWS = cached_property[int](lambda b: b.KV_BLOCK * b._NUM_BLOCK_COLS_K)
    _V_SLOT_ROWS = cached_property[int](lambda b: b.KV_BLOCK * b._NUM_BLOCK_COLS_V)
    # Number of the first rope sub-block of a slot.
    _K_ROPE_SUBBLOCK_OFFSET = cached_property[int](
        lambda b: b.KV_BLOCK // b.mma.K_SUB_ROWS * b._NUM_BLOCK_COLS_K_NOPE
    )
    # Where rope starts, in rope-sized steps; 0 if rope is narrower than a sub-block.
    _K_ROPE_TILE_IDX = cached_property[int](
        lambda b: b._K_NOPE_SLOT_ROWS // b._K_ROPE_SLOT_ROWS if b._K_ROPE_SLOT_ROWS else 0
    )

    _PV_A_FRAG = Part[int]("mma.PV_A_FRAG_ELTS")
    # Strips of keys in the second product, as V is read from LDS: 64 keys in fp8, whatever the
    # depth of the product; MMA_K = 16 keys in 16 bits.
    _NUM_PV_SUBTILES = cached_property[int](
        lambda b: b.KV_BLOCK // (STRIP_KEYS if b.config.is_fp8 else b.mma.MMA_K)
    )
    # The shape the streamed kernel is written for: softmax works in place on fp32 scores and packs
    # P once, and K's fragments are streamed inside the first product rather than held.
    _FP8_KV128_32x64 = cached_property[bool](
        lambda b: b.config.is_fp8 and b.KV_BLOCK >= 128 and not b.mma.FP8_MMA_K_128
    )
    _FP32_SOFTMAX_SCORES = cached_property[bool](lambda b: b._FP8_KV128_32x64)
    _CADENCE = cached_property[bool](lambda b: b._FP8_KV128_32x64)
    # fp32, except that large fp8 tiles outside the streamed shape must save registers.
    _SOFTMAX_DTYPE = cached_property[str](
        lambda b: (
            "float16"
            if b.config.is_fp8 and b.KV_BLOCK >= 128 and not b._FP32_SOFTMAX_SCORES
            else "float32"
        )
    )
    # Fold scale·log2(e) into Q. Not for fp8: rounding the product would cost accuracy.
    prescale_q = cached_property[bool](lambda b: not b.config.is_fp8)

    # Register tiles: a warp's Q at its full width, nope first; the two parts of a K tile.
    Q_LAYOUT_MLA = cached_property[RegisterTile](
        lambda b: (b.Q_BLOCK_SIZE // b.mma.MMA_M, b._NUM_Q_K_TILES, b.mma.FRAG_ELTS)
    )
    K_NOPE_LAYOUT = Part[RegisterTile]("mma.K_LAYOUT")
    K_ROPE_LAYOUT = cached_property[RegisterTile](
        lambda b: (b.KV_BLOCK // b.mma.MMA_M, b._NUM_K_ROPE_TILES, b.mma.FRAG_ELTS)
    )
