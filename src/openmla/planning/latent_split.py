"""Splitting the keys of a request with few rows (queries x heads) in latent form.

One query of 16 heads is a single tile of 64 rows: alone it would keep one SM busy. Its keys are cut
into ranges that are worked on side by side and merged (kernels/gluon/ranges/merge.py, and in
plain Triton kernels/portable/split.py).

A request's bits must not depend on its neighbors, so the number of ranges follows from the
request's own rows and keys, and must do for a request alone and for many of its kind. A range of
K keys and R rows reads 1152 K bytes of the cache (512 + 64 columns) and writes 4 x 514 R bytes that
the merge reads again: with K = 64 R that is 6 % more. H200, 2026-11-16, requests of 32768 keys:

| ranges of | 1 request | 32 requests | 128 requests |
|---|---|---|---|
| 256, 16 rows | 32 us | 3.1 TB/s | 3.3 TB/s |
| 512, 16 rows | 33 us | 3.3 TB/s | 3.7 TB/s |
| 1024, 16 rows | 45 us | 3.6 TB/s | 3.9 TB/s |
| 2048, 128 rows | 67 us | 0.69 of the matmul | |
| 4096, 128 rows | 114 us | 0.76 of the matmul | |
| 8192, 128 rows | 227 us | 0.80 of the matmul | |

So a range has 64 keys for each row, or half as many where a request would have fewer than four
ranges, rounded up to a power of two, because device code should divide nothing; the last range is
what remains. That ranges differ in length is wanted: long ones are begun first, and short ones fill
the end (kernels/hopper/latent/source.py). Over FlashMLA, H200, 2026-11-18:

| keys for each row | 128 | 64 | 32 |
|---|---|---|---|
| 32 requests of 32768 keys, 128 rows | 0.93 | 0.95 | 0.89 |
| 32 requests of 1 to 32768 keys, 128 rows | 0.57 | 0.90 | 0.85 |
| 32 requests of 8192 keys, 16 rows | 0.95 | 0.90 | 0.77 |
| 128 requests of 8192 keys, 16 rows | 0.98 | 0.94 | 0.82 |
| 1 request of 32768 keys, 16 rows | 0.75 | 1.12 | 1.35 |

Shorter requests of 16 rows are not split, for the sake of batches: from 2048 keys on, in ranges of
1024, 32 requests of 1 to 8192 keys would be at 0.73 instead of 0.51, and 128 of 4096 keys at 0.91
instead of 1.05 (2026-11-19).

An invariant call (`FixedSplit`) may not look at rows: the same token may come in a prompt of
thousands and alone. Its ranges begin at multiples of FIXED_RANGE, and a row that sees the first of
them only has the bits of a request that is not split, since an empty range adds 0. Of a prompt then
every row has partial results of every range, more than a workspace holds; so it is computed some
tokens at a time, which changes no bit either. Predicted for 128 rows of 512 columns, not measured:
a range of 2048 keys is 16 steps, some 60 us of an SM, and 263 KB written and read again, 6 to 13 %
of a prompt's time; one request of 32768 keys has 16 ranges.

A server that knows its requests to be few does better than both rules by naming the length of the
ranges itself (`range_keys`). The number of requests of a call may not decide about it here, but the
caller may. `suggested_range_keys` is a rule of thumb. A range writes as many bytes for each of its
rows as 1.8 keys have, however short it is: with ranges of 512 keys a prompt has 4 times the
overhead above. A launch has the same workspace as before and so takes fewer tokens, by the width of
the block table; where the ranges of not even one token fit, lengths below FIXED_RANGE are refused
(RANGES_FIT).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from openmla.arithmetic import Limit, ceildiv, round_up
from openmla.planning.dequantize import mean_length
from openmla.problem import MOST_RANGE, Problem

KEYS_PER_ROW = 64  # keys that a long range has for each of its rows
LONG_RANGES = 4  # a request of at least so many long ranges has long ones; others are half as long
MIN_RANGE = 512  # keys
SHORT = 4096  # keys of a request that is never split
# Rows of partial results of a request: 4 MiB at 512 columns.
MOST_PART_ROWS = 2048
STEP = 128  # keys: no range cuts one
FP32 = 4
STATE = 2  # row_max and row_sum
FIXED_RANGE = 2048  # keys of a range of an invariant call whose caller names no other number
SUGGESTED_LEAST = 256  # keys of a range that is suggested
SUGGESTED_KEYS_PER_ROW = 4  # likewise: a range then writes less than half of what it reads
ROWS_OF_TILE = 64  # of the kernels that the suggestion is made for
MOST_ROWS = 2**31 - 1  # no index names more
# Partial results of a launch. Requests that might need more go in further launches.
PARTIAL_CAP = 512 * 1024 * 1024


class RuleConstants(NamedTuple):
    """The numbers of the rule."""

    keys_per_row: int
    long_ranges: int
    min_range: int
    short: int
    most_part_rows: int
    step: int
    fixed: int = 0
    """Keys of a range of an invariant call; 0 in others, whose ranges follow from the request."""


def constants(fixed: int = 0) -> RuleConstants:
    """The numbers of the rule, for kernels that take them as an argument. fixed: keys of a range of
    an invariant call."""
    return RuleConstants(KEYS_PER_ROW, LONG_RANGES, MIN_RANGE, SHORT, MOST_PART_ROWS, STEP, fixed)


def power_of_two(x: int) -> int:
    """The smallest power of two that is not below x; all numbers of the rule are such powers."""
    return 1 << (max(x, 1) - 1).bit_length()


def most_ranges(rows: int, keys: int) -> int:
    """A bound on the ranges of requests that have at least so many rows and at most so many keys.

    Long ranges are as many as keys allow; of half the length there are never more than twice
    LONG_RANGES.
    """
    long = KEYS_PER_ROW * power_of_two(rows)
    if keys <= SHORT:
        return 1
    halves = ceildiv(keys, max(long // 2, MIN_RANGE))
    longs = max(ceildiv(keys, max(long, MIN_RANGE)), 2 * LONG_RANGES)
    return max(1, min(halves, longs, MOST_PART_ROWS // max(rows, 1)))


@dataclass(frozen=True, slots=True)
class LatentSplit:
    """The rule for requests of `heads` heads.

    >>> rule = LatentSplit(heads=16, d_v=512)
    >>> rule.keys_of_range(rows=16, keys=32768), rule.ranges(rows=16, keys=32768)
    (1024, 32)
    >>> rule.ranges(rows=128, keys=32768), rule.ranges(rows=4096 * 16, keys=32768)
    (4, 1)
    """

    heads: int
    d_v: int

    @staticmethod
    def keys_of_range(rows: int, keys: int) -> int:
        """Keys of a range, in whole steps; the last range of a request may be shorter."""
        rows, keys = power_of_two(rows), max(keys, 1)
        long = KEYS_PER_ROW * rows
        if keys <= max(long, SHORT):
            return round_up(keys, STEP)
        each = long if keys >= LONG_RANGES * long else long // 2
        return max(each, MIN_RANGE, power_of_two(keys) * rows // MOST_PART_ROWS)

    def ranges(self, rows: int, keys: int) -> int:
        """Ranges of a request."""
        return max(1, ceildiv(keys, self.keys_of_range(rows, keys)))

    def can_split(self, most_keys: int) -> bool:
        """Whether a request of one query and so many keys would be split."""
        return self.ranges(self.heads, most_keys) > 1

    @property
    def least_keys(self) -> int:
        """Keys of the shortest request that can be split.

        >>> [LatentSplit(heads, 512).least_keys for heads in (16, 128)]
        [4097, 8193]
        """
        return max(KEYS_PER_ROW * power_of_two(self.heads), SHORT) + 1

    def split_rows(self, requests: int, total_rows: int, most_keys: int) -> int:
        """Most rows of requests that are split: each has more keys than one long range."""
        return min(total_rows, requests * (most_keys // KEYS_PER_ROW))

    def part_rows(self, requests: int, most_keys: int) -> int:
        """Most rows of partial results of so many requests. Ranges are half of a long one or more,
        but for the last, and a request is longer than a long one."""
        return requests * min(3 * most_keys // KEYS_PER_ROW, MOST_PART_ROWS)

    def slots(self, most_keys: int, tile_rows: int) -> int:
        """Most partial tiles of `tile_rows` rows that a request has: the last of a range may hold
        few rows.
        """
        return self.part_rows(1, most_keys) // tile_rows + most_ranges(self.heads, most_keys)

    def group(self, requests: int, most_keys: int) -> int:
        """How many of the requests go in one launch, so that the workspace is large enough.

        >>> rule = LatentSplit(heads=16, d_v=512)
        >>> rule.group(128, 32768), rule.group(1024, 131072)
        (128, 127)
        """
        room = PARTIAL_CAP // (FP32 * (self.d_v + STATE))
        return min(requests, max(1, room // self.part_rows(1, most_keys)))

    def explain_mean(self, problem: Problem) -> str:
        """The rule for requests of mean length."""
        queries = mean_length(problem.total_q, problem.batch)
        keys = problem.keys_seen(queries, mean_length(problem.total_k, problem.batch))
        return self.explain(queries * problem.heads, keys)

    def explain(self, rows: int, keys: int) -> str:
        """The rule in numbers, for a request of so many rows and keys."""
        count, each = self.ranges(rows, keys), self.keys_of_range(rows, keys)
        here = f"{count} ranges of {each} keys" if count > 1 else "not split"
        return (
            f"split keys: ranges of {KEYS_PER_ROW} keys for each row, half as long where there "
            f"would be fewer than {LONG_RANGES}, at least {MIN_RANGE}, by the request's own rows "
            f"and keys; {rows} rows x {keys} keys: {here}; workspace at most {PARTIAL_CAP} bytes "
            "a launch"
        )


def why_slower_unsplit(config: object, problem: Problem) -> str:
    """Why a latent kernel that splits no keys is slower than the portable one, which does; "" where
    it is not. One query of a long request would be the work of one block. What a request is given
    to may not follow from its neighbors, so the width of the table decides, not the queries.
    """
    rule = LatentSplit(problem.heads, problem.d_v)
    seen = min(problem.most_keys, problem.window or problem.most_keys)
    if problem.form != "latent" or not rule.can_split(seen):
        return ""
    return (
        f"a request may have {problem.most_keys} keys, and the portable kernel splits those of few "
        "queries"
    )


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """The rule of invariant calls: all ranges have so many keys, whatever the rows.

    >>> rule = FixedSplit(heads=128, d_v=512)
    >>> rule.ranges(keys=2048), rule.ranges(keys=2049), rule.ranges(keys=32768)
    (1, 2, 16)
    >>> rule.tokens_together(most_keys=32768)
    127
    >>> short = FixedSplit(heads=128, d_v=512, range_keys=256)
    >>> short.ranges(keys=32768), short.tokens_together(most_keys=32768)
    (128, 15)
    """

    heads: int
    d_v: int
    range_keys: int = 0
    """As the caller named it; 0: FIXED_RANGE."""

    @property
    def keys_of_range(self) -> int:
        """Keys of every range but the last."""
        return self.range_keys or FIXED_RANGE

    def ranges(self, keys: int) -> int:
        """Ranges of a request of so many keys."""
        return max(1, ceildiv(keys, self.keys_of_range))

    def token_bytes(self, most_keys: int) -> int:
        """Bytes of the partial results of one token."""
        return FP32 * (self.d_v + STATE) * self.heads * self.ranges(most_keys)

    def tokens_together(self, most_keys: int) -> int:
        """Tokens of one launch, so that the partial results of all their ranges fit the cap."""
        return max(1, PARTIAL_CAP // self.token_bytes(most_keys))

    def explain_mean(self, problem: Problem) -> str:
        """The rule for requests of mean length."""
        keys = mean_length(problem.total_k, problem.batch)
        together = self.tokens_together(problem.most_keys)
        return (
            f"split keys: invariant, ranges of {self.keys_of_range} keys from the first key on; "
            f"{keys} keys: {self.ranges(keys)} ranges; {together} tokens a launch, "
            f"{ceildiv(problem.total_q, together)} launch(es), each with its merge"
        )


def _shortest_that_fits(problem: Problem) -> int:
    """Keys of the shortest ranges of which one token's fit a launch."""
    keys = problem.range_keys
    while not RANGES_FIT.holds(replace(problem, range_keys=keys)):
        keys *= 2
    return keys


