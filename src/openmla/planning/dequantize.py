"""How an FP8 cache is read: dequantized in the kernel at every visit, or once into a workspace.

Both ways give the same bits, because an element's value is bf16(fp32(e4m3) * scale) everywhere. So
the choice is one of speed alone and may look at the whole batch. For lists it is made by the times
below, measured on an H200; the other thresholds are estimates.

A workspace holds either every row of the pool (`sparse_cache_read`, `paged_cache_read`, small pools
of `listed_cache_read`), or the rows that lists of rows or pages name (other pools,
`named_pages_read`): how many those are is known on the device alone, so its size is a bound, and
past it the rows are dequantized in the kernel after all.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from openmla.arithmetic import ceildiv
from openmla.formats import FORMATS
from openmla.problem import Problem

CacheMode = Literal["plain", "in_kernel", "workspace"]
QUANTIZED = {name for name, format in FORMATS.items() if format.scale}

# Dequantizing a row once also writes and reads it back; it pays from about this many visits on.
VISITS_TO_PAY = 4
# Nanoseconds, H200, 2026-11-16, benchmarks/device/few_h200.py --section fp8 (128 heads, lists of
# 2048 rows of 656 bytes; 1 to 4096 queries, pools of 8192 to 4,194,304 rows). A step of 128 rows
# takes 6200 to 7500 when they are dequantized in it, wherever they lie:
IN_KERNEL_STEP, COPIED_STEP = 7000, 3500
# Of DeepSeek-V4's rows 5500 to 5900 (H200, 2026-11-18, 64 and 128 heads); less is an estimate that
# leaves what is nearly as fast in the kernel.
V4_STEP = 5000
# Dequantizing rows of the pool, and before that finding those that are named: two launches more.
LAUNCH, PER_1000_ROWS = 4_000, 550
FINDING, PER_1000_ENTRIES = 8_000, 23
# How many are named, only the device knows. All rows are dequantized where that takes at most 2.6
# times as long as finding some: then neither way is far behind, whether few or all are named.
WHOLE = 2.6
# Rows worth dequantizing for each step of a program, once they are found. If more are named, they
# are dequantized in the kernel after all, and were found in vain: that may take a tenth longer.
ROWS_PER_STEP = 6000
IN_VAIN = 10
STEP = 128  # keys
DEQUANTIZED_CAP = 512 * 1024 * 1024
# The workspace for rows that lists name holds 1,000,000 of 512 + 64 columns; it makes 4096 queries
# 1.4 to 1.8 times as fast.
LISTED_CAP = 1152 * 1_000_000
MAP_BYTES = 8  # of a slot
MOST_ENTRIES = 2**31  # of all lists: the map holds their numbers
FEWEST_SLOTS = 2**19  # 4 MiB; a map of 16 MiB took 7 microseconds more for 64 queries


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The decision, with the numbers behind it. `visits`: times that rows are read, in all."""

    mode: CacheMode
    rows: int = 0
    row_bytes: int = 0
    visits: int = 0
    mapped: int = 0
    """Rows or pages of the pool, where only those that are named are read; 0 where all rows are."""
    steps: int = 0
    """Steps of a program, where rows are named by lists. How often each is named is not known."""
    entries: int = 0
    """Entries of all lists together."""
    in_kernel_step: int = IN_KERNEL_STEP
    """Nanoseconds of a step whose rows are dequantized in it."""
    pools: int = 1
    """Pools that are dequantized, in a launch each."""
    always: bool = False
    """No kernel dequantizes such rows on their way."""

    @property
    def capacity(self) -> int:
        """Rows that a workspace holds; of lists, no more than are worth it."""
        cap = LISTED_CAP if self.steps else DEQUANTIZED_CAP
        most = min(self.rows, cap // max(self.row_bytes, 1))
        return min(most, ROWS_PER_STEP * self.steps) if self.steps else most

    @property
    def workspace_bytes(self) -> int:
        """Bytes of dequantized rows and of the map of the pool; 0 unless there is a workspace."""
        if self.mode != "workspace":
            return 0
        return self.capacity * self.row_bytes + map_slots(self.mapped, self.entries) * MAP_BYTES

    def why_not(self) -> str:
        """Why a workspace is not worth it; empty if it is."""
        reason = self._too_slow() if self.steps and self.rows else self._too_few_visits()
        if reason:
            return f"{reason} do not repay a workspace of {self._held()}"
        if self.mapped or self.rows <= self.capacity:
            return ""
        if self.steps:
            return (
                f"{self.steps} steps of a program are worth {self.capacity} rows, not {self.rows}"
            )
        return f"{self.rows} x {self.row_bytes} bytes would exceed {DEQUANTIZED_CAP}"

    @property
    def _finding(self) -> int:
        """Nanoseconds until it is known which rows are named, and where they go."""
        return FINDING + _of_1000(self.entries, PER_1000_ENTRIES) if self.mapped else 0

    def _too_slow(self) -> str:
        """By the times above; where not all rows may fit, by what would be in vain."""
        in_kernel = self.in_kernel_step * self.steps
        if self.rows > self.capacity:
            slow = self._finding * IN_VAIN > in_kernel
        else:
            once = LAUNCH * self.pools + _of_1000(self.rows, PER_1000_ROWS)
            once += COPIED_STEP * self.steps
            slow = self._finding + once > in_kernel
        return f"{self.steps} steps of a program over {self.rows} rows" if slow else ""

    def or_whole(self, pool: int) -> Self:
        """All rows of the pool where those that are named are not worth looking for."""
        every = replace(self, rows=pool, mapped=0)
        small = _of_1000(every.rows, PER_1000_ROWS) <= WHOLE * self._finding
        return every if small and every.capacity == every.rows else self

    def by(self, way: str, pool: int, units: int) -> Self:
        """The same read decided otherwise, for comparisons: "in_kernel"; or once into a workspace,
        the "whole" pool or those of its rows that are "named" (`units` rows or pages)."""
        if way == "in_kernel":
            return replace(self, mode="in_kernel")
        rows = min(pool, self.entries) if self.entries and way == "named" else pool
        return replace(self, mode="workspace", rows=rows, mapped=units * (way == "named"))

    def _too_few_visits(self) -> str:
        few = f"{self.visits} visits of {self.capacity} rows, fewer than {VISITS_TO_PAY} each,"
        return few if not self.rows or self.visits < VISITS_TO_PAY * self.capacity else ""

    def explain(self) -> str:
        """One line of arithmetic."""
        if self.mode == "plain":
            return "cache: rows are multiplied as they are stored"
        if self.mode == "in_kernel":
            return f"quantized cache: dequantized in the kernel: {self.why_not()}"
        slots = map_slots(self.mapped, self.entries)
        which = f"rows that are named, found by a map of {slots} slots," * (self.mapped > 0)
        least = f"at least {VISITS_TO_PAY} each"
        enough = f"{self.steps} steps of a program" if self.steps else least
        enough = "the only way to read them" if self.always else enough
        more = "; if more are named, in the kernel" if self.rows > self.capacity else ""
        return (
            f"quantized cache: {which or 'all rows'} are dequantized once into a workspace of "
            f"{self._held()}: {self.visits} visits, {enough}{more}"
        )

    def _held(self) -> str:
        return f"{self.capacity} x {self.row_bytes} = {self.capacity * self.row_bytes} bytes"


PLAIN = CacheRead("plain")


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a workspace of dequantized rows holds, in rows (lists) or pages (sequences)."""

    names: bool
    """Units that lists or tables name, each at a place of its own; otherwise the whole pool."""
    units: int
    """Most units that it holds."""
    may_overflow: bool
    """More may be named than it holds: of two attention launches one exits early."""


def workspace_of(read: CacheRead, problem: Problem) -> Workspace | None:
    """The workspace that a problem's rows are dequantized into; None unless there is one."""
    if read.mode != "workspace":
        return None
    size = problem.page_size if problem.form == "latent" else 1
    pool = ceildiv(problem.total_k, size)
    lists = problem.total_q * problem.topk
    tables = problem.batch * ceildiv(problem.most_keys, size)
    if not read.mapped or (tables if problem.form == "latent" else lists) >= MOST_ENTRIES:
        return Workspace(False, pool, False)
    units = min(read.capacity // size, pool)
    named = pool if problem.form == "latent" else read.rows
    return Workspace(True, units, named > units)


def sparse_cache_read(total_q: int, topk: int, rows: int, row_blocks: int, width: int) -> CacheRead:
    """For token lists: every query visits topk rows, once per block of 64 heads.

    4096 queries x 2048 rows x 2 blocks are 16.8 million visits of 32768 rows: once is enough.

    >>> sparse_cache_read(4096, 2048, 32768, row_blocks=2, width=576).mode
    'workspace'
    >>> sparse_cache_read(4, 2048, 32768, row_blocks=2, width=576).mode
    'in_kernel'
    """
    return _decide(CacheRead("workspace", rows, 2 * width, total_q * topk * row_blocks))


def listed_cache_read(
    total_q: int, topk: int, pool: int, row_blocks: int, width: int, programs: int
) -> CacheRead:
    """For token lists, where only the rows that they name are dequantized: at most total_q x topk
    rows, or the whole pool.

    4096 queries name at most 1,000,000 rows of such a pool, in 16.8 million visits. A workspace
    holds them; dequantizing so many costs less than the visits save. 64 queries of 128 heads are
    one tile, 16 steps, for each of 132 programs: too few for 131072 rows, if so many are named.
    A small pool is dequantized whole.

    >>> v32 = {"topk": 2048, "pool": 1_000_000, "row_blocks": 2, "width": 576, "programs": 132}
    >>> many = listed_cache_read(4096, **v32)
    >>> many.mode, many.rows, many.capacity, many.steps
    ('workspace', 1000000, 1000000, 1008)
    >>> few = listed_cache_read(64, **v32)
    >>> few.mode, few.steps, few.rows, few.capacity, few.mapped
    ('workspace', 16, 131072, 96000, 1000000)
    >>> small = listed_cache_read(64, **v32 | {"pool": 8192})
    >>> small.mode, small.rows, small.mapped
    ('workspace', 8192, 0)
    """
    rows, visits = min(pool, total_q * topk), total_q * topk * row_blocks
    steps = ceildiv(total_q * row_blocks, programs) * ceildiv(topk, STEP)
    entries = total_q * topk
    named = CacheRead("workspace", rows, 2 * width, visits, pool, steps, entries)
    return _decide(named.or_whole(pool))


def in_kernel_read(rows: int, width: int) -> CacheRead:
    """For rows that few tiles visit: they are dequantized where they are read."""
    return CacheRead("in_kernel", rows, 2 * width, rows)


def sources_read(problem: Problem, row_blocks: int, programs: int) -> CacheRead:
    """For spans and second sources: where neighbors see nearly the same rows, as those of a sliding
    window do, the pools are dequantized whole, once for all queries.

    How long spans are, only the device knows; each is taken for a step of 128 rows, as a window is.
    2048 queries of one prompt see rows of one pool of 2175; of 2048 requests, each has its own.

    >>> from openmla.problem import RowSource
    >>> span = {"page_size": 64, "span": True, "table_keys": 16384}
    >>> sizes = {"heads": 64, "d_nope": 512, "d_rope": 0, "d_v": 512, "total_q": 2048}
    >>> window = Problem("sparse", **sizes, **span, kv_dtype="fp8_584", total_k=2176)
    >>> sources_read(window, 1, 132).mode
    'workspace'
    >>> own = replace(window, total_k=2048 * 256)
    >>> sources_read(own, 1, 132).mode
    'in_kernel'
    """
    pools = [x.total_k for x in problem.sources if x.kv_dtype in QUANTIZED]
    seen = [STEP if x.span else x.most_rows for x in problem.sources]
    steps = ceildiv(problem.total_q * row_blocks, programs) * sum(ceildiv(x, STEP) for x in seen)
    visits = problem.total_q * row_blocks * sum(seen)
    once = CacheRead("workspace", sum(pools), 2 * problem.d_qk, visits, steps=steps)
    return _decide(replace(once, in_kernel_step=V4_STEP, pools=len(pools)))


def whole_pools_read(problem: Problem) -> CacheRead:
    """For rows that no kernel dequantizes on their way: all quantized pools, whole, in every call.

    >>> window = Problem("sparse", 64, 512, 0, 512, topk=128, kv_dtype="fp8_528_v41", total_k=4096)
    >>> whole_pools_read(window).workspace_bytes
    4194304
    """
    pools = [x.total_k for x in problem.sources if x.kv_dtype in QUANTIZED]
    seen = problem.most_rows if problem.form == "sparse" else problem.most_keys
    once = CacheRead("workspace", sum(pools), 2 * problem.d_qk, problem.total_q * seen)
    return replace(once, pools=len(pools), always=True)


def named_pages_read(tiles_per_request: int, pool: int, width: int, page_size: int) -> CacheRead:
    """For whole sequences, where only their own pages are dequantized: every tile of a request
    visits every row of its pages.

    >>> named_pages_read(16, 1_000_000, 576, 64).mode, named_pages_read(2, 10**6, 576, 64).mode
    ('workspace', 'in_kernel')
    """
    read = CacheRead("workspace", pool, 2 * width, 0, ceildiv(pool, max(page_size, 1)))
    read = _decide(replace(read, visits=read.capacity * tiles_per_request).or_whole(pool))
    return replace(read, mode="in_kernel") if read.capacity < page_size else read


def _decide(read: CacheRead) -> CacheRead:
    return replace(read, mode="in_kernel") if read.why_not() else read


def map_slots(units: int, entries: int) -> int:
    """Slots of the map of a pool: one for each unit, or fewer if that is enough for the entries."""
    return min(units, max(FEWEST_SLOTS, 2 * entries)) if entries else units


def _of_1000(count: int, each: int) -> int:
    return count * each // 1000


def paged_cache_read(tiles_per_request: int, rows: int, width: int) -> CacheRead:
    """For whole sequences: every tile of a request visits every row of it."""
    return _decide(CacheRead("workspace", rows, 2 * width, rows * tiles_per_request))


def mean_length(total: int, requests: int) -> int:
    """Tokens of a request when they are spread evenly, rounded up."""
    return ceildiv(total, max(requests, 1))
