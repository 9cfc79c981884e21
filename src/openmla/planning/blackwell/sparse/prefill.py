"""The TMA boxes and tensor-memory map of the sparse kernels, and the config they start from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

from openmla.planning.arithmetic import Limit, Limited, Part, broken, verdict_lines
from openmla.planning.blackwell.sparse.shape import PAIR_HEADS, SHAPE_LIMITS, SparseShape
from openmla.planning.blackwell.sparse.smem import MLASparseSharedMemory
from openmla.planning.blackwell.units import NUM_THREADS, SMEM_CARVEOUT, TMEM_COLS, Swizzle

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

    use_ws = cached_property[bool](lambda c: c.cta_group == 1)  # the 64-row MMA of a single CTA
    smem_used = Part[int]("smem.size_of")  # bytes per CTA
    # Tensor-memory columns of the scores: 64 rows use half the lanes, two keys a column.
    score_cols = cached_property[int](lambda c: c.B_TOPK // 2)
    # Q sits at the very end; a column holds two bf16 values.
    Q_TMEM_ADDR = cached_property[int](lambda c: TMEM_COLS - c.q_tmem_depth // 2)

    @cached_property
    def smem(self) -> MLASparseSharedMemory:
        """The byte map of shared memory."""
        return MLASparseSharedMemory(**self.arguments())

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
        num_q_heads=num_q_heads, indices_stride=indices_stride, cta_group=2 if pair else 1,
        b_topk=128 if pair else 64,
    )  # fmt: skip


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

    v_swizzle_mode: ClassVar[Swizzle] = Swizzle.B128
    P_TMEM_ADDR: ClassVar[int] = P_TMEM_ADDR
    QK_TS_stages: ClassVar[int] = TS_SLICES

    # An fp8 cache is gathered as int64 words, unswizzled, and dequantized afterwards.
    FP8_K_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    FP8_V_SWIZZLE: ClassVar[Swizzle] = Swizzle.NONE
    k_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE
    v_tma_swizzle_fp8: ClassVar[Swizzle] = Swizzle.NONE

    # The product of Q's columns in shared memory with K.
    QK_SS = cached_property[MmaShape](lambda c: MmaShape(c.padded_num_q_heads, c.B_TOPK))

    k_tile_width = cached_property[int](lambda c: c.qk_depth)
    k_tile_height = cached_property[int](lambda c: c.B_TOPK_PER_CTA)
    k_gather_box = cached_property[int](
        lambda c: gather_box(c.k_tile_width, c.k_swizzle_mode, c.qkv_dtype_size)
    )
    k_tile_shape = cached_property[list[int]](lambda c: [c.k_tile_height, c.k_gather_box])
    k_desc_shape = cached_property[list[int]](lambda c: [1, c.k_gather_box])

    # V arrives in two halves of the keys, so that P times V can start on the first.
    v_tile_width = cached_property[int](lambda c: c.V_SMEM_COLS_PER_CTA)
    v_tile_height = cached_property[int](lambda c: c.B_TOPK // 2)
    v_gather_box = cached_property[int](
        lambda c: gather_box(c.v_tile_width, c.v_swizzle_mode, c.qkv_dtype_size)
    )
    v_tile_shape = cached_property[list[int]](lambda c: [c.v_tile_height, c.v_gather_box])
    v_desc_shape = cached_property[list[int]](lambda c: [1, c.v_gather_box])

    q_desc_shape = cached_property[list[int]](
        lambda c: [1, c.NUM_Q_HEADS_PER_CTA, c.q_swizzle_mode // c.qkv_dtype_size]
    )

    # An fp8 cache, in 8-byte words; all keys of V of a step are dequantized together.
    k_tma_tile_width_fp8 = cached_property[int](lambda c: c.qk_depth // GATHER_BYTES)
    k_tma_gather_box_fp8 = cached_property[int](
        lambda c: gather_box(c.k_tma_tile_width_fp8, c.k_tma_swizzle_fp8, GATHER_BYTES)
    )
    k_tma_tile_shape_fp8 = cached_property[list[int]](
        lambda c: [c.k_tile_height, c.k_tma_gather_box_fp8]
    )
    k_tma_desc_shape_fp8 = cached_property[list[int]](lambda c: [1, c.k_tma_gather_box_fp8])
    v_tma_tile_width_fp8 = cached_property[int](lambda c: c.V_BMN_PER_ATOM // GATHER_BYTES)
    v_tma_tile_height_fp8 = cached_property[int](lambda c: c.B_TOPK)
    v_tma_gather_box_fp8 = cached_property[int](
        lambda c: gather_box(c.v_tma_tile_width_fp8, c.v_tma_swizzle_fp8, GATHER_BYTES)
    )
    v_tma_tile_shape_fp8 = cached_property[list[int]](
        lambda c: [c.v_tma_tile_height_fp8, c.v_tma_gather_box_fp8]
    )
    v_tma_desc_shape_fp8 = cached_property[list[int]](lambda c: [1, c.v_tma_gather_box_fp8])


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSparseFP8(MLAPrefillSparse):
    """The same kernel over an fp8 cache: Q and the products stay bf16, the ``_fp8`` boxes load."""
