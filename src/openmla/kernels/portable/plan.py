"""PortableConfig: tiles of the plain Triton kernels, for any CUDA or ROCm GPU.

A tile that won a measurement on the chip (tuned/) comes first; after it, nothing is specific to
a chip but its shared memory and warp size: candidates are listed best first, and the first that
fits is taken. Widths are padded to powers of two, as tl.dot demands, and the padding is masked.
`smem_used` is an estimate: Triton's compiler has the last word.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.arithmetic import Limited, ceildiv, require_int, verdict_lines
from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import BF16, FORMATS, V4
from openmla.kernels.portable.tuned import Tile, tuned_tile
from openmla.planning import latent_split, split
from openmla.planning.dequantize import (
    PLAIN,
    CacheRead,
    mean_length,
    paged_cache_read,
    sparse_cache_read,
)
from openmla.planning.latent_split import FixedSplit, LatentSplit
from openmla.planning.split import SplitRule, least_keys_per_split
from openmla.planning.target import Target
from openmla.problem import DTYPE_BYTES, FORMS, Form, Problem

MIN_DOT = 16  # tl.dot's least rows and columns
FIRST_BULK_COPIES = 90  # NVIDIA's first architecture with them
ALWAYS_WIDEN = 128 * 1024 * 1024  # bytes that are dequantized in some 60 us
MIN_WGMMA = 64  # rows of Hopper's asynchronous products
# Columns of V that each of the warps beside each other must have in such a product. With fewer,
# Triton 3.6.0 reads past the end of shared memory (64 rows, 8 warps, 64 columns; 128 rows, 8 warps,
# 16 or 32 columns beside wider keys), or gives wrong sums; H200, 2026-11-15.
LEAST_COLUMNS = 64
# What the compiler adds: barriers and padding, and more of it where operands come in two terms.
# Triton 3.6.0, sm_90, latent 512 + 64: 230400 bytes for an estimate of 229376; fp16: 315648.
SCRATCH, SCRATCH_OF_TERMS = 1024, 4352
# Bytes of a key in each stage beside its bf16 columns where V holds e4m3 and bf16 columns of a row:
# the compiler keeps both until they are joined. Triton 3.6.0, sm_80 to sm_120: 704 to 754.
JOINED = 768
# Most keys of a step over FP4 rows, whose columns are joined from the halves of bytes: with 64,
# 5.8 KB of registers are spilled (Triton 3.7.1, sm_80, 512 columns, 4 warps).
FP4_KEYS = 32
SPARE_REGISTERS = 63  # kept from 255 for addresses and statistics
PARTIAL_STATE = 2  # numbers beside the columns of a partial row: its maximum and its sum
GROUP_HEADS = 4  # heads of the dense form side by side: 1, 2, 8 and 16 are slower on an H200

# Best first, for chips without measured tiles: the winners of the H200, then the next smaller ones.
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
    Tile(16, 64, 2, 4),
    Tile(16, 32, 2, 4),
    Tile(16, 16, 2, 4),
    Tile(16, 16, 1, 4),
)


@dataclass(frozen=True, slots=True)
class SplitSpace:
    """Room for the partial results of requests whose keys are split into ranges."""

    slots: int
    """Most partial tiles of a request."""
    tiles: int
    """Most tiles of a request that is split."""
    group: int
    """Requests of one launch, so that the workspace stays within its cap."""
    tokens: int = 0
    """Tokens of one launch of an invariant call, whose slots are the most ranges of a request; 0 in
    others."""


@dataclass(frozen=True, slots=True)
class PortableVariant:
    """The launches of a call."""

    dequantizes: bool
    """An FP8 cache is dequantized to bf16 first."""
    split: SplitSpace | None
    """Keys of some requests may be split: after the launch over whole requests, each group of
    requests has a launch over ranges and a merge."""


@dataclass(frozen=True, kw_only=True)
class PortableConfig(Limited):
    """One block of a plain Triton kernel.

    >>> from openmla.planning.target import target_by_name
    >>> problem = Problem(form="latent", heads=16, d_nope=512, d_rope=64, d_v=512)
    >>> config = select_portable_config(problem, target_by_name("rtx4090"))
    >>> config.BM, config.BN, config.num_stages, config.smem_used
    (32, 16, 2, 75776)
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
    bulk_copies: bool = False
    """Whether K, rope and V of the dense form are read through tensor descriptors."""
    branches: bool = False
    """Whether the arithmetic of rows is wrapped in branches, which helps Triton on Hopper."""
    group_heads: int = GROUP_HEADS
    """Heads of the dense form that run side by side and share L2."""
    terms: int = 1
    """bf16 terms that an operand is the sum of: 2 where fp16 queries meet rows that are bf16."""
    joins: bool = False
    """Whether V is e4m3 and bf16 columns of the rows of a cache."""
    cache_read: CacheRead = PLAIN
    """How an FP8 cache is dequantized."""
    invariant: bool = False
    """Whether the ranges of keys are fixed, whatever the rows of a request."""
    range_keys: int = 0
    """Keys of a fixed range; 0: FIXED_RANGE."""
    measured: str = ""
    """The measurement that chose the tile; empty when it is the first candidate that fits."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidArgument("form", "one of " + ", ".join(FORMS), repr(self.form))
        for name in ("heads", "BM", "BN", "num_stages", "num_warps", "nope_cols", "out_cols"):
            require_int(name, getattr(self, name), 1)

    @cached_property
    def num_threads(self) -> int:
        return self.num_warps * self.warp

    @cached_property
    def buffers(self) -> int:
        """Copies of a K/V tile in shared memory: on AMD the stage in registers needs none."""
        return max(1, self.num_stages - 1) if self.warp == 64 else self.num_stages

    @cached_property
    def qk_cols(self) -> int:
        """Columns of Q and K with their padding."""
        return self.nope_cols + self.tail_cols + self.rope_cols

    @cached_property
    def q_bytes(self) -> int:
        """Bytes of the query tile."""
        return self.BM * self.qk_cols * self.element

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of one step of K and V."""
        joined = JOINED if self.joins and self.warp == 32 else 0
        return self.BN * ((self.qk_cols + self.v_cols) * self.element + joined)

    @cached_property
    def p_bytes(self) -> int:
        """Bytes of P, which changes its layout in shared memory."""
        return self.BM * self.BN * self.element

    @cached_property
    def smem_used(self) -> int:
        """Shared memory of the block, estimated."""
        return self.q_bytes + self.buffers * self.stage_bytes + self.p_bytes + self.scratch_bytes

    @cached_property
    def accumulators(self) -> int:
        """Registers per thread of O, scores and P."""
        return ceildiv(self.BM * (2 * self.out_cols + 3 * self.BN), 2 * self.num_threads)

    @cached_property
    def warps_beside(self) -> int:
        """Warps that share rows of an asynchronous product, and so divide its columns."""
        return 1 if self.BM < MIN_WGMMA else max(1, 16 * self.num_warps // self.BM)

    @property
    def split(self) -> SplitRule | LatentSplit | FixedSplit | None:
        """When a request's keys are split; None for token lists."""
        if self.form == "dense":
            least = least_keys_per_split((self.qk_cols + self.v_cols) * self.element, self.out_cols)
            return SplitRule(self.heads, self.BM, least, self.sm_count, self.out_cols, self.BM)
        if self.form != "latent":
            return None
        if self.invariant:
            return FixedSplit(self.heads, self.out_cols, self.range_keys)
        return LatentSplit(self.heads, self.out_cols)

    def variant(self, problem: Problem) -> PortableVariant:
        """The launches that a problem takes: the only place that decides."""
        return PortableVariant(self.cache_read.mode == "workspace", self._split_space(problem))

    def _split_space(self, problem: Problem) -> SplitSpace | None:
        """None where no request can be split."""
        rule, most_keys = self.split, problem.most_keys
        if rule is None or not problem.batch or not problem.total_k:
            return None
        if isinstance(rule, FixedSplit):  # numbered from the first key, with a window too
            ranges = rule.ranges(most_keys)
            tokens = min(rule.tokens_together(most_keys), problem.total_q)
            return SplitSpace(ranges, 0, problem.batch, tokens) if ranges > 1 else None
        most_keys = self._most_split_keys(problem)
        if isinstance(rule, LatentSplit):
            if not rule.can_split(most_keys):
                return None
            slots = rule.slots(most_keys, self.BM)
            rows = rule.split_rows(1, latent_split.MOST_PART_ROWS // 2, most_keys)
            tiles = ceildiv(rows, self.BM)
        else:
            if most_keys < 2 * rule.min_keys or not rule.longest_split_chunk:
                return None
            slots = rule.programs
            tiles = slots // 4  # a request that is split leaves half of the SMs idle
        one = slots * self.BM * (self.out_cols + PARTIAL_STATE) * split.FP32
        return SplitSpace(slots, tiles, min(problem.batch, max(1, split.PARTIAL_CAP // one)))

    def _most_split_keys(self, problem: Problem) -> int:
        """Most keys that a request that is split can see: with a window, those of its queries, of
        which it has few, from where a whole step begins."""
        if not problem.window:
            return problem.most_keys
        queries = latent_split.MOST_PART_ROWS // self.heads
        if isinstance(self.split, SplitRule):
            queries = self.split.longest_split_chunk
        most = problem.keys_seen(queries, problem.most_keys) + split.KEY_STEP - 1
        return min(most, problem.most_keys)

    @property
    def scratch_bytes(self) -> int:
        """Second terms of Q and P (of Q's rope columns in the dense form), and the compiler's."""
        if self.terms == 1:
            return SCRATCH
        if self.form == "dense":
            return SCRATCH_OF_TERMS + self.BM * self.rope_cols * self.element
        return SCRATCH_OF_TERMS + self.q_bytes + self.p_bytes

    def _broken_limits(self) -> Iterator[str]:
        if self.BM >= MIN_WGMMA and self.out_cols // self.warps_beside < LEAST_COLUMNS:
            yield (
                f"columns: {self.out_cols} of V over {self.warps_beside} warp(s) beside each other "
                f"= {self.out_cols // self.warps_beside} < {LEAST_COLUMNS}"
            )
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
            f"Q {self.q_bytes} + {self.buffers} x {self.stage_bytes} of K and V + P {self.p_bytes} "
            f"+ {self.scratch_bytes} of scratch"
        )

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        nope = f"{self.nope_cols}" + (f" + {self.tail_cols}" if self.tail_cols else "")
        columns = f"nope {nope}, rope {self.rope_cols}, V {self.v_cols or 'from K'}"
        lines = [
            f"BM = {self.BM}, BN = {self.BN}, {self.num_stages} stages, {self.num_warps} warps: "
            + (f"measured, {self.measured}" if self.measured else "the first candidate that fits"),
            f"columns, padded to powers of two: {columns}",
            f"registers: {self.accumulators} of {self.max_registers} per thread for O, scores, P",
            f"shared memory (estimate): {self._smem_sum()} = {self.smem_used} of {self.smem_limit}",
        ]
        if self.form == "dense":
            how = "bulk copies" if self.bulk_copies else "pointers"
            lines.append(f"K and V through {how}; {self.group_heads} heads side by side share L2")
        if self.cache_read != PLAIN:
            lines.append(self.cache_read.explain())
        return lines + verdict_lines(self.why_unsupported())


def portable_candidates(problem: Problem, target: Target) -> Iterator[PortableConfig]:
    """All blocks for a problem, best first, whether they fit or not."""
    dense = problem.form == "dense"
    # In a latent row all columns without rope are V too, so they are one tile.
    nope_cols, tail_cols = split_columns(problem.d_nope) if dense else (padded(problem.d_nope), 0)
    for tile, measured in _tiles(problem, target):
        yield PortableConfig(
            form=problem.form,
            heads=problem.heads,
            BM=tile.BM,
            BN=tile.BN,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
            nope_cols=nope_cols,
            tail_cols=tail_cols,
            rope_cols=padded(problem.d_rope),
            v_cols=padded(problem.d_v) if dense else 0,
            out_cols=padded(problem.d_v) if dense else nope_cols,
            # FP8 operands are dequantized before they are multiplied: all tiles have 16 bits.
            element=DTYPE_BYTES["bf16"],
            warp=target.warp,
            sm_count=target.sm_count,
            smem_limit=target.smem_per_block,
            max_registers=target.max_registers_per_thread,
            bulk_copies=_bulk_copies(problem, target),
            branches=_branches(problem, target, tile),
            terms=_terms(problem),
            joins=_joins(problem),
            cache_read=_cache_read(problem, tile, _branches(problem, target, tile)),
            invariant=problem.invariant,
            range_keys=problem.range_keys,
            measured=measured,
        )


def _tiles(problem: Problem, target: Target) -> Iterator[tuple[Tile, str]]:
    """Tiles in the order they are tried, the measured one first."""
    tuned = tuned_tile(target.name, problem.form, problem.heads)
    most_keys = FP4_KEYS if _has_fp4(problem) else DENSE_TILES[0].BM
    if tuned is not None and most_keys >= tuned.tile.BN:
        yield tuned.tile, tuned.measured
    # A token's list is its own, so no block of the sparse form holds more rows than heads.
    most_rows = padded(problem.heads) if problem.form == "sparse" else DENSE_TILES[0].BM
    for tile in DENSE_TILES if problem.form == "dense" else LATENT_TILES:
        if most_rows >= tile.BM and most_keys >= tile.BN:
            yield tile, ""


def _has_fp4(problem: Problem) -> bool:
    """Whether rows that are multiplied are stored as e2m1."""
    if problem.form == "dense":
        return False
    stored = (FORMATS.get(source.kv_dtype, BF16) for source in problem.sources)
    return any(format.element == "e2m1" for format in stored)


def _joins(problem: Problem) -> bool:
    """Whether the last columns of a row, which are bf16 in DeepSeek-V4's format, belong to V: they
    do unless they are rope."""
    formats = {source.kv_dtype for source in problem.sources}
    return problem.form != "dense" and V4.name in formats and not problem.d_rope


def _terms(problem: Problem) -> int:
    """fp16 is exactly two bf16; rows of a cache are bf16, whatever they are stored as."""
    from_cache = problem.form != "dense" or problem.rope == "cache"
    stored = problem.rope_dtype if problem.form == "dense" else problem.kv_dtype
    # A second source has the type of the first: the declaration refuses others.
    return 2 if problem.q_dtype == "fp16" and from_cache and stored != "fp16" else 1


def _branches(problem: Problem, target: Target, tile: Tile) -> bool:
    """Whether rows are multiplied by Hopper's asynchronous products."""
    return problem.form != "dense" and target.arch == "sm_90" and tile.BM >= MIN_WGMMA


def _bulk_copies(problem: Problem, target: Target) -> bool:
    """Whether the chip has bulk copies and the operands of the dense form allow them."""
    dtypes, widths = {problem.kv_dtype, problem.v_dtype}, {problem.d_nope, problem.d_v}
    if problem.rope in ("shared", "per_head") and problem.d_rope:
        dtypes |= {problem.rope_dtype}
        widths |= {problem.d_rope}
    return (
        problem.form == "dense"
        and target.vendor == "nvidia"
        and int(target.arch.removeprefix("sm_")) >= FIRST_BULK_COPIES
        and problem.aligned_16
        and dtypes <= {"bf16", "fp16"}
        and all(width == padded(width) for width in widths)
    )


def _cache_read(problem: Problem, tile: Tile, same_bits: bool) -> CacheRead:
    """Dequantize an FP8 cache once where its rows are visited often enough, else in the kernel.

    Only Hopper's products of 64 rows were seen to give the same bits both ways. Elsewhere the pool
    alone decides, or a request's bits would depend on how many others are in its call.
    """
    rows, row_bytes = problem.total_k, DTYPE_BYTES["bf16"] * problem.d_qk
    if problem.form == "dense" or problem.kv_dtype in DTYPE_BYTES:
        return PLAIN
    if problem.is_attend or problem.window:  # few rows of the pool are read at all
        return CacheRead("in_kernel", rows, row_bytes)
    row_blocks = ceildiv(problem.heads, tile.BM)
    if problem.form == "sparse":
        read = sparse_cache_read(problem.total_q, problem.topk, rows, row_blocks, problem.d_qk)
    else:
        queries = mean_length(problem.total_q, problem.batch)
        tiles = ceildiv(queries, max(1, tile.BM // problem.heads)) * row_blocks
        read = paged_cache_read(tiles, rows, problem.d_qk)
    if same_bits:
        return read
    if problem.invariant:  # the size of the pool may not decide either
        return replace(read, mode="in_kernel")
    small = 0 < rows * row_bytes <= ALWAYS_WIDEN
    return replace(read, mode="workspace" if small else "in_kernel")


def select_portable_config(problem: Problem, target: Target) -> PortableConfig:
    """The first block that fits; when none does, the smallest, which then says why not."""
    last = None
    for last in portable_candidates(problem, target):
        if last.supported():
            return last
    assert last is not None  # the smallest tile has 16 rows, which every form allows
    return last


def require_bf16_products(target: Target) -> None:
    """Raise Unsupported where Triton's tl.dot takes neither bf16 nor fp16."""
    if not target.has_bf16:
        raise Unsupported(f"{target.arch}: Triton's products of bf16 and fp16 need sm_80")


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
    """The least power of two that tl.dot takes and that holds `width` columns; 0 for none.

    >>> padded(192), padded(128), padded(5), padded(0)
    (256, 128, 16, 0)
    """
    return max(MIN_DOT, 1 << (width - 1).bit_length()) if width else 0
