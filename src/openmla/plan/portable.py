"""PortableConfig: tiles of the plain Triton kernels, for any CUDA or ROCm GPU.

Nothing here is specific to a chip but its shared memory and warp size: candidates are listed best
first, and the first that fits is taken. Widths are padded to powers of two, as tl.dot demands, and
the padding is masked. `smem_used` is an estimate: Triton's compiler has the last word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from openmla.errors import InvalidArgument
from openmla.plan.blackwell_units import ceildiv, require_int, verdict_lines
from openmla.plan.hopper_split import SplitRule, least_keys_per_split
from openmla.plan.target import Target
from openmla.problem import DTYPE_BYTES, FORMS, Form, Problem

MIN_DOT = 16  # tl.dot's least rows and columns
SPARE_REGISTERS = 63  # kept from 255 for addresses and statistics


class Tile(NamedTuple):
    """Rows, keys per step, pipeline stages and warps of a candidate."""

    BM: int
    BN: int
    num_stages: int
    num_warps: int


# Best first. (128, 64, 3, 8): 467 to 502 TFLOP/s, prototype, H200, 128 heads, 192/128, causal,
# s 4096 to 16384. The rest are the next smaller ones, not measured.
DENSE_TILES = (
    Tile(128, 64, 3, 8),
    Tile(128, 64, 2, 8),
    Tile(128, 32, 2, 8),
    Tile(64, 64, 2, 4),
    Tile(64, 32, 2, 4),
    Tile(64, 32, 1, 4),
    Tile(32, 32, 2, 4),
    Tile(32, 32, 1, 4),
    Tile(16, 32, 1, 4),
    Tile(16, 16, 1, 4),
)
LATENT_TILES = (
    Tile(64, 64, 2, 8),
    Tile(64, 32, 3, 8),
    Tile(64, 32, 2, 8),
    Tile(64, 16, 2, 8),
    Tile(32, 32, 2, 4),
    Tile(32, 16, 2, 4),
    Tile(16, 32, 2, 4),
    Tile(16, 16, 2, 4),
    Tile(16, 16, 1, 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableConfig:
    """One block of a plain Triton kernel.

    >>> from openmla.plan.target import target_by_name
    >>> problem = Problem(form="latent", heads=16, d_nope=512, d_rope=64, d_v=512)
    >>> config = select_portable_config(problem, target_by_name("rtx4090"))
    >>> config.BM, config.BN, config.num_stages, config.smem_used
    (32, 16, 2, 74752)
    """

    form: Form
    heads: int
    BM: int
    BN: int
    num_stages: int
    num_warps: int
    nope_cols: int
    tail_cols: int
    """Columns of the part without rope beyond `nope_cols`: 192 is 128 and a tail of 64."""
    rope_cols: int
    v_cols: int
    """Columns of a V tile; 0 where V is a part of the row that K is."""
    out_cols: int
    element: int
    warp: int
    """Lanes of a warp."""
    sm_count: int
    smem_limit: int
    max_registers: int

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidArgument("form", "one of " + ", ".join(FORMS), repr(self.form))
        for name in ("heads", "BM", "BN", "num_stages", "num_warps", "nope_cols", "out_cols"):
            require_int(name, getattr(self, name), 1)

    @property
    def num_threads(self) -> int:
        """Threads per block."""
        return self.num_warps * self.warp

    @property
    def buffers(self) -> int:
        """Copies of a K/V tile in shared memory: on AMD the stage in registers needs none."""
        return max(1, self.num_stages - 1) if self.warp == 64 else self.num_stages

    @property
    def qk_cols(self) -> int:
        """Columns of Q and K with their padding."""
        return self.nope_cols + self.tail_cols + self.rope_cols

    @property
    def split(self) -> SplitRule | None:
        """When a request's keys are split; None for token lists."""
        if self.form == "sparse":
            return None
        dense = self.form == "dense"
        heads_tiles = self.heads if dense else ceildiv(self.heads, self.BM)
        tokens = self.BM if dense else max(1, self.BM // self.heads)
        least = least_keys_per_split((self.qk_cols + self.v_cols) * self.element, self.out_cols)
        return SplitRule(heads_tiles, tokens, least, self.sm_count, self.out_cols, self.BM)

    @property
    def q_bytes(self) -> int:
        """The query tile."""
        return self.BM * self.qk_cols * self.element

    @property
    def stage_bytes(self) -> int:
        """One step of K and V."""
        return self.BN * (self.qk_cols + self.v_cols) * self.element

    @property
    def p_bytes(self) -> int:
        """P, where it changes its layout through shared memory."""
        return self.BM * self.BN * self.element

    @property
    def smem_used(self) -> int:
        """Shared memory of the block, estimated."""
        return self.q_bytes + self.buffers * self.stage_bytes + self.p_bytes

    @property
    def accumulators(self) -> int:
        """Registers per thread of O, scores and P."""
        return ceildiv(self.BM * (2 * self.out_cols + 3 * self.BN), 2 * self.num_threads)

    def supported(self) -> bool:
        """Whether the block fits."""
        return not self.why_unsupported()

    def why_unsupported(self) -> str:
        """The first limit the block breaks, with its arithmetic; empty when it fits."""
        return next(self._broken_limits(), "")

    def _broken_limits(self) -> Iterator[str]:
        most = self.max_registers - SPARE_REGISTERS
        if self.accumulators > most:
            yield (
                f"registers: {self.BM} rows x ({self.out_cols} of O + 1.5 x {self.BN} scores) over "
                f"{self.num_threads} threads = {self.accumulators} > {most}"
            )
        if self.smem_used > self.smem_limit:
            yield f"shared memory: {self._smem_sum()} = {self.smem_used} > {self.smem_limit}"

    def _smem_sum(self) -> str:
        return (
            f"Q {self.q_bytes} + {self.buffers} x {self.stage_bytes} of K and V + P {self.p_bytes}"
        )

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        nope = f"{self.nope_cols}" + (f" + {self.tail_cols}" if self.tail_cols else "")
        columns = f"nope {nope}, rope {self.rope_cols}, V {self.v_cols or 'from K'}"
        lines = [
            f"BM = {self.BM}, BN = {self.BN}, {self.num_stages} stages, {self.num_warps} warps: "
            "the first candidate that fits",
            f"columns, padded to powers of two: {columns}",
            f"registers: {self.accumulators} of {self.max_registers} per thread for O, scores, P",
            f"shared memory (estimate): {self._smem_sum()} = {self.smem_used} of {self.smem_limit}",
        ]
        return lines + verdict_lines(self.why_unsupported())


def portable_candidates(problem: Problem, target: Target) -> Iterator[PortableConfig]:
    """All blocks for a problem, best first, whether they fit or not."""
    dense = problem.form == "dense"
    nope_cols, tail_cols = split_columns(problem.d_nope)
    # FP8 rows are widened before they are multiplied, unless Q is FP8 too and the chip takes it.
    both_fp8 = problem.q_dtype == "e4m3" == problem.kv_dtype and target.has_e4m3
    # A token's list is its own, so no block of the sparse form holds more rows than heads.
    most_rows = padded(problem.heads) if problem.form == "sparse" else DENSE_TILES[0].BM
    tiles = DENSE_TILES if dense else LATENT_TILES
    for tile in (tile for tile in tiles if most_rows >= tile.BM):
        yield PortableConfig(
            form=problem.form,
            heads=problem.heads,
            BM=tile.BM,
            BN=tile.BN,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
            nope_cols=nope_cols,
            tail_cols=tail_cols,
            rope_cols=padded(problem.d_rope) if problem.d_rope else 0,
            v_cols=padded(problem.d_v) if dense else 0,
            out_cols=padded(problem.d_v),
            element=DTYPE_BYTES["e4m3"] if both_fp8 else DTYPE_BYTES["bf16"],
            warp=target.warp,
            sm_count=target.sm_count,
            smem_limit=target.smem_per_block,
            max_registers=target.max_registers_per_thread,
        )


def select_portable_config(problem: Problem, target: Target) -> PortableConfig:
    """The first block that fits; when none does, the smallest, which then says why not."""
    last = None
    for last in portable_candidates(problem, target):
        if last.supported():
            return last
    assert last is not None  # the smallest tile has 16 rows, which every form allows
    return last


def split_columns(width: int) -> tuple[int, int]:
    """A width as one power of two, or as two where that wastes less.

    >>> split_columns(192), split_columns(128), split_columns(448)
    ((128, 64), (128, 0), (512, 0))
    """
    whole = padded(width)
    half = whole // 2
    if half < MIN_DOT or width <= half:
        return whole, 0
    tail = padded(width - half)
    return (half, tail) if half + tail < whole else (whole, 0)


def padded(width: int) -> int:
    """The least power of two that tl.dot takes and that holds `width` columns.

    >>> padded(192), padded(128), padded(5)
    (256, 128, 16)
    """
    return max(MIN_DOT, 1 << (width - 1).bit_length())