def _token_bytes(problem: Problem) -> int:
    """Bytes of the partial results of one token of an invariant call."""
    rule = FixedSplit(problem.heads, problem.d_nope, problem.range_keys)
    return rule.token_bytes(problem.most_keys)


# Without it a caller's short ranges of a wide table would take any amount of memory.
RANGES_FIT: Limit[Problem] = Limit(
    lambda p: not 0 < p.range_keys < FIXED_RANGE or _token_bytes(p) <= PARTIAL_CAP,
    lambda p: (
        f"range_keys {p.range_keys}: the partial results of a token that may have {p.most_keys} "
        f"keys take {_token_bytes(p)} bytes > {PARTIAL_CAP}; ranges of {_shortest_that_fits(p)} "
        "keys fit"
    ),
)


def suggested_range_keys(rows: int, requests: int, keys: int, sm_count: int) -> int | None:
    """`range_keys` for calls that always have about so many requests, each with so many rows
    (queries x heads) and keys: the longest ranges that make a work item for every other SM. None
    where LatentSplit makes as many.

    A rule of thumb, not a measurement. It agrees with what was measured on an H200: the tables
    above, and docs/performance.md. One request of 32768 keys, with 16 rows and with 128:

    >>> [suggested_range_keys(rows, 1, 32768, sm_count=132) for rows in (16, 128)]
    [256, 512]

    32 requests of 8192 keys and 128 rows; as many of 4096 and 16; 128 of 8192 and 128:

    >>> suggested_range_keys(128, 32, 8192, 132), suggested_range_keys(16, 32, 4096, 132)
    (4096, 1024)
    >>> suggested_range_keys(128, 128, 8192, 132) is None
    True
    """
    tiles, enough = requests * ceildiv(rows, ROWS_OF_TILE), ceildiv(sm_count, 2)
    each = LatentSplit.keys_of_range(rows, keys)
    if tiles * ceildiv(keys, each) >= enough:
        return None
    least = max(SUGGESTED_LEAST, SUGGESTED_KEYS_PER_ROW * power_of_two(rows))
    longer = power_of_two(each)
    while longer > least and tiles * ceildiv(keys, longer) < enough:
        longer //= 2
    return min(longer, MOST_RANGE) if longer < keys else None


