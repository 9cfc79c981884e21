"""The sparse kernel that computes in fp8: Q, K, V and P are all e4m3, without scales.

One CTA keeps each gathered row once, since V is its first columns. A CTA pair cannot: K is split
between the CTAs by keys and V by columns, so V has a buffer of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import Limit, Limited, broken
from openmla.modular.blackwell.sparse.prefill import gather_box
from openmla.modular.blackwell.sparse.shape import SHAPE_LIMITS, SparseShape
from openmla.modular.blackwell.sparse.smem import FP32, INT32, ByteMap, Field, barriers
from openmla.modular.blackwell.units import FP8_FLOATS, TMEM_COLS, WARPGROUP, Swizzle

PLACEHOLDER_BYTES = 128  # an unused buffer still keeps the next one aligned


@dataclass(frozen=True, kw_only=True)
class _FP8Shape(SparseShape):
    """The shape of the fp8 kernel: Q stays in shared memory, scores rotate in tensor memory."""

    qkv_dtype: str = "float8_e4m3fn"

    S_TMEM_BASE: ClassVar[int] = 256  # behind the two output atoms
    NUM_S_SLOTS: ClassVar[int] = 4  # score tiles the MMA may run ahead of the softmax

    @staticmethod
    def _operand_dtypes() -> tuple[str, ...]:
        return FP8_FLOATS[:1]

    def _check_q_split(self) -> None:
        """Q is not split here."""

    @property
    def PADDED_HEADS(self) -> int:
        """Rows of the MMA."""
        return self.padded_num_q_heads

    @cached_property
    def S_SLOT_STRIDE(self) -> int:
        """Columns of a score tile: 64 rows use half the lanes, two keys a column."""
        return self.B_TOPK // 2


@dataclass(frozen=True, kw_only=True)
class MLASparseSharedMemoryQKVFP8(ByteMap, _FP8Shape):
    """Shared memory of the fp8 kernel. The bf16 output reuses the K buffers."""

    @property
    def NUM_Q_HEADS(self) -> int:
        return self.num_q_heads

    @cached_property
    def Q_SIZE(self) -> int:
        return self.PADDED_HEADS_PER_CTA * self.qk_depth

    @cached_property
    def KV_STAGE_SIZE(self) -> int:
        return self.B_TOPK_PER_CTA * self.qk_depth

    @cached_property
    def V_STAGE_SIZE(self) -> int:
        """A single CTA reads V from K's rows."""
        return self.B_TOPK * self.V_SMEM_COLS_PER_CTA if self.cta_group == 2 else PLACEHOLDER_BYTES

    @cached_property
    def P_STAGE_SIZE(self) -> int:
        return self.PADDED_HEADS_PER_CTA * self.B_TOPK

    @cached_property
    def O_SIZE(self) -> int:
        return self.PADDED_HEADS_PER_CTA * self.v_depth

    @cached_property
    def CG2_MBARS(self) -> int:
        """Barriers between the CTAs of a pair; a single CTA keeps one of each, unused."""
        return self.num_mbars if self.cta_group == 2 else 1

    def _fields(self) -> list[Field]:
        n = self.num_mbars
        v_indices = self.B_TOPK if self.cta_group == 2 else 1
        return [
            Field("q", self.Q_SIZE, 1),
            Field("kv", n * self.KV_STAGE_SIZE, 1),
            Field("p", n * self.P_STAGE_SIZE, 1),
            Field("v", n * self.V_STAGE_SIZE, 1),
            Field("d_indices", n * self.B_TOPK, INT32),
            Field("d_indices_v", n * v_indices, INT32),
            Field("rowwise_max", WARPGROUP, FP32),
            Field("rowwise_sum", WARPGROUP, FP32),
            Field("is_k_valid", n * self.MASK_BYTES_PER_BUF, 1),
            Field("tmem_addr", 1, INT32),
            *barriers(1, "prologue_q"),
            *barriers(self.NUM_S_SLOTS, "qk_done"),
            *barriers(n, "sv_done", "kv_ready"),
            *barriers(self.NUM_S_SLOTS, "p_free"),
            *barriers(n, "so_ready", "k_valid_ready", "k_valid_free"),
            *barriers(self.CG2_MBARS, "k_ready", "v_ready", "v_tma_done"),
        ]


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSparseQKVFP8(Limited, _FP8Shape):
    """Boxes, tiles and numeric constants of the fp8 kernel.

    P is stored times 2**6, out of the range where e4m3 loses precision; the row maximum may lag
    by 2**2 before the accumulator is rescaled, so P stays within 2**8 = 256 of e4m3's 448.
    """

    PV_BK: ClassVar[int] = 64  # keys of one P-times-V product
    RESCALE_THRESHOLD: ClassVar[float] = -2.0
    P_FP8_BIAS: ClassVar[float] = 6.0

    @cached_property
    def smem(self) -> MLASparseSharedMemoryQKVFP8:
        """The byte map of shared memory."""
        return MLASparseSharedMemoryQKVFP8(**self.arguments())

    def _broken_limits(self) -> Iterator[str]:
        return broken(QKV_FP8_LIMITS, self)

    @cached_property
    def score_end(self) -> int:
        """The first tensor-memory column past the score tiles."""
        return self.S_TMEM_BASE + self.NUM_S_SLOTS * self.S_SLOT_STRIDE

    @cached_property
    def NUM_PV_KHALVES(self) -> int:
        """Products of an atom in one step."""
        return self.B_TOPK // self.PV_BK

    @cached_property
    def V_ATOM_BYTE_OFFSET(self) -> int:
        """Bytes from V of the first atom to V of the second."""
        return self.PV_BK * self.V_BMN_PER_ATOM

    @cached_property
    def P_KHALF_STRIDE(self) -> int:
        """Bytes of P that one product reads."""
        return self.PADDED_HEADS_PER_CTA * self.PV_BK

    @cached_property
    def V_KHALF_STRIDE(self) -> int:
        """Bytes of V that the products over the same keys read."""
        return self.PV_BK * self.V_SMEM_COLS_PER_CTA

    @cached_property
    def Q_SWIZZLE_COLS(self) -> int:
        """Columns of one box of Q: a swizzle span."""
        return Swizzle.B64 // self.qkv_dtype_size

    @cached_property
    def kv_gather_box(self) -> int:
        """Columns of one gather, four rows at a time."""
        return gather_box(self.qk_depth, Swizzle.B64, self.qkv_dtype_size)

    @cached_property
    def q_desc_shape(self) -> list[int]:
        return [1, self.NUM_Q_HEADS_PER_CTA, self.Q_SWIZZLE_COLS]

    @cached_property
    def kv_tile_shape(self) -> list[int]:
        return [self.B_TOPK, self.kv_gather_box]

    @cached_property
    def kv_desc_shape(self) -> list[int]:
        return [1, self.kv_gather_box]


QKV_FP8_LIMITS: tuple[Limit[MLAPrefillSparseQKVFP8], ...] = (
    *SHAPE_LIMITS,
    Limit(
        lambda c: c.B_TOPK % c.PV_BK == 0,
        lambda c: f"B_TOPK {c.B_TOPK} is not whole products of {c.PV_BK} keys",
    ),
    Limit(
        lambda c: c.score_end <= TMEM_COLS,
        lambda c: (
            f"tensor memory: {c.S_TMEM_BASE} + {c.NUM_S_SLOTS} score tiles x {c.S_SLOT_STRIDE} = "
            f"{c.score_end} columns > {TMEM_COLS}"
        ),
    ),
    Limit(lambda c: c.smem.supported(), lambda c: c.smem.why_unsupported()),
)
