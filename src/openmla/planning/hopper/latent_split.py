"""Splitting the keys of a request with few rows (queries x heads) in latent form on Hopper.

One query of 16 heads is a single tile of 64 rows: alone it would keep one SM busy. Its keys are cut
into ranges that are worked on side by side and merged (openmla.kernels.hopper.latent.merge).

A request's bits must not depend on its neighbors, so the length of a range follows from the
request's own rows and keys. A range of K keys and R rows reads 1152 K bytes of the cache (512 + 64
columns) and writes 4 x 514 R bytes that the merge reads again. With K = 32 R that is 11 % of the
bytes, whatever R is: 16 rows make ranges of 512 keys, 128 rows of 4096; 4096 queries of 128 heads
are never split.
"""

from __future__ import annotations

from dataclasses import dataclass

from openmla.planning.arithmetic import ceildiv, round_up

KEYS_PER_ROW = 32
# Where keys are few, so are ranges: a batch of such requests fills the chip without them. Ranges of
# 2048 for 4096 keys, of 1024 for 8192, of 512 from 16384 on.
SHORT = 2**23
MIN_RANGE = 512  # keys: a range of 4 steps takes about 3 times as long as its start and its end
# Rows of partial results of a request, besides those of one range: 4 MiB at 512 columns.
MOST_PART_ROWS = 2048
STEP = 128  # keys: no range cuts one
FP32 = 4
STATE = 2  # row_max and row_sum
# Partial results of a launch. Requests that might need more go in further launches.
WORKSPACE_CAP = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LatentSplit:
    """The rule for requests of `heads` heads.

    >>> rule = LatentSplit(heads=16, d_v=512)
    >>> rule.keys_of_range(rows=16, keys=32768), rule.ranges(rows=16, keys=32768)
    (512, 64)
    >>> rule.ranges(rows=128, keys=32768), rule.ranges(rows=4096 * 16, keys=32768)
    (8, 1)
    """

    heads: int
    d_v: int

    @staticmethod
    def keys_of_range(rows: int, keys: int) -> int:
        """Keys of a range, in whole steps; the last range of a request may be shorter."""
        least = max(MIN_RANGE, SHORT // max(keys, 1), KEYS_PER_ROW * rows)
        return round_up(max(least, ceildiv(rows * keys, MOST_PART_ROWS)), STEP)

    def ranges(self, rows: int, keys: int) -> int:
        """Ranges of a request."""
        return max(1, ceildiv(keys, self.keys_of_range(rows, keys)))

    def can_split(self, most_keys: int) -> bool:
        """Whether a request of one query and so many keys would be split."""
        return self.ranges(self.heads, most_keys) > 1

    def split_rows(self, requests: int, total_rows: int, most_keys: int) -> int:
        """Most rows of requests that are split: those with KEYS_PER_ROW keys for each."""
        return min(total_rows, requests * (most_keys // KEYS_PER_ROW))

    def part_rows(self, requests: int, total_rows: int, most_keys: int) -> int:
        """Most rows of partial results of so many requests, with `total_rows` rows together."""
        each = min(ceildiv(most_keys, KEYS_PER_ROW), MOST_PART_ROWS)
        return requests * each + self.split_rows(requests, total_rows, most_keys)

    def group(self, requests: int, total_rows: int, most_keys: int) -> int:
        """How many of the requests go in one launch, so that the workspace is large enough.

        >>> rule = LatentSplit(heads=16, d_v=512)
        >>> rule.group(128, 128 * 16, 32768), rule.group(1024, 1024 * 16, 131072)
        (128, 119)
        """
        room = WORKSPACE_CAP // (FP32 * (self.d_v + STATE))
        size = requests
        while size > 1 and self.part_rows(size, total_rows, most_keys) > room:
            size = (size + 1) // 2
        return size

    def explain(self, rows: int, keys: int) -> str:
        """The rule in numbers, for a request of so many rows and keys."""
        count, each = self.ranges(rows, keys), self.keys_of_range(rows, keys)
        here = f"{count} ranges of {each} keys" if count > 1 else "not split"
        return (
            f"split keys: at least {MIN_RANGE} keys and {KEYS_PER_ROW} for each row a range, by "
            f"the request's own rows and keys; {rows} rows x {keys} keys: {here}; workspace at "
            f"most {WORKSPACE_CAP} bytes a launch"
        )
