"""The TMA boxes and tensor-memory map of the sparse kernels, and the config they start from."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import Limit, Limited, Part, broken, verdict_lines
from openmla.modular.blackwell.sparse.mma import (
    TS_STAGES,
    QKMMAOp,
    SVMMAOp,
    TensorAccumulator,
    qk_products,
    sv_products,
)
from openmla.modular.blackwell.sparse.shape import PAIR_HEADS, SHAPE_LIMITS, SparseShape
from openmla.modular.blackwell.sparse.smem import Array, MLASparseSharedMemory
from openmla.modular.blackwell.units import NUM_THREADS, SMEM_CARVEOUT, TMEM_COLS, Swizzle

GATHER_BYTES = 8  # fp8 rows travel as 8-byte words
P_TMEM_ADDR = 256  # behind the two output atoms


def gather_box(width: int, swizzle: Swizzle, element: int) -> int:
    """Columns of one gather: a swizzle span, or the whole row when nothing is swizzled."""
    return width if swizzle is Swizzle.NONE else swizzle // element


@dataclass(frozen=True, kw_only=True)
class MLASparseConfig(Limited, SparseShape):
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

    @cached_property
    def use_ws(self) -> bool:
        """Whether the MMA is that of a single CTA, with 64 rows."""
        return self.cta_group == 1

    smem_used = Part[int]("smem.size_of")
    """Bytes of one CTA."""

    @cached_property
    def score_cols(self) -> int:
        """Tensor-memory columns of the scores: 64 rows use half the lanes, two keys a column."""
        return self.B_TOPK // 2

    @cached_property
    def Q_TMEM_ADDR(self) -> int:
        """The first column of Q, at the very end; a column holds two bf16 values."""
        return TMEM_COLS - self.q_tmem_depth // 2

    @cached_property
    def smem(self) -> MLASparseSharedMemory:
        """The byte map of shared memory."""
        return MLASparseSharedMemory(**self.arguments())

    def _broken_limits(self) -> Iterator[str]:
        return broken(SPARSE_LIMITS, self)

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
            f"used: {smem.size_of} of {SMEM_CARVEOUT}",
        ]
        return lines + verdict_lines(self.why_unsupported())

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
    """Boxes, tiles and products of the sparse kernel.

    Shapes are lists of ints, outermost first. K is gathered four rows at a time, 64 columns wide;
    each CTA takes its own keys. V takes all keys of half a step, but only the CTA's columns.

    >>> sparse = MLAPrefillSparse(num_q_heads=128, indices_stride=2048)
    >>> sparse.SHARED_QKV_TYPE, sparse.SVMMAType.SS_P0MMAType.MMA_N
    (Array(dtype='bfloat16', size=81920), 256)
    """

    accum_dtype: ClassVar[str] = "float32"
    v_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128
    P_TMEM_ADDR: ClassVar[int] = P_TMEM_ADDR
    QK_TS_stages: ClassVar[int] = TS_STAGES

    # An fp8 cache is gathered as int64 words, unswizzled, and dequantized afterwards.
    FP8_K_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    FP8_V_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    k_tma_dtype_fp8: ClassVar[str] = "int64"
    v_tma_dtype_fp8: ClassVar[str] = "int64"
    k_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE
    v_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE

    SMemType: ClassVar[type[MLASparseSharedMemory]] = MLASparseSharedMemory
    """The type of the byte map; `smem` is the map of this block."""
    FULL_Q_TYPE = Part[Array]("smem")
    SHARED_QKV_TYPE = Part[Array]("smem")
    O_TYPE = Part[Array]("smem")

    @cached_property
    def QKMMAOpType(self) -> QKMMAOp:
        """Q times K: its products, with their shapes."""
        return qk_products(self, self.accum_dtype)

    @cached_property
    def SVMMAType(self) -> SVMMAOp:
        """P times V: its products, with their shapes."""
        return sv_products(self, self.accum_dtype)

    @property
    def QK_SS(self) -> TensorAccumulator:
        """The product of Q's columns in shared memory with K."""
        return self.QKMMAOpType.SSMMAType

    @property
    def k_tile_width(self) -> int:
        return self.qk_depth

    @property
    def k_tile_height(self) -> int:
        return self.B_TOPK_PER_CTA

    @cached_property
    def k_gather_box(self) -> int:
        """Columns of one gather."""
        return gather_box(self.k_tile_width, self.k_swizzle_mode, self.qkv_dtype_size)

    @cached_property
    def k_tile_shape(self) -> list[int]:
        return [self.k_tile_height, self.k_gather_box]

    @cached_property
    def k_desc_shape(self) -> list[int]:
        return [1, self.k_gather_box]

    @property
    def v_tile_width(self) -> int:
        return self.V_SMEM_COLS_PER_CTA

    @cached_property
    def v_tile_height(self) -> int:
        """Half the keys of a step, so that P times V can start on the first half."""
        return self.B_TOPK // 2

    @cached_property
    def v_gather_box(self) -> int:
        """Columns of one gather."""
        return gather_box(self.v_tile_width, self.v_swizzle_mode, self.qkv_dtype_size)

    @cached_property
    def v_tile_shape(self) -> list[int]:
        return [self.v_tile_height, self.v_gather_box]

    @cached_property
    def v_desc_shape(self) -> list[int]:
        return [1, self.v_gather_box]

    @cached_property
    def q_desc_shape(self) -> list[int]:
        return [1, self.NUM_Q_HEADS_PER_CTA, self.q_swizzle_mode // self.qkv_dtype_size]

    @cached_property
    def k_tma_tile_width_fp8(self) -> int:
        """A row of an fp8 cache, in 8-byte words."""
        return self.qk_depth // GATHER_BYTES

    @cached_property
    def k_tma_gather_box_fp8(self) -> int:
        return gather_box(self.k_tma_tile_width_fp8, self.k_tma_swizzle_fp8, GATHER_BYTES)

    @cached_property
    def k_tma_tile_shape_fp8(self) -> list[int]:
        return [self.k_tile_height, self.k_tma_gather_box_fp8]

    @cached_property
    def k_tma_desc_shape_fp8(self) -> list[int]:
        return [1, self.k_tma_gather_box_fp8]

    @cached_property
    def v_tma_tile_width_fp8(self) -> int:
        """The columns of V that one atom of a CTA takes, in 8-byte words."""
        return self.V_BMN_PER_ATOM // GATHER_BYTES

    @property
    def v_tma_tile_height_fp8(self) -> int:
        """All keys of a step: they are dequantized together."""
        return self.B_TOPK

    @cached_property
    def v_tma_gather_box_fp8(self) -> int:
        return gather_box(self.v_tma_tile_width_fp8, self.v_tma_swizzle_fp8, GATHER_BYTES)

    @cached_property
    def v_tma_tile_shape_fp8(self) -> list[int]:
        return [self.v_tma_tile_height_fp8, self.v_tma_gather_box_fp8]

    @cached_property
    def v_tma_desc_shape_fp8(self) -> list[int]:
        return [1, self.v_tma_gather_box_fp8]


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSparseFP8(MLAPrefillSparse):
    """This kernel over an fp8 cache: Q and the products stay bf16, the ``_fp8`` boxes load."""
