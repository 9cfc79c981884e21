"""The sparse kernel that computes in fp8: Q, K, V and P are all e4m3, without scales.

One CTA keeps each gathered row once, since V is its first columns. A CTA pair cannot: K is split
between the CTAs by keys and V by columns, so V has a buffer of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.planning.arithmetic import Limit, Limited, broken
from openmla.planning.blackwell.sparse.prefill import gather_box
from openmla.planning.blackwell.sparse.shape import SHAPE_LIMITS, SparseShape
from openmla.planning.blackwell.sparse.smem import FP32, INT32, ByteMap, Field, barriers
from openmla.planning.blackwell.units import FP8_FLOATS, TMEM_COLS, WARPGROUP, Swizzle

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

    PADDED_HEADS = cached_property[int](lambda s: s.padded_num_q_heads)  # rows of the MMA
    # Columns of a score tile: 64 rows use half the lanes, two keys a column.
    S_SLOT_STRIDE = cached_property[int](lambda s: s.B_TOPK // 2)


@dataclass(frozen=True, kw_only=True)
class MLASparseSharedMemoryQKVFP8(ByteMap, _FP8Shape):
    """Shared memory of the fp8 kernel. The bf16 output reuses the K buffers."""

    NUM_Q_HEADS = cached_property[int](lambda m: m.num_q_heads)
    # Values of Q, which stays, and of one step of K, V and P. A single CTA reads V from K's rows.
    Q_SIZE = cached_property[int](lambda m: m.PADDED_HEADS_PER_CTA * m.qk_depth)
    KV_STAGE_SIZE = cached_property[int](lambda m: m.B_TOPK_PER_CTA * m.qk_depth)
    V_STAGE_SIZE = cached_property[int](
        lambda m: m.B_TOPK * m.V_SMEM_COLS_PER_CTA if m.cta_group == 2 else PLACEHOLDER_BYTES
    )
    P_STAGE_SIZE = cached_property[int](lambda m: m.PADDED_HEADS_PER_CTA * m.B_TOPK)
    O_SIZE = cached_property[int](lambda m: m.PADDED_HEADS_PER_CTA * m.v_depth)
    # Barriers between the CTAs of a pair; a single CTA keeps one of each, unused.
    CG2_MBARS = cached_property[int](lambda m: m.num_mbars if m.cta_group == 2 else 1)

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

    # The first tensor-memory column past the score tiles.
    score_end = cached_property[int](lambda c: c.S_TMEM_BASE + c.NUM_S_SLOTS * c.S_SLOT_STRIDE)
    NUM_PV_KHALVES = cached_property[int](lambda c: c.B_TOPK // c.PV_BK)  # products per step, atom

    # Bytes between parts of an operand, one byte an element: V of the atoms, P and V of products.
    V_ATOM_BYTE_OFFSET = cached_property[int](lambda c: c.PV_BK * c.V_BMN_PER_ATOM)
    P_KHALF_STRIDE = cached_property[int](lambda c: c.PADDED_HEADS_PER_CTA * c.PV_BK)
    V_KHALF_STRIDE = cached_property[int](lambda c: c.PV_BK * c.V_SMEM_COLS_PER_CTA)

    # Boxes, outermost first: one swizzle span of columns each; rows are gathered four at a time.
    Q_SWIZZLE_COLS = cached_property[int](lambda c: Swizzle.B64 // c.qkv_dtype_size)
    kv_gather_box = cached_property[int](
        lambda c: gather_box(c.qk_depth, Swizzle.B64, c.qkv_dtype_size)
    )
    q_desc_shape = cached_property[list[int]](
        lambda c: [1, c.NUM_Q_HEADS_PER_CTA, c.Q_SWIZZLE_COLS]
    )
    kv_tile_shape = cached_property[list[int]](lambda c: [c.B_TOPK, c.kv_gather_box])
    kv_desc_shape = cached_property[list[int]](lambda c: [1, c.kv_gather_box])


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
