"""MhaMmaOp and MlaMmaOp: matrix products, sub-blocks and register tiles on CDNA4.

A wave of 64 lanes computes products of one of three shapes:

    dtype               MMA_M × MMA_N × MMA_K    values per lane: A and B, result
    bf16                     32 × 32 × 16              8, 16
    fp8                      32 × 32 × 64             32, 16
    fp8, fp8_mma_k_128       16 × 16 × 128            32, 4

Scores are computed transposed (keys × queries), so that a lane holds scores of one query and the
row maximum needs no more than one exchange between lanes 32 apart.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Part
from openmla.errors import Unsupported
from openmla.modular.cdna4.config import MhaConfigV2, given_or_made
from openmla.modular.cdna4.layout import v_map
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.modular.cdna4.layout.k import K_SUB_ROWS, SUB_ROW_BYTES, load_K_frag_addr
from openmla.modular.cdna4.layout.v import READS, V_SUB_ROWS, VMap

#: (row tiles, column tiles, values per lane of each tile)
RegisterTile = tuple[int, int, int]


@dataclass(frozen=True, init=False)
class MhaMmaOp:
    """Shape constants of the products of one block.

    >>> op = MhaMmaOp(MhaConfigV2(q_block_size=32, kv_block=128, depth=128, num_heads=16,
    ...                           num_kv_heads=1, dtype="float8_e4m3fn"))
    >>> op.MMA_M, op.MMA_N, op.MMA_K, op.FRAG_ELTS
    (32, 32, 64, 32)
    >>> op.K_LAYOUT, op.V_LAYOUT     # 128 keys: 4 tiles of 32 for QK, 2 strips of 64 for PV
    ((4, 2, 32), (2, 4, 32))
    """

    config: MhaConfigV2

    def __init__(self, config: MhaConfigV2 | None = None, **shape: Any) -> None:
        """From a config, or from the fields of an MlaConfigV2."""
        made = given_or_made(config, shape)
        object.__setattr__(self, "config", made if config is not None else made.mha())

    # Sub-blocks in LDS have so many keys, and columns that take 64 bytes.
    K_SUB_ROWS: ClassVar[int] = K_SUB_ROWS
    V_SUB_ROWS: ClassVar[int] = V_SUB_ROWS

    Q_BLOCK_SIZE = Part[int]("config.q_block_size")
    """Query rows of a warp."""
    KV_BLOCK = Part[int]("config.kv_block")
    """Keys of a tile."""
    DEPTH = Part[int]("config.depth")
    """Columns of V and the output."""
    FP8_MMA_K_128 = Part[bool]("config.fp8_mma_k_128")
    """Whether an MMA has a depth of 128; only fp8 heeds it."""

    @cached_property
    def _is_16x16(self) -> bool:
        return self.config.is_fp8 and self.FP8_MMA_K_128

    @cached_property
    def MMA_M(self) -> int:
        """Rows of one product."""
        return 16 if self._is_16x16 else 32

    @property
    def MMA_N(self) -> int:
        """Columns of one product: all products are square."""
        return self.MMA_M

    @cached_property
    def MMA_K(self) -> int:
        """Depth of one product."""
        return 128 if self._is_16x16 else 64 if self.config.is_fp8 else 16

    @cached_property
    def K_SUB_COLS(self) -> int:
        return SUB_ROW_BYTES // self.config.element_bytes

    @property
    def V_SUB_COLS(self) -> int:
        return self.K_SUB_COLS

    @property
    def ROWL_HALF_LANES(self) -> int:
        """Lanes side by side on the rows of an A fragment, one for each row."""
        return self.MMA_M

    @cached_property
    def ROWL_STRIDE(self) -> int:
        """Consecutive columns of an A fragment that one lane holds."""
        return self.MMA_K * self.ROWL_HALF_LANES // WAVE

    @cached_property
    def FRAG_ELTS(self) -> int:
        """Values of a lane of an operand of the first product, Q or K."""
        return self.MMA_M * self.MMA_K // WAVE

    @cached_property
    def PV_A_FRAG_ELTS(self) -> int:
        """Values of a lane of an operand of the second product, P or V."""
        return self.MMA_K * self.MMA_N // WAVE

    @cached_property
    def _acc_elts(self) -> int:
        """Values of a lane of a result."""
        return self.MMA_M * self.MMA_N // WAVE

    @cached_property
    def Q_LAYOUT(self) -> RegisterTile:
        """A warp's Q; MLA's own is wider (`MlaPrefillV2Core.Q_LAYOUT_MLA`)."""
        return (self.Q_BLOCK_SIZE // self.MMA_M, self.DEPTH // self.MMA_K, self.FRAG_ELTS)

    @cached_property
    def K_LAYOUT(self) -> RegisterTile:
        """A whole K tile."""
        return (self.KV_BLOCK // self.MMA_M, self.DEPTH // self.MMA_K, self.FRAG_ELTS)

    @cached_property
    def V_LAYOUT(self) -> RegisterTile:
        """A whole V tile, of which the keys are the depth of the product."""
        return (self.KV_BLOCK // self.MMA_K, self.DEPTH // self.MMA_N, self.PV_A_FRAG_ELTS)

    @cached_property
    def ATT_LAYOUT(self) -> RegisterTile:
        """Scores, keys × queries in fp32."""
        return (self.KV_BLOCK // self.MMA_M, self.Q_BLOCK_SIZE // self.MMA_N, self._acc_elts)

    @cached_property
    def ATT_BF16_SUB_LAYOUT(self) -> RegisterTile:
        """One strip of P, MMA_K keys, in the dtype of the inputs."""
        return (1, self.Q_BLOCK_SIZE // self.MMA_N, self.PV_A_FRAG_ELTS)

    @cached_property
    def ATT_BF16_FULL_LAYOUT(self) -> RegisterTile:
        """All strips of P."""
        return (self.KV_BLOCK // self.MMA_K, self.Q_BLOCK_SIZE // self.MMA_N, self.PV_A_FRAG_ELTS)

    @cached_property
    def O_LAYOUT(self) -> RegisterTile:
        """The output accumulator, depth × queries in fp32."""
        return (self.DEPTH // self.MMA_M, self.Q_BLOCK_SIZE // self.MMA_N, self._acc_elts)

    @cached_property
    def O_T_LAYOUT(self) -> RegisterTile:
        """Accumulator registers as queries × depth."""
        return (self.Q_BLOCK_SIZE // self.MMA_M, self.DEPTH // self.MMA_N, self._acc_elts)


@dataclass(frozen=True, init=False)
class MlaMmaOp(MhaMmaOp):
    """MhaMmaOp with the fragment loaders of MLA: same constants, plus addresses.

    MLA streams K and V through registers one fragment at a time and never holds a whole tile.
    Addresses are bytes from the start of a slot; fp8 32×32×64 only.

    >>> op = MlaMmaOp(MhaConfigV2(q_block_size=32, kv_block=128, depth=128, num_heads=16,
    ...                           num_kv_heads=1, dtype="float8_e4m3fn"))
    >>> op.load_V_frag(i_strip=1, j_depth=0, v_full_v227=True)
    (8320, 8576, 8832, 9088)
    """

    def load_K_frag(self, lane: int, sub_id: int) -> tuple[int, int]:
        """The two 16-byte reads of K fragment `sub_id`."""
        self._require_fragments()
        return load_K_frag_addr(lane, sub_id)

    def precompute_v_lane_base(
        self, lane: int, *, v_full_v227: bool = False, v227_layout: bool = False
    ) -> int:
        """The lane's share of every V read address of a slot."""
        return self._v(v_full_v227=v_full_v227, v227_layout=v227_layout).lane_base(lane)

    def load_V_frag(
        self, i_strip: int, j_depth: int, *, v_full_v227: bool = False
    ) -> tuple[int, ...]:
        """The offsets of the four reads of V fragment (i_strip, j_depth) from the lane base."""
        v = self._v(v_full_v227=v_full_v227)
        return tuple(v.cell(i_strip, j_depth, r) for r in range(READS))

    def load_V_from_lane_base(self) -> tuple[tuple[int, ...], ...]:
        """The offsets of the reads of a whole V tile from the lane base: its fragments, strip by
        strip, as `V_LAYOUT` has them. In the default layout only, as in the original."""
        strips, tiles, _ = self.V_LAYOUT
        return tuple(self.load_V_frag(i, j) for i in range(strips) for j in range(tiles))

    def _v(self, **flags: bool) -> VMap:
        self._require_fragments()
        return v_map(kv_block=self.KV_BLOCK, depth=self.DEPTH, **flags)

    def _require_fragments(self) -> None:
        if self.MMA_K != 64:
            raise Unsupported(
                f"fragment loads need the fp8 32×32×64 product; dtype {self.config.dtype} with "
                f"fp8_mma_k_128={self.FP8_MMA_K_128} computes "
                f"{self.MMA_M}×{self.MMA_N}×{self.MMA_K}",
                "dtype float8_e4m3fn, fp8_mma_k_128=False",
            )
