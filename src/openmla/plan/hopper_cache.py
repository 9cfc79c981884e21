"""How an FP8 cache is read: widened in the kernel at every visit, or once into a workspace.

Both ways give the same bits, because an element's value is bf16(fp32(e4m3) * scale) everywhere. So
the choice is one of speed alone and may look at the whole batch. The thresholds are estimates, not
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openmla.plan.blackwell_units import ceildiv

CacheMode = Literal["plain", "in_kernel", "workspace"]

# Widening a row once also writes and reads it back; it pays from about this many visits on.
VISITS_TO_PAY = 4
WORKSPACE_CAP = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The decision, with the numbers behind it. `visits`: times that rows are read, in all."""

    mode: CacheMode
    rows: int = 0
    row_bytes: int = 0
    visits: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes of widened rows; 0 unless they go through a workspace."""
        return self.rows * self.row_bytes if self.mode == "workspace" else 0

    def explain(self) -> str:
        """One line of arithmetic."""
        if self.mode == "plain":
            return "cache: rows are multiplied as they are stored"
        per_row = f"{self.visits} visits of {self.rows} rows"
        size = f"{self.rows} x {self.row_bytes} = {self.rows * self.row_bytes} bytes"
        if self.mode == "workspace":
            return (
                f"FP8 cache: widened once into a workspace of {size}: {per_row}, at least "
                f"{VISITS_TO_PAY} each"
            )
        if self.visits >= VISITS_TO_PAY * self.rows:
            return f"FP8 cache: widened in the kernel; {size} would exceed {WORKSPACE_CAP}"
        return (
            f"FP8 cache: widened in the kernel: {per_row}, fewer than {VISITS_TO_PAY} each, do "
            f"not repay a workspace of {size}"
        )


PLAIN = CacheRead("plain")


def sparse_cache_read(total_q: int, topk: int, rows: int, row_blocks: int, width: int) -> CacheRead:
    """For token lists: every query visits topk rows, once per block of 64 heads.

    4096 queries x 2048 rows x 2 blocks are 16.8 million visits of 32768 rows: once is enough.

    >>> sparse_cache_read(4096, 2048, 32768, row_blocks=2, width=576).mode
    'workspace'
    >>> sparse_cache_read(4, 2048, 32768, row_blocks=2, width=576).mode
    'in_kernel'
    """
    return _decide(rows, 2 * width, total_q * topk * row_blocks)


def paged_cache_read(tiles_per_request: int, rows: int, width: int) -> CacheRead:
    """For whole sequences: every tile of a request visits every row of it."""
    return _decide(rows, 2 * width, rows * tiles_per_request)


def mean_length(total: int, requests: int) -> int:
    """Tokens of a request when they are spread evenly, rounded up."""
    return ceildiv(total, max(requests, 1))


def _decide(rows: int, row_bytes: int, visits: int) -> CacheRead:
    pays = rows > 0 and visits >= VISITS_TO_PAY * rows
    fits = rows * row_bytes <= WORKSPACE_CAP
    return CacheRead("workspace" if pays and fits else "in_kernel", rows, row_bytes, visits)