def items_line(
    rule: LatentSplit | FixedSplit, problem: Problem, rows_of_tile: int, sm_count: int
) -> str:
    """How many work items requests of mean length make, beside the chip's SMs; and which
    `range_keys` would make enough of them, where they are too few."""
    requests = max(problem.batch, 1)
    queries = mean_length(problem.total_q, problem.batch)
    keys = problem.keys_seen(queries, mean_length(problem.total_k, problem.batch))
    rows = queries * problem.heads
    tiles = requests * ceildiv(rows, rows_of_tile)
    if isinstance(rule, FixedSplit):
        return _items(requests, tiles, rule.ranges(keys), sm_count)
    line = _items(requests, tiles, rule.ranges(rows, keys), sm_count)
    better = suggested_range_keys(rows, requests, keys, sm_count)
    if better is None or problem.window:
        return line
    more = tiles * ceildiv(keys, better)
    return f"{line}; range_keys={better} would make {more} (a rule of thumb, not measured)"


def _items(requests: int, tiles: int, ranges: int, sm_count: int) -> str:
    whose = "one request" if requests == 1 else f"{requests} requests"
    made = f"{tiles} tile(s) of {whose} x {ranges} range(s) = {tiles * ranges}"
    return f"work items: {made}, for {sm_count} SMs"


