"""HopperLatentConfig: one block of latent MLA prefill on Hopper, over token lists or whole pages.

A block is 64 rows (heads of one token, or of several tokens that share their keys), two math
warp-groups and a producer warp-group. A step takes two blocks of 64 keys: warp-group 0 scores the
first, warp-group 1 the second, and each accumulates its half of the output columns from both. Rows
are gathered once; V is their first columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from openmla.arithmetic import ceildiv, require_int, round_up, verdict_lines
from openmla.errors import InvalidArgument
from openmla.formats import NVFP4, V4, V32_NO_ROPE, V41, V41_FP4, V41_FP4_SPLIT, V41_SPLIT
from openmla.kernels.hopper.chip import (
    FP32,
    SMEM_PER_BLOCK,
    WGMMA_M,
    HopperBlock,
    Registers,
    accumulator_registers,
    barriers,
    launch_tail,
    register_reasons,
    smem_reasons,
)
from openmla.kernels.hopper.few.plan import FewQueries, few_queries
from openmla.planning.dequantize import PLAIN, CacheRead, Workspace, workspace_of
from openmla.planning.latent_split import (
    FixedSplit,
    LatentSplit,
    RangeSpace,
    range_space,
    unsplit_space,
)
from openmla.planning.memory import Wanted
from openmla.planning.serves import GLUON_CACHES
from openmla.problem import Problem

ELEMENT = 2
B_TOPK = 64  # keys of one block
BLOCKS = 2  # of a step, one per math warp-group
MAX_STAGES = 4
LATENT_WIDTHS = (128, 256, 512)
ROPE_WIDTHS = (0, 32, 64)
ITEM_FIELDS = 8  # numbers of a work item, as it is published
EPILOGUE_SCRATCH = 2048  # the output's change of layout, 64 columns at a time
Gather = Literal["indices", "pages"]
CHUNKED_CACHES = (V4.name, V41.name, V41_SPLIT.name, V41_FP4.name, V41_FP4_SPLIT.name)
"""DeepSeek-V4's and V4.1's rows, of 512 columns, one source or several."""
ROW_CACHES = (*GLUON_CACHES, V32_NO_ROPE.name, *CHUNKED_CACHES)
"""Caches whose rows the producer dequantizes."""
WHOLE_POOL_CACHES = (NVFP4.name,)
"""Caches, vLLM's FP4 one, whose pools are dequantized whole in every call: no kernel does it on the
way."""
FAST_POOL_ROWS = 65536
"""Rows of all pools up to which that is fast: 36 us for so many, at the 550 ns for 1000 rows that
other formats take on an H200."""
# A producer that dequantizes FP8 rows needs more registers than one that copies: with 72 it spills
# 100 bytes and reached 0.29 of the matmul's rate, with 88 it spilled 8 and reached 0.400, with 104
# none and 0.421 (H200, 64 queries, 128 heads, before bytes were copied a block ahead).
COPYING = Registers(consumer_groups=2, consumer=216, producer=72)
WIDENING = Registers(consumer_groups=2, consumer=200, producer=104)


FEW_REQUESTS, MANY_REQUESTS = 32, 128


@dataclass(frozen=True, slots=True)
class RowsLaunch:
    """One launch of the latent kernel."""

    dequantizes: bool
    """Rows are those of an FP8 cache, dequantized by the producer; otherwise 16-bit rows."""
    dynamic: bool
    """Dynamic scheduling: persistent programs fetch work items from an atomic counter. Otherwise
    program x has items x, x + programs, …"""
    boxes: bool
    """Full blocks of keys come by TMA, a page being a multiple of a block."""
    chunk: int
    """Requests whose work items are numbered together (see source.py); 0 for lists."""


def requests_together(problem: Problem) -> int:
    """Requests whose work items are numbered together. The more, the better they are balanced; but
    with 32 a thread has one request, and finding a work item takes less code, which has to be
    fetched before the first rows are: 2 to 4 % of 32 requests (H200)."""
    if problem.form != "latent":
        return 0
    return FEW_REQUESTS if problem.batch <= FEW_REQUESTS else MANY_REQUESTS


def most_places(problem: Problem) -> int:
    """Most places that the rows of a query take: a second source begins with a block of its own
    (see listing.py).

    >>> from openmla.problem import RowSource
    >>> entries = RowSource(topk=512)
    >>> v4 = Problem("sparse", 64, 512, 0, 512, topk=100, second=entries)
    >>> most_places(v4), v4.most_rows
    (640, 612)
    """
    *before, last = (source.most_rows for source in problem.sources)
    return sum(round_up(rows, B_TOPK) for rows in before) + last


def dequantizes_pools(problem: Problem) -> bool:
    """Whether a source has such rows: then the pools of all sources are dequantized first."""
    return any(source.kv_dtype in WHOLE_POOL_CACHES for source in problem.sources)


def why_slow_for_large_pools(config: object, problem: Problem) -> str:
    """Why large pools are slower here than in the portable kernel, which reads rows where they lie.

    The pools alone decide: another kernel gives other bits, and a request's must not depend on its
    neighbors."""
    rows = sum(source.total_k for source in problem.sources)
    if not dequantizes_pools(problem) or rows <= FAST_POOL_ROWS:
        return ""
    return f"pools of {rows} rows are dequantized whole in every call: {FAST_POOL_ROWS} are fast"


def only_chunked(problem: Problem) -> bool:
    """Whether all sources have rows of DeepSeek-V4 or V4.1."""
    return all(source.kv_dtype in CHUNKED_CACHES for source in problem.sources)


@dataclass(frozen=True, slots=True)
class LatentVariant:
    """The launches of a call over latent rows."""

    few: FewQueries | None
    """Three launches for few lists; nothing below runs then."""
    suits_few: bool
    """Whether three launches are faster for so many lists. Only comparisons of variants read it: a
    kept launch of many lists does not serve few, nor the other way round."""
    workspace: Workspace | None
    """FP8 rows are dequantized into it first."""
    rows: tuple[RowsLaunch, ...]
    """The attention launches; of two, one exits early: more rows were named than the workspace
    holds, or not."""
    ranges: RangeSpace | None
    """The latent form: how its sequences are split and grouped. None for lists."""


@dataclass(frozen=True, kw_only=True)
class HopperLatentConfig(HopperBlock):
    """The plan of one latent block.

    >>> deepseek_v32 = select_hopper_latent_config(heads=128, latent=512, rope=64)
    >>> deepseek_v32.row_blocks, deepseek_v32.num_kv_stages, deepseek_v32.smem_used
    (2, 1, 227304)
    """

    heads: int
    latent: int
    """Columns of a row without rope, which are V too."""
    rope: int
    gather: Gather = "indices"
    """Where a block's rows come from: a list per token, or the pages of a sequence."""
    num_kv_stages: int = 1
    """Steps (pairs of key blocks) in flight. A step's column halves are released one by one."""
    dynamic: bool = False
    """Whether scheduling is dynamic, because work items are not all alike. Launches that dequantize
    are static all the same: they have no register to spare."""
    cache_read: CacheRead = PLAIN
    invariant: bool = False
    """Whether the ranges of keys are fixed, whatever the rows of a request."""
    range_keys: int = 0
    """Keys of a fixed range; 0: FIXED_RANGE."""
    few: FewQueries | None = None
    """Three launches that spread few queries over the chip, instead of this kernel."""
    sm_count: int = 132

    rescale_threshold: ClassVar[float] = 6.0
    """log2 units the row maximum may grow before O is rescaled. Prototype, H200: worth 3-5 %."""
    B_TOPK: ClassVar[int] = B_TOPK

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "num_kv_stages", "sm_count"):
            require_int(name, getattr(self, name), 1)
        require_int("rope", self.rope, 0)
        if self.gather not in ("indices", "pages"):
            raise InvalidArgument("gather", "indices or pages", repr(self.gather))

    BM: ClassVar[int] = WGMMA_M  # rows of a block: one wgmma
    keys_per_step: ClassVar[int] = B_TOPK * BLOCKS  # that both warp-groups take together

    @cached_property
    def width(self) -> int:
        """Columns of a row."""
        return self.latent + self.rope

    @cached_property
    def row_blocks(self) -> int:
        """Blocks of 64 rows that one token's heads fill."""
        return ceildiv(self.heads, WGMMA_M)

    @cached_property
    def is_packed(self) -> bool:
        """Whether blocks hold heads of several tokens: those of a sequence see the same pages."""
        return self.gather == "pages"

    @property
    def num_threads(self) -> int:
        return self.registers.threads

    @cached_property
    def p_overlays_rope(self) -> bool:
        """Whether P of a block fits where its rope columns were; they are consumed first."""
        return self.rope >= B_TOPK

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of the rows of a step."""
        return BLOCKS * B_TOPK * self.width * ELEMENT

    @cached_property
    def copy_lanes(self) -> int:
        """Threads that copy neighboring 16 bytes of a row: no tile is narrower than they are."""
        return 4 if self.rope == 32 else 8

    def tiles(self, tokens: int) -> int:
        """Blocks of rows for so many tokens of one sequence.

        >>> lists = select_hopper_latent_config(heads=20, latent=512, rope=64)
        >>> lists.tiles(16), replace(lists, gather="pages").tiles(16)
        (16, 5)
        """
        if self.is_packed:
            return ceildiv(tokens * self.heads, WGMMA_M)
        return tokens * self.row_blocks

    @property
    def split(self) -> LatentSplit | FixedSplit:
        """When the keys of a sequence are split."""
        if self.invariant:
            return FixedSplit(self.heads, self.latent, self.range_keys)
        return LatentSplit(self.heads, self.latent)

    # Launches.

    def variant(self, problem: Problem) -> LatentVariant:
        """The launches that a problem takes: the only place that decides."""
        workspace = workspace_of(self.cache_read, problem)
        ways = [workspace is None and self.cache_read.mode == "in_kernel"]
        if workspace is not None and workspace.may_overflow:
            ways.append(True)
        rows = tuple(self._rows_launch(problem, dequantizes) for dequantizes in ways)
        ranges = self._ranges(problem) if problem.form == "latent" else None
        few = self.few if self.few and self.few.queries == problem.total_q else None
        return LatentVariant(few, self.few_queries(problem) is not None, workspace, rows, ranges)

    def _ranges(self, problem: Problem) -> RangeSpace:
        """How sequences are split and grouped; windows are not split."""
        return unsplit_space(problem) if problem.window else range_space(self.split, problem)

    def few_queries(self, problem: Problem) -> FewQueries | None:
        """Three launches for a problem's lists, if they are faster than one."""
        if problem.form != "sparse" or (problem.is_attend and not only_chunked(problem)):
            return None
        if dequantizes_pools(problem):
            return None
        sizes = problem.total_q, problem.heads, most_places(problem), (self.latent, self.rope)
        return few_queries(*sizes, self.sm_count, fp8=problem.kv_dtype in ROW_CACHES)

    def _rows_launch(self, problem: Problem, dequantizes: bool) -> RowsLaunch:
        dynamic = self.dynamic and not dequantizes
        if problem.form == "sparse":  # no second item to fetch where every program has one list
            dynamic = dynamic and problem.total_q * self.row_blocks > self.sm_count
        whole_blocks = problem.form == "latent" and problem.page_size % B_TOPK == 0
        # A window begins with any row of a page, and no row before it is read.
        boxes = whole_blocks and not dequantizes and not problem.window
        return RowsLaunch(dequantizes, dynamic, boxes, requests_together(problem))

    # Threads and registers.

    @property
    def registers(self) -> Registers:
        """Registers of the kernel that this plan is about."""
        return self.registers_of(dequantizes=self.cache_read.mode == "in_kernel")

    @staticmethod
    def registers_of(dequantizes: bool) -> Registers:
        """Registers of a launch that dequantizes FP8 rows, or of one that copies 16-bit rows."""
        return WIDENING if dequantizes else COPYING

    @property
    def accumulators(self) -> int:
        """Registers of half the output columns and a score tile."""
        return accumulator_registers(self.latent // 2) + accumulator_registers(B_TOPK)

    def _accumulator_sum(self) -> str:
        o, s = accumulator_registers(self.latent // 2), accumulator_registers(B_TOPK)
        return f"half of O {o} + S {s}"

    # Shared memory.

    def _buffers(self) -> Iterator[Wanted]:
        half = self.latent // 2
        for name, columns in (("left", half), ("right", half), ("rope", self.rope)):
            yield Wanted(f"Q {name} {columns}", "q", self.BM * columns * ELEMENT)
        blocks = BLOCKS * self.num_kv_stages
        for block in range(blocks):
            for name in ("left", "right"):
                yield Wanted(f"K{block} {name} {half}", "k", B_TOPK * half * ELEMENT)
            p = ", then P" if self.p_overlays_rope else ""
            yield Wanted(f"K{block} rope{p}", "rope", B_TOPK * self.rope * ELEMENT)
        if not self.p_overlays_rope:
            for block in range(blocks):
                yield Wanted(f"P{block}", "p", self.BM * B_TOPK * ELEMENT)
        yield Wanted("row sums, largest scores", "stats", 3 * self.BM * FP32)
        # The validity of a key needs no memory where 16-bit pages are read: lengths decide it.
        has_validity = self.gather == "indices" or self.cache_read.mode == "in_kernel"
        if has_validity:
            yield Wanted("key validity", "stats", blocks * B_TOPK * FP32)
        yield Wanted("row maxima", "stats", BLOCKS * self.BM * FP32)
        yield Wanted("work items", "stats", 2 * ITEM_FIELDS * FP32)
        yield from barriers(("ready", 2 * blocks), ("free", 2 * blocks))
        if has_validity:
            yield from barriers(("valid", blocks))
            yield Wanted("validity flags", "stats", 4 * blocks * FP32)
        yield from barriers(("t_ready", 2), ("t_empty", 2))
        yield from barriers(("q_ready, q_free", 2))
        yield from launch_tail(self.registers, EPILOGUE_SCRATCH)
        if self.dynamic and self.cache_read.mode != "in_kernel":
            yield Wanted("fetched number", "scratch", FP32, align=128)

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        if self.latent not in LATENT_WIDTHS:
            yield f"latent width {self.latent} is not one of {', '.join(map(str, LATENT_WIDTHS))}"
        if self.rope not in ROPE_WIDTHS:
            yield f"rope width {self.rope} is not one of {', '.join(map(str, ROPE_WIDTHS))}"
        yield from register_reasons(self.registers, self.accumulators, self._accumulator_sum())
        yield from smem_reasons(self.smem_used, self._smem_sum())

    def _smem_sum(self) -> str:
        q = self.BM * self.width * ELEMENT
        p = 0 if self.p_overlays_rope else BLOCKS * self.BM * B_TOPK * ELEMENT
        p *= self.num_kv_stages
        rest = self.smem_used - q - p - self.num_kv_stages * self.step_bytes
        return (
            f"Q {q} + {self.num_kv_stages} x ({self.keys_per_step} keys x {self.width} x {ELEMENT} "
            f"= {self.step_bytes}) + P {p} + {rest} of statistics, barriers and scratch"
        )

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        overlay = "over the rope columns of its own block" if self.p_overlays_rope else "in buffers"
        lines = [
            self._rows_line(),
            f"a step is {BLOCKS} blocks of {B_TOPK} keys, one per math warp-group; each holds "
            f"{self.latent // 2} of {self.latent} output columns",
            self.registers.explain(self._accumulator_sum(), self.accumulators),
            f"shared memory: {self._smem_sum()} = {self.smem_used} of {self.smem_limit}",
            f"ring of {self.num_kv_stages} step(s): {self._stage_bound()}; P lies {overlay}",
            self.cache_read.explain(),
            f"O is rescaled when a row's maximum grew by more than 2^{self.rescale_threshold:g}",
        ]
        if self.few:
            lines.append(self.few.explain())
        return lines + verdict_lines(self.why_unsupported())

    def _rows_line(self) -> str:
        if self.is_packed:
            return f"{self.heads} heads of consecutive tokens fill blocks of {WGMMA_M} rows"
        padded = self.row_blocks * WGMMA_M
        return (
            f"{self.heads} heads: {self.heads} of {padded} rows in {self.row_blocks} block(s) of "
            f"{WGMMA_M}"
        )

    def _stage_bound(self) -> str:
        if self.num_kv_stages == MAX_STAGES:
            return f"{MAX_STAGES} are enough to hide a gather"
        more = self.smem_used + self.step_bytes
        return f"one more would take at least {more} > {self.smem_limit}"


def select_hopper_latent_config(**arguments: Any) -> HopperLatentConfig:
    """The deepest ring that fits; the other arguments of HopperLatentConfig are the caller's."""
    config = HopperLatentConfig(**arguments)
    room = SMEM_PER_BLOCK - config.BM * config.width * ELEMENT
    most = min(MAX_STAGES, room // config.step_bytes)  # before statistics, barriers and scratch
    deeper = (replace(config, num_kv_stages=stages) for stages in range(most, 1, -1))
    return next((c for c in deeper if c.smem_used <= SMEM_PER_BLOCK), config)
