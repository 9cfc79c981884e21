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

from openmla.errors import Unsupported
from openmla.planning.arithmetic import Part
from openmla.planning.cdna4.config import MhaConfigV2, given_or_made
from openmla.planning.cdna4.layout import v_map
from openmla.planning.cdna4.layout.dma import WAVE
from openmla.planning.cdna4.layout.k import K_SUB_ROWS, SUB_ROW_BYTES, load_K_frag_addr
from openmla.planning.cdna4.layout.v import READS, V_SUB_ROWS, VMap

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

    Q_BLOCK_SIZE = Part[int]("config.q_block_size")  # query rows per warp
    KV_BLOCK = Part[int]("config.kv_block")  # keys per tile
    DEPTH = Part[int]("config.depth")  # of V and the output
    FP8_MMA_K_128 = Part[bool]("config.fp8_mma_k_128")  # as given; only fp8 heeds it
    _is_16x16 = cached_property[bool](lambda op: op.config.is_fp8 and op.FP8_MMA_K_128)

    # One product: rows, columns (they are all square), reduction depth.
    MMA_M = cached_property[int](lambda op: 16 if op._is_16x16 else 32)
    MMA_N = cached_property[int](lambda op: op.MMA_M)
    MMA_K = cached_property[int](lambda op: 128 if op._is_16x16 else 64 if op.config.is_fp8 else 16)
    # Sub-blocks in LDS: keys, and columns, 64 bytes' worth.
    K_SUB_ROWS: ClassVar[int] = K_SUB_ROWS
    V_SUB_ROWS: ClassVar[int] = V_SUB_ROWS
    K_SUB_COLS = cached_property[int](lambda op: SUB_ROW_BYTES // op.config.element_bytes)
    V_SUB_COLS = cached_property[int](lambda op: op.K_SUB_COLS)
    # Lanes side by side on the rows of an A fragment, one per row; consecutive columns of one lane.
    ROWL_HALF_LANES = cached_property[int](lambda op: op.MMA_M)
    ROWL_STRIDE = cached_property[int](lambda op: op.MMA_K * op.ROWL_HALF_LANES // WAVE)
    # Values per lane: of an operand of the first product (K), of the second (V, P), of a result.
    FRAG_ELTS = cached_property[int](lambda op: op.MMA_M * op.MMA_K // WAVE)
    PV_A_FRAG_ELTS = cached_property[int](lambda op: op.MMA_K * op.MMA_N // WAVE)
    _acc_elts = cached_property[int](lambda op: op.MMA_M * op.MMA_N // WAVE)

    # A warp's Q (MLA's own is wider: Q_LAYOUT_MLA), a whole K tile, a whole V tile, of which the
    # keys are the reduction.
    Q_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.Q_BLOCK_SIZE // op.MMA_M, op.DEPTH // op.MMA_K, op.FRAG_ELTS)
    )
    K_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.KV_BLOCK // op.MMA_M, op.DEPTH // op.MMA_K, op.FRAG_ELTS)
    )
    V_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.KV_BLOCK // op.MMA_K, op.DEPTH // op.MMA_N, op.PV_A_FRAG_ELTS)
    )
    # Scores, keys × queries in fp32; one strip of P (MMA_K keys) in the input dtype; all strips.
    ATT_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.KV_BLOCK // op.MMA_M, op.Q_BLOCK_SIZE // op.MMA_N, op._acc_elts)
    )
    ATT_BF16_SUB_LAYOUT = cached_property[RegisterTile](
        lambda op: (1, op.Q_BLOCK_SIZE // op.MMA_N, op.PV_A_FRAG_ELTS)
    )
    ATT_BF16_FULL_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.KV_BLOCK // op.MMA_K, op.Q_BLOCK_SIZE // op.MMA_N, op.PV_A_FRAG_ELTS)
    )
    # The output accumulator, depth × queries in fp32; the same registers as queries × depth.
    O_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.DEPTH // op.MMA_M, op.Q_BLOCK_SIZE // op.MMA_N, op._acc_elts)
    )
    O_T_LAYOUT = cached_property[RegisterTile](
        lambda op: (op.Q_BLOCK_SIZE // op.MMA_M, op.DEPTH // op.MMA_N, op._acc_elts)
    )


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
