"""How wide a key tile is, and which tensor-memory columns it uses.

`FA4Shape` holds what the caller asked for, checked once. `Tile` follows from it: BN keys per
step, as many as tensor memory leaves room for beside the output accumulators.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from openmla.arithmetic import require_divisor, require_int, round_down, round_up
from openmla.errors import InvalidArgument
from openmla.modular.blackwell.units import (
    HALF_FLOATS,
    MAX_MMA_N,
    MBAR_BYTES,
    NUM_THREADS,
    OPERAND_DTYPES,
    SCALE_DTYPES,
    SMEM_CARVEOUT,
    TMEM_COLS,
    dtype_size,
    optional_dtype,
    require_dtype,
    require_page_size,
    require_swizzle,
)

BLOCK_ROWS = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class FA4Shape:
    """The arguments of an attention plan, and what follows from them alone.

    The first eleven are the problem; the rest choose a variant of the kernel: ``BM`` query rows
    (256 is two tiles of 128, called 2Q), ``nope_depth`` when K's part without rope is not as wide
    as V, ``single_o`` for one output accumulator instead of two, ``bn_cap`` to narrow the key
    tile, ``pinned_qk_stages`` to fix the stages of K instead of deriving them, ``cross_stage_p``
    for ten extra barriers that let P of one stage overlap the next.
    """

    qkv_dtype: str
    rope_dtype: str | None = None
    scale_dtype: str | None = None
    num_q_heads: int
    group: int
    qk_depth: int
    ov_depth: int
    swizzle_mode: int
    page_size: int
    is_mla: bool
    pair_cta: bool = False
    BM: int = 256
    nope_depth: int = -1
    single_o: bool = False
    bn_cap: int = 0
    pinned_qk_stages: int = 0
    cross_stage_p: bool = False

    mbar_size: ClassVar[int] = MBAR_BYTES
    num_correction_cols: ClassVar[int] = 1
    num_threads: ClassVar[int] = NUM_THREADS
    num_pv_stages: ClassVar[int] = 2
    sm100_smem_carveout: ClassVar[int] = SMEM_CARVEOUT
    sm100_tmem_cols: ClassVar[int] = TMEM_COLS

    def __post_init__(self) -> None:
        require_dtype("qkv_dtype", self.qkv_dtype, OPERAND_DTYPES)
        require_divisor("group", self.group, "num_q_heads", self.num_q_heads)
        require_page_size(self.page_size)
        self._normalize()
        self._check_depths()

    def _normalize(self) -> None:
        """Rewrites the spellings that mean the same, so that equal plans compare equal."""
        put = partial(object.__setattr__, self)
        put("rope_dtype", optional_dtype("rope_dtype", self.rope_dtype, OPERAND_DTYPES))
        put("scale_dtype", optional_dtype("scale_dtype", self.scale_dtype, SCALE_DTYPES))
        put("swizzle_mode", require_swizzle("swizzle_mode", self.swizzle_mode))
        put("nope_depth", self.ov_depth if self.nope_depth == -1 else self.nope_depth)
        # Two query tiles need an accumulator each, so one accumulator is a 1Q choice.
        put("single_o", self.single_o and self.num_qo == 1)

    def _check_depths(self) -> None:
        require_int("qk_depth", self.qk_depth, 1)
        require_int("ov_depth", self.ov_depth, 1)
        require_int("nope_depth", self.nope_depth, 1)
        require_int("bn_cap", self.bn_cap, 0)
        require_int("pinned_qk_stages", self.pinned_qk_stages, 0)
        if self.BM not in BLOCK_ROWS:
            raise InvalidArgument("BM", f"one of {BLOCK_ROWS} query rows", self.BM)
        if self.qk_depth < self.nope_depth:
            rope = f"{self.qk_depth} - {self.nope_depth} = {self.qk_depth - self.nope_depth}"
            expected = f"at least the {self.nope_depth} columns without rope"
            raise InvalidArgument("qk_depth", expected, f"{self.qk_depth} (rope = {rope})")

    @cached_property
    def num_qo(self) -> int:
        """Query tiles per block."""
        return 2 if self.BM == 256 else 1

    @cached_property
    def num_kv_heads(self) -> int:
        return self.num_q_heads // self.group

    @cached_property
    def qkv_dtype_size(self) -> int:
        return dtype_size(self.qkv_dtype)

    @cached_property
    def rope_dtype_size(self) -> int:
        """Bytes of an element; 0 where rope has no dtype of its own."""
        return dtype_size(self.rope_dtype)

    @cached_property
    def scale_dtype_size(self) -> int:
        """Bytes of an element; 0 without scales."""
        return dtype_size(self.scale_dtype)

    @cached_property
    def MMA_K(self) -> int:
        """Columns one MMA step consumes: always 32 bytes, and 16 two-byte floats."""
        return 16 if self.qkv_dtype in HALF_FLOATS else 32

    @cached_property
    def MMA_M(self) -> int:
        """Rows of one MMA: a CTA pair shares a 256-row one, small blocks use a small one."""
        return 256 if self.pair_cta else min(self.BM, 128)

    @cached_property
    def packs_rows(self) -> bool:
        """Whether the MMA has at most 64 rows, and so leaves lanes of tensor memory over."""
        return not self.pair_cta and self.MMA_M <= 64

    @cached_property
    def m_pack(self) -> int:
        """Parts of a score tile that lie side by side in the lanes of one column."""
        return 128 // self.MMA_M if self.packs_rows else 1

    @cached_property
    def fuse_gqa(self) -> bool:
        """Whether the heads of a group share the rows of a tile; in MLA each has its own block."""
        return self.group > 1 and self.MMA_M % self.group == 0 and not self.is_mla

    @cached_property
    def padded_qk_depth(self) -> int:
        """Columns of Q and K in shared memory."""
        return self._pad(self.qk_depth)

    @cached_property
    def padded_ov_depth(self) -> int:
        """Columns of V in shared memory, and of an output accumulator."""
        return self._pad(self.ov_depth)

    @cached_property
    def padded_nope_depth(self) -> int:
        """Columns of K in shared memory without its rope."""
        return self._pad(self.nope_depth)

    def _pad(self, depth: int) -> int:
        """TMA moves whole swizzle spans: 80 bf16 columns at 128 bytes (64 columns) take 128."""
        return round_up(depth, self.swizzle_mode // self.qkv_dtype_size)

    def shared_kv_cols(self) -> int:
        """Columns of a slot that can hold a K tile without rope or a V tile."""
        return max(self.padded_nope_depth, self.padded_ov_depth)

    def rope_depth(self) -> int:
        """Rope columns of Q and K; 0 for plain attention."""
        return self.padded_qk_depth - self.padded_nope_depth


@dataclass(frozen=True)
class Tile:
    """BN and the tensor-memory map: two score tiles first, then the output accumulators.

    DeepSeek-V3 (V 128 wide, 2Q): S0 at 0, S1 at 128, O0 at 256, O1 at 384, 512 columns used.
    P overwrites the score tile it came from, and the correction columns sit behind P, which as
    two-byte values needs half of S's columns.
    """

    BN: int
    TMEM_S1: int
    TMEM_O0: int
    TMEM_O1: int
    tmem_used: int

    TMEM_P0: ClassVar[int] = 0

    @property
    def TMEM_P1(self) -> int:
        return self.TMEM_S1

    @cached_property
    def TMEM_C0(self) -> int:
        return self.TMEM_P0 + self.BN // 2

    @cached_property
    def TMEM_C1(self) -> int:
        return self.TMEM_P1 + self.BN // 2


def plan_tile(shape: FA4Shape) -> Tile:
    """The widest key tile the shape allows, and its columns."""
    BN = choose_bn(shape)
    s_cols = BN // shape.m_pack
    o0 = 2 * s_cols
    o1 = o0 if shape.single_o else o0 + shape.padded_ov_depth
    return Tile(BN, s_cols, o0, o1, o1 + shape.padded_ov_depth)


def choose_bn(shape: FA4Shape) -> int:
    """Keys per tile; 0 when the accumulators leave no column for scores.

    DeepSeek-V3: (512 - 2 x 128) / 2 = 128. GLM-5 in bf16 with one accumulator: (512 - 256) / 2
    = 128 columns, which shared memory cannot feed, so its caller caps BN at 64.
    """
    BN = min(MAX_MMA_N, _in_mma_steps(shape, tmem_limit(shape)))
    if shape.bn_cap:
        BN = min(BN, _in_mma_steps(shape, shape.bn_cap))
    return _fit_pages(BN, shape.page_size) if BN > 0 else 0


def tmem_limit(shape: FA4Shape) -> int:
    """Keys whose two score tiles fit beside the accumulators; negative when those overflow.

    Each accumulator is charged the wider of nope and V, because a K/V slot has that width too.
    """
    accumulators = 1 if shape.single_o else 2
    return (TMEM_COLS - accumulators * shape.shared_kv_cols()) // 2 * shape.m_pack


def _in_mma_steps(shape: FA4Shape, keys: int) -> int:
    """P times V walks the keys MMA_K at a time, so a tile holds whole steps."""
    return round_down(keys, shape.MMA_K)


def _fit_pages(BN: int, page_size: int) -> int:
    """A tile is whole pages or a part of one; a power of two is either, for usual pages."""
    if page_size == 0 or divides_either_way(BN, page_size):
        return BN
    return 1 << (BN.bit_length() - 1)


def divides_either_way(a: int, b: int) -> bool:
    """Whether one of two positive numbers is a multiple of the other."""
    return a % b == 0 or b % a == 0


def explain_tile(shape: FA4Shape, tile: Tile) -> list[str]:
    """Lines that say which limit bound BN and where the tensor-memory columns went."""
    packed = f", {shape.m_pack} parts of a tile per column" if shape.m_pack > 1 else ""
    lines = [
        f"tensor memory: {tmem_sum(shape)}{packed}: at most {max(0, tmem_limit(shape))} keys",
        f"BN = {tile.BN}: bound by {bn_bound(shape, tile.BN)}",
    ]
    if tile.BN:
        two = f"O0 at {tile.TMEM_O0}, O1 at {tile.TMEM_O1}"
        outputs = f"O at {tile.TMEM_O0}" if shape.single_o else two
        lines.append(
            f"columns: S0 at 0, S1 at {tile.TMEM_S1}, {outputs}; {tile.tmem_used} of {TMEM_COLS}"
        )
    return lines


def tmem_sum(shape: FA4Shape) -> str:
    """The subtraction that leaves columns for scores."""
    accumulators = 1 if shape.single_o else 2
    width = shape.shared_kv_cols()
    left = TMEM_COLS - accumulators * width
    return f"{TMEM_COLS} columns - {accumulators} x {width} output = {left} for two score tiles"


def bn_bound(shape: FA4Shape, BN: int) -> str:
    """The limit that made BN what it is."""
    tmem = _in_mma_steps(shape, tmem_limit(shape))
    cap = _in_mma_steps(shape, shape.bn_cap) if shape.bn_cap else MAX_MMA_N
    tightest = min(tmem, cap, MAX_MMA_N)
    if 0 < BN < tightest:
        return f"pages of {shape.page_size} (neither it nor {tightest} divides the other)"
    if tightest == tmem:
        return f"tensor memory, in MMA steps of {shape.MMA_K} keys"
    if tightest == MAX_MMA_N:
        return f"the widest MMA, {MAX_MMA_N} columns"
    return f"bn_cap {shape.bn_cap}"
