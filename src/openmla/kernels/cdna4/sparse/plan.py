"""MlaSparse16: a block of the latent prefill on CDNA4, over lists of rows or pages. Our own design.

64 rows of scores (heads of one token, or of a sequence's tokens), 64 gathered rows at a time. The
queries stay in registers (72 of a lane's 256), the rows in LDS serve both products:

    latent ring   2 × 66560   = 133120     64 rows × 512 columns × 2 B, 16 B of padding per row
    rope ring     2 ×  8192   =  16384     64 rows × 64 columns × 2 B
    index ring    2 ×   256   =    512     64 indices × 4 B
                                150016     of 163840; the rest is the compiler's for exchanging P

Rows of 256 columns take half of the latent ring; P and registers leave room for one block all the
same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.arithmetic import Limited
from openmla.kernels.cdna4.lds import LatentSlot
from openmla.modular.cdna4.prefill import LDS_BYTES
from openmla.planning.latent_split import LatentSplit, RangeSpace, range_space
from openmla.problem import Problem

ROPE_COLUMNS = 64
#: Rows whose weights pass from the waves of the scores to those of the output at once.
STRIP_ROWS = 32
_DTYPES = ("bfloat16", "float16")
_WHOLE = RangeSpace(group=1, rows=0, merged=0, ranges=1)
"""Room for partial results where no keys are split."""


@dataclass(frozen=True, slots=True)
class RowsVariant:
    """The launches of a call over latent rows."""

    ranges: RangeSpace | None
    """How its sequences are split and grouped; None for lists, which are never split."""
    slots: int
    """Programs of a sequence that may be split: one for each tile of each of its ranges."""


@dataclass(frozen=True, kw_only=True)
class MlaSparse16(Limited):
    """The block. Rows that are stored as FP8 are dequantized to 16 bits on their way to LDS.

    >>> block = MlaSparse16(num_heads=128, latent=512, rope=64, dtype="bfloat16")
    >>> block.row_blocks, block.smem_used, block.launch_smem_used, block.supported()
    (2, 150016, 154112, True)
    """

    num_heads: int
    latent: int
    rope: int
    dtype: str
    """What is multiplied: bfloat16 or float16."""
    dequantized: bool = False
    """Whether rows are dequantized from FP8."""
    gather: str = "indices"
    """Where rows come from: the "indices" of a token's list, a sequence's "pages", or one or two
    "sources", each a list or a span."""
    BM: int = 64
    """Heads of one block."""
    B_TOPK: int = 64
    """Rows gathered at a time."""
    num_kv_stages: int = 2
    num_warps: int = 8

    @cached_property
    def row_blocks(self) -> int:
        """Blocks of a token."""
        return -(-self.num_heads // self.BM)

    @cached_property
    def latent_slot(self) -> LatentSlot:
        """Where the bytes of a slot of latent rows lie."""
        return LatentSlot(self.B_TOPK, self.num_warps, self.latent)

    @cached_property
    def rope_bytes(self) -> int:
        return self.B_TOPK * ROPE_COLUMNS * 2 if self.rope else 0

    @cached_property
    def index_bytes(self) -> int:
        return 4 * self.B_TOPK

    @cached_property
    def smem_used(self) -> int:
        """LDS of the rings."""
        stage = self.latent_slot.slot_bytes + self.rope_bytes + self.index_bytes
        return self.num_kv_stages * stage

    @cached_property
    def p_bytes(self) -> int:
        """One strip of P on its way between waves."""
        return self.BM * STRIP_ROWS * 2

    @cached_property
    def launch_smem_used(self) -> int:
        """LDS that the compiler asks for."""
        return self.smem_used + self.p_bytes

    @property
    def split(self) -> LatentSplit:
        """When the keys of a sequence are split."""
        return LatentSplit(self.num_heads, self.latent)

    def variant(self, problem: Problem) -> RowsVariant:
        """The launches that a problem takes."""
        if self.gather != "pages":
            return RowsVariant(None, 0)
        if problem.window:
            return RowsVariant(_WHOLE, 0)
        space = range_space(self.split, problem)
        slots = self.split.slots(problem.most_keys, self.BM) if space.rows else 0
        return RowsVariant(space, slots)

    def explain(self) -> list[str]:
        """How the LDS is filled, and whether the block can run."""
        slot = self.latent_slot
        tile = f"{self.BM} rows of scores, {self.num_heads} per token"
        if self.gather != "pages":
            tile = f"1 token × {self.BM} heads ({self.row_blocks} blocks per token)"
        lines = [
            f"block: {tile}, {self.B_TOPK} rows at a time, {self.num_warps} waves, {self.dtype}",
            "Q: in registers",
            f"rows: {self.num_kv_stages} slots × ({slot.rows} × {slot.slot_bytes // slot.rows} B "
            f"+ rope {ROPE_COLUMNS * 2 if self.rope else 0} B + index 4 B) = {self.smem_used} of "
            f"{LDS_BYTES}",
            "rows: dequantized from FP8 on their way to LDS"
            if self.dequantized
            else "rows: as stored",
        ]
        if self.gather == "sources":
            lines.append("sources: one after the other in one softmax, each with its own pages")
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_limits(self) -> Iterator[str]:
        if self.dtype not in _DTYPES:
            yield f"dtype {self.dtype}: this block multiplies {' and '.join(_DTYPES)}"
        if self.latent not in LatentSlot.widths:
            widths = " or ".join(map(str, LatentSlot.widths))
            yield f"latent {self.latent}: a wave copies rows of {widths} columns"
        if self.rope not in (0, ROPE_COLUMNS):
            yield f"rope of {self.rope} columns: the block multiplies 0 or {ROPE_COLUMNS}"
        if self.launch_smem_used > LDS_BYTES:
            yield f"LDS: {self.launch_smem_used} > {LDS_BYTES}"