@dataclass(frozen=True, slots=True)
class RangeSpace:
    """Room for the partial results of requests whose keys are split into ranges."""

    group: int
    """Requests of one launch."""
    rows: int
    """Rows of partial results of a request, or of a range where ranges are fixed; 0 where nothing
    can be split."""
    merged: int
    """Most rows (queries x heads) of a request that is split."""
    ranges: int
    """Most ranges of a request."""
    fixed_keys: int = 0
    """Keys of a range of an invariant call; 0 in others."""
    tokens: int = 0
    """Tokens of one launch of an invariant call; 0 where all go in one."""

    @property
    def part_rows(self) -> int:
        """Rows of partial results of a launch."""
        return self.rows * (self.ranges if self.fixed_keys else self.group)


def range_space(rule: LatentSplit | FixedSplit, problem: Problem) -> RangeSpace:
    """Room for the ranges of a problem's requests.

    >>> latent = {"form": "latent", "heads": 16, "d_nope": 512, "d_rope": 64, "d_v": 512}
    >>> few = Problem(**latent, total_q=32, total_k=2**20, batch=32, page_size=64, table_keys=32768)
    >>> space = range_space(LatentSplit(16, 512), few)
    >>> space.group, space.rows, space.ranges
    (32, 1536, 32)
    """
    most = min(problem.most_keys, MOST_ROWS)
    if isinstance(rule, FixedSplit):
        return _fixed_space(rule, problem, most)
    if not problem.batch or not rule.can_split(most):
        return unsplit_space(problem)
    return RangeSpace(
        group=rule.group(problem.batch, most),
        rows=rule.part_rows(1, most),
        merged=rule.split_rows(1, problem.total_q * problem.heads, most),
        ranges=most_ranges(problem.heads, most),
    )


def unsplit_space(problem: Problem) -> RangeSpace:
    """No room: all requests go in one launch, and none is split."""
    return RangeSpace(group=max(problem.batch, 1), rows=0, merged=0, ranges=1)


def _fixed_space(rule: FixedSplit, problem: Problem, most: int) -> RangeSpace:
    """All requests go in one launch; of many tokens some at a time."""
    group, ranges = max(problem.batch, 1), rule.ranges(most)
    if ranges == 1 or not problem.batch:
        return unsplit_space(problem)
    tokens = min(rule.tokens_together(most), problem.total_q)
    rows = tokens * problem.heads
    kept = tokens if tokens < problem.total_q else 0
    return RangeSpace(group, rows, rows, ranges, rule.keys_of_range, kept)
