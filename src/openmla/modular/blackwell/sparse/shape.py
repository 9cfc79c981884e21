"""The arguments of a sparse MLA block, and the geometry every part of its plan shares.

One query token per CTA group: all its heads are the rows of the MMA, its top-k latent rows the
keys, B_TOPK of them per step. With 128 heads two CTAs work as a pair, each on half the heads,
half the keys of K and half the columns of V; up to 64 heads fit one CTA.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Limit, require_divisor, require_int
from openmla.errors import InvalidArgument
from openmla.modular.blackwell.units import HALF_FLOATS, dtype_size, require_dtype

LATENT_ROW = 576  # 512 latent columns and 64 of rope
LATENT_V = 512
PAIR_HEADS = 128
HEAD_STEP = 8
CTA_HEADS = 64  # fewest rows of an MMA; fewer heads run as a tile padded to this
MASK_BITS_PER_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class SparseShape:
    """What the caller asked for, checked once.

    ``b_topk`` keys per step, ``num_mbars`` steps in flight; the first ``q_smem_depth`` columns of
    Q stay in shared memory, the other ``q_tmem_depth`` move to tensor memory; ``indices_stride``
    indices per token.
    """

    num_q_heads: int
    indices_stride: int
    cta_group: int = 2
    b_topk: int = 128
    num_mbars: int = 2
    q_smem_depth: int = 192
    q_tmem_depth: int = 384
    qk_depth: int = 576
    v_depth: int = 512
    num_kv_heads: int = 1
    qkv_dtype: str = "bfloat16"

    NUM_SV_ATOMS: ClassVar[int] = 2
    """P times V writes two column halves, "atoms": one MMA writes at most 256 of 512 columns."""
    O_TMEM_ADDR: ClassVar[int] = 0
    INDICES_PER_LANE: ClassVar[int] = MASK_BITS_PER_BYTE

    def __post_init__(self) -> None:
        require_dtype("qkv_dtype", self.qkv_dtype, self._operand_dtypes())
        require_divisor("num_kv_heads", self.num_kv_heads, "num_q_heads", self.num_q_heads)
        for name in ("indices_stride", "num_mbars", "q_smem_depth", "q_tmem_depth", "v_depth"):
            require_int(name, getattr(self, name), 1)
        self._check_split()
        self._check_depths()

    @staticmethod
    def _operand_dtypes() -> tuple[str, ...]:
        return HALF_FLOATS

    def _check_split(self) -> None:
        if self.cta_group not in (1, 2):
            raise InvalidArgument("cta_group", "1 or 2 CTAs", repr(self.cta_group))
        require_divisor("cta_group", self.cta_group, "num_q_heads", self.num_q_heads)
        require_int("b_topk", self.b_topk, 1)
        step = MASK_BITS_PER_BYTE * self.cta_group
        if self.b_topk % step:
            why = f"bytes of {MASK_BITS_PER_BYTE} mask bits, {self.cta_group} CTAs"
            raise InvalidArgument("b_topk", f"a multiple of {step} keys ({why})", self.b_topk)

    def _check_depths(self) -> None:
        require_int("qk_depth", self.qk_depth, 1)
        if self.qk_depth <= self.v_depth:
            rope = f"rope = {self.qk_depth} - {self.v_depth} = {self.qk_depth - self.v_depth}"
            expected = f"more than the {self.v_depth} latent columns of V"
            raise InvalidArgument("qk_depth", expected, f"{self.qk_depth} ({rope})")
        self._check_q_split()

    def _check_q_split(self) -> None:
        split = self.q_smem_depth + self.q_tmem_depth
        if split != self.qk_depth:
            expected = f"q_smem_depth + q_tmem_depth = qk_depth {self.qk_depth}"
            got = f"{self.q_smem_depth} + {self.q_tmem_depth} = {split}"
            raise InvalidArgument("q_smem_depth", expected, got)

    def arguments(self) -> dict[str, Any]:
        """What this was made from, to make another view of the same block."""
        return {field.name: getattr(self, field.name) for field in fields(SparseShape)}

    @cached_property
    def qkv_dtype_size(self) -> int:
        return dtype_size(self.qkv_dtype)

    @cached_property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def B_TOPK(self) -> int:
        return self.b_topk

    @cached_property
    def padded_num_q_heads(self) -> int:
        """Rows of the MMA: the heads, or 64 when there are fewer."""
        return max(self.num_q_heads, CTA_HEADS)

    @cached_property
    def B_TOPK_PER_CTA(self) -> int:
        """Keys of K that one CTA gathers."""
        return self.b_topk // self.cta_group

    @cached_property
    def NUM_Q_HEADS_PER_CTA(self) -> int:
        """Heads that one CTA loads and stores."""
        return self.num_q_heads // self.cta_group

    @cached_property
    def PADDED_HEADS_PER_CTA(self) -> int:
        """Rows that one CTA computes."""
        return self.padded_num_q_heads // self.cta_group

    @cached_property
    def SV_ATOM_MMA_N(self) -> int:
        """Columns of an atom, over the whole CTA group."""
        return self.v_depth // self.NUM_SV_ATOMS

    @property
    def V_DEPTH_PER_CTA(self) -> int:
        return self.SV_ATOM_MMA_N

    @cached_property
    def V_BMN_PER_ATOM(self) -> int:
        """Columns of an atom that one CTA holds in shared memory."""
        return self.SV_ATOM_MMA_N // self.cta_group

    @cached_property
    def V_SMEM_COLS_PER_CTA(self) -> int:
        """Columns of V that one CTA holds in shared memory."""
        return self.V_BMN_PER_ATOM * self.NUM_SV_ATOMS

    @cached_property
    def O_ATOM_PHYS_COLS(self) -> int:
        """Tensor-memory columns of an atom: 64 rows use half the lanes, so two columns share."""
        return self.SV_ATOM_MMA_N // 2

    @cached_property
    def O_TMEM_ADDR_ATOM2(self) -> int:
        return self.O_TMEM_ADDR + self.O_ATOM_PHYS_COLS

    @cached_property
    def CTA_MASK(self) -> int:
        """The CTAs that a finished MMA signals, a bit each."""
        return (1 << self.cta_group) - 1

    @cached_property
    def MASK_BYTES_PER_BUF(self) -> int:
        """A bit for each key of a step: its index names a row, and counts for this token."""
        return self.B_TOPK // MASK_BITS_PER_BYTE

    @property
    def NUM_KV_VALID_LANES(self) -> int:
        """Lanes that write the mask, a byte each."""
        return self.MASK_BYTES_PER_BUF

    @cached_property
    def q_tile_shape(self) -> list[int]:
        return [1, self.NUM_Q_HEADS_PER_CTA, self.qk_depth]

    @cached_property
    def o_tile_shape(self) -> list[int]:
        return [self.NUM_Q_HEADS_PER_CTA, self.v_depth]

    @cached_property
    def o_desc_shape(self) -> list[int]:
        return [self.NUM_Q_HEADS_PER_CTA, 64]


def _heads_ok(shape: SparseShape) -> bool:
    heads = shape.num_q_heads
    if shape.cta_group == 2:
        return heads == PAIR_HEADS
    return heads % HEAD_STEP == 0 and heads <= CTA_HEADS


# What every sparse kernel asks of its problem.
SHAPE_LIMITS: tuple[Limit[SparseShape], ...] = (
    Limit(
        lambda c: c.qk_depth == LATENT_ROW and c.v_depth == LATENT_V,
        lambda c: (
            f"rows of {c.qk_depth} with {c.v_depth} of V; the kernel reads rows of {LATENT_ROW} "
            f"with {LATENT_V}"
        ),
    ),
    Limit(
        lambda c: c.num_kv_heads == 1,
        lambda c: f"{c.num_kv_heads} latent heads; all query heads share one",
    ),
    Limit(
        _heads_ok,
        lambda c: (
            f"{c.num_q_heads} heads on {c.cta_group} CTA(s): a pair serves {PAIR_HEADS}, one CTA "
            f"a multiple of {HEAD_STEP} up to {CTA_HEADS}"
        ),
    ),
)
