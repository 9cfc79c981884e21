"""The TMA boxes and tensor-memory map of the sparse kernels, and the config they start from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

from openmla.planning.arithmetic import Limit, all_hold, first_broken, verdict_lines
from openmla.planning.blackwell.sparse.shape import PAIR_HEADS, SHAPE_LIMITS, SparseShape
from openmla.planning.blackwell.sparse.smem import MLASparseSharedMemory
from openmla.planning.blackwell.units import (
    NUM_THREADS,
    SMEM_CARVEOUT,
    TMEM_COLS,
    Swizzle,
    dtype_size,
)

GATHER_BYTES = 8  # fp8 rows travel as 8-byte words
TS_SLICES = 3  # one issue takes at most 16 steps of 16 columns; 384 columns go in 3 of 8
P_TMEM_ADDR = 256  # behind the two output atoms


class MmaShape(NamedTuple):
    """Rows and columns of an MMA over the whole CTA group."""

    MMA_M: int
    MMA_N: int


def gather_box(width: int, swizzle: Swizzle, element: int) -> int:
    """Columns of one gather: a swizzle span, or the whole row when nothing is swizzled."""
    return width if swizzle is Swizzle.NONE else swizzle // element


@dataclass(frozen=True, kw_only=True)
class MLASparseConfig(SparseShape):
    """The plan of one sparse MLA prefill block in bf16.

    >>> config = select_mla_sparse_config(num_q_heads=128, indices_stride=2048)
    >>> config.cta_group, config.B_TOPK, config.supported()
    (2, 128, True)
    """

    num_threads: ClassVar[int] = NUM_THREADS
    sm100_tmem_cols: ClassVar[int] = TMEM_COLS
    q_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128
    k_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128
    output_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128

    @property
    def use_ws(self) -> bool:
        """Whether the MMA is the 64-row one of a single CTA."""
        return self.cta_group == 1

    @cached_property
    def smem(self) -> MLASparseSharedMemory:
        """The byte map of shared memory."""
        return MLASparseSharedMemory(**self.arguments())

    @property
    def smem_used(self) -> int:
        """Bytes of shared memory per CTA."""
        return self.smem.size_of

    @property
    def score_cols(self) -> int:
        """Tensor-memory columns of the scores: 64 rows use half the lanes, two keys a column."""
        return self.B_TOPK // 2

    @property
    def Q_TMEM_ADDR(self) -> int:
        """Q sits at the very end; a column holds two bf16 values."""
        return TMEM_COLS - self.q_tmem_depth // 2

    def one_cta(self) -> Self:
        """The block of each CTA of a pair, if it works alone: half the heads, all the keys.

        >>> pair = select_mla_sparse_config(num_q_heads=128, indices_stride=2048)
        >>> pair.one_cta() == select_mla_sparse_config(num_q_heads=64, indices_stride=2048)
        True
        """
        if self.cta_group == 1:
            return self
        heads, keys = self.NUM_Q_HEADS_PER_CTA, self.B_TOPK_PER_CTA
        return replace(self, num_q_heads=heads, cta_group=1, b_topk=keys)

    @property
    def smem_with_whole_q(self) -> int:
        """Bytes of shared memory per CTA if all of Q stays there, and P never exists as fp32.

        >>> pair = select_mla_sparse_config(num_q_heads=128, indices_stride=2048)
        >>> pair.smem_used, pair.smem_with_whole_q  # 64 x 384 x 2 more, 64 x 128 x 4 less
        (214264, 230648)
        """
        smem = self.smem
        more = (smem.FULL_Q_SIZE - smem.SHARED_Q_SIZE) * self.qkv_dtype_size
        return smem.size_of + more - smem.S_SIZE * 4

    def supported(self) -> bool:
        """Whether the plan keeps every limit of the hardware and the kernel."""
        return all_hold(SPARSE_LIMITS, self)

    def why_unsupported(self) -> str:
        """The first limit the plan breaks, with its arithmetic; empty when supported."""
        return first_broken(SPARSE_LIMITS, self)

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        smem = self.smem
        element = self.qkv_dtype_size
        o_cols = self.NUM_SV_ATOMS * self.O_ATOM_PHYS_COLS
        lines = [
            self._heads_line(),
            f"B_TOPK = {self.B_TOPK} keys per step, {self.B_TOPK_PER_CTA} of K gathered per CTA, "
            f"{self.num_mbars} steps in flight",
            f"tensor memory: O 0..{o_cols - 1}, scores {P_TMEM_ADDR}.."
            f"{P_TMEM_ADDR + self.score_cols - 1}, Q {self.Q_TMEM_ADDR}..{TMEM_COLS - 1} "
            f"({self.q_tmem_depth} columns, two to a cell)",
            f"working set: Q {smem.SHARED_Q_SIZE} + V {smem.V_SIZE} + K {smem.K_SIZE} = "
            f"{smem.SHARED_QKV_SIZE} values x {element} = {smem.SHARED_QKV_SIZE * element} bytes; "
            f"the whole Q ({smem.FULL_Q_SIZE * element}) and the output "
            f"({smem.O_SIZE * element}) use the same bytes",
            f"scores {smem.S_SIZE * element}, fp32 P {smem.S_SIZE * 4}, barriers, masks and row "
            f"statistics {smem.size_of - smem.offsets['prologue_q']}",
            *self._whole_q_lines(),
            f"used: {smem.size_of} of {SMEM_CARVEOUT}",
        ]
        return lines + verdict_lines(self.why_unsupported())

    def _whole_q_lines(self) -> list[str]:
        if self.cta_group == 1:
            return []
        return [
            "in Gluon a pair's product cannot take Q from tensor memory: all of Q stays, fp32 P "
            f"goes, {self.smem_with_whole_q} bytes"
        ]

    def _heads_line(self) -> str:
        if self.cta_group == 2:
            return f"{self.num_q_heads} heads: a CTA pair, {self.NUM_Q_HEADS_PER_CTA} heads each"
        padding = self.padded_num_q_heads - self.num_q_heads
        tail = f", padded by {padding} rows to the smallest MMA" if padding else ""
        return f"{self.num_q_heads} heads: one CTA{tail}"


def select_mla_sparse_config(*, num_q_heads: int, indices_stride: int) -> MLASparseConfig:
    """The plan the kernels run: a pair of CTAs for 128 heads, one CTA for up to 64."""
    pair = num_q_heads == PAIR_HEADS
    return MLASparseConfig(
        num_q_heads=num_q_heads,
        indices_stride=indices_stride,
        cta_group=2 if pair else 1,
        b_topk=128 if pair else 64,
    )


SPARSE_LIMITS: tuple[Limit[MLASparseConfig], ...] = (
    *SHAPE_LIMITS,
    Limit(
        lambda c: P_TMEM_ADDR + c.score_cols <= c.Q_TMEM_ADDR,
        lambda c: (
            f"tensor memory: scores end at {P_TMEM_ADDR} + {c.score_cols} = "
            f"{P_TMEM_ADDR + c.score_cols}, Q starts at {TMEM_COLS} - {c.q_tmem_depth} / 2 = "
            f"{c.Q_TMEM_ADDR}"
        ),
    ),
    Limit(lambda c: c.smem.supported(), lambda c: c.smem.why_unsupported()),
)


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSparse(MLASparseConfig):
    """Boxes and tiles of the sparse kernel.

    Shapes are lists of ints, outermost first. K is gathered four rows at a time, 64 columns wide;
    each CTA takes its own keys. V takes all keys of half a step, but only the CTA's columns.
    """

    accum_dtype: ClassVar[str] = "float32"
    v_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128
    O_TMEM_ADDR: ClassVar[int] = 0
    P_TMEM_ADDR: ClassVar[int] = P_TMEM_ADDR
    QK_TS_stages: ClassVar[int] = TS_SLICES

    # An fp8 cache is gathered as int64 words, unswizzled, and dequantized afterwards.
    FP8_K_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    FP8_V_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    k_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE
    v_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE
    k_tma_dtype_fp8: ClassVar[str] = "int64"
    v_tma_dtype_fp8: ClassVar[str] = "int64"

    @property
    def O_TMEM_ADDR_ATOM2(self) -> int:
        """Tensor-memory column of the second output atom."""
        return self.O_TMEM_ADDR + self.O_ATOM_PHYS_COLS

    @property
    def CTA_MASK(self) -> int:
        """The CTAs that a finished MMA signals, a bit each."""
        return (1 << self.cta_group) - 1

    @property
    def QK_SS(self) -> MmaShape:
        """The product of Q's columns in shared memory with K."""
        return MmaShape(self.padded_num_q_heads, self.B_TOPK)

    # K.

    @property
    def k_tile_width(self) -> int:
        """Columns of a K tile."""
        return self.qk_depth

    @property
    def k_tile_height(self) -> int:
        """Keys of K that one CTA gathers."""
        return self.B_TOPK_PER_CTA

    @property
    def k_gather_box(self) -> int:
        """Columns of K per gather."""
        return gather_box(self.k_tile_width, self.k_swizzle_mode, self.qkv_dtype_size)

    @property
    def k_tile_shape(self) -> list[int]:
        """Keys and columns of one column group of K."""
        return [self.k_tile_height, self.k_gather_box]

    @property
    def k_desc_shape(self) -> list[int]:
        """The box of K's descriptor, one of four gathered rows."""
        return [1, self.k_gather_box]

    # V.

    @property
    def v_tile_width(self) -> int:
        """Columns of V that one CTA holds."""
        return self.V_SMEM_COLS_PER_CTA

    @property
    def v_tile_height(self) -> int:
        """V arrives in two halves of the keys, so that P times V can start on the first."""
        return self.B_TOPK // 2

    @property
    def v_gather_box(self) -> int:
        """Columns of V per gather."""
        return gather_box(self.v_tile_width, self.v_swizzle_mode, self.qkv_dtype_size)

    @property
    def v_tile_shape(self) -> list[int]:
        """Keys and columns of one column group of V."""
        return [self.v_tile_height, self.v_gather_box]

    @property
    def v_desc_shape(self) -> list[int]:
        """The box of V's descriptor, one of four gathered rows."""
        return [1, self.v_gather_box]

    # Q and the output.

    @property
    def q_tile_shape(self) -> list[int]:
        """One token, its heads on this CTA, all columns."""
        return [1, self.NUM_Q_HEADS_PER_CTA, self.qk_depth]

    @property
    def q_desc_shape(self) -> list[int]:
        """The box of Q's descriptor: one swizzle span of columns."""
        span = self.q_swizzle_mode // self.qkv_dtype_size
        return [1, self.NUM_Q_HEADS_PER_CTA, span]

    @property
    def o_tile_shape(self) -> list[int]:
        """Heads on this CTA and all output columns."""
        return [self.NUM_Q_HEADS_PER_CTA, self.v_depth]

    @property
    def o_desc_shape(self) -> list[int]:
        """The box of the output's descriptor: one swizzle span of columns."""
        span = self.output_swizzle_mode // dtype_size("bfloat16")
        return [self.NUM_Q_HEADS_PER_CTA, span]

    # The fp8 cache.

    @property
    def k_tma_tile_width_fp8(self) -> int:
        """8-byte words of a row of K."""
        return self.qk_depth // GATHER_BYTES

    @property
    def k_tma_gather_box_fp8(self) -> int:
        """Words of K per gather."""
        return gather_box(self.k_tma_tile_width_fp8, self.k_tma_swizzle_fp8, GATHER_BYTES)

    @property
    def k_tma_tile_shape_fp8(self) -> list[int]:
        """Keys and words of K that one CTA gathers."""
        return [self.k_tile_height, self.k_tma_gather_box_fp8]

    @property
    def k_tma_desc_shape_fp8(self) -> list[int]:
        """The box of K's descriptor, one of four gathered rows."""
        return [1, self.k_tma_gather_box_fp8]

    @property
    def v_tma_tile_width_fp8(self) -> int:
        """8-byte words of one atom's columns on this CTA."""
        return self.V_BMN_PER_ATOM // GATHER_BYTES

    @property
    def v_tma_tile_height_fp8(self) -> int:
        """Keys of V, all of a step: they are dequantized together."""
        return self.B_TOPK

    @property
    def v_tma_gather_box_fp8(self) -> int:
        """Words of V per gather."""
        return gather_box(self.v_tma_tile_width_fp8, self.v_tma_swizzle_fp8, GATHER_BYTES)

    @property
    def v_tma_tile_shape_fp8(self) -> list[int]:
        """Keys and words of V that one CTA gathers per atom."""
        return [self.v_tma_tile_height_fp8, self.v_tma_gather_box_fp8]

    @property
    def v_tma_desc_shape_fp8(self) -> list[int]:
        """The box of V's descriptor, one of four gathered rows."""
        return [1, self.v_tma_gather_box_fp8]


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSparseFP8(MLAPrefillSparse):
    """The same kernel over an fp8 cache: Q and the products stay bf16, the ``_fp8`` boxes load."""
