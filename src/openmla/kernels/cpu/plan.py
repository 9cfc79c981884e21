"""Tile sizes of the CPU kernels."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

from openmla.problem import Problem

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """How the CPU kernels cut a problem.

    BM: query rows per tile (dense form). BN: keys per block. rows_per_step: rows of scores computed
    at a time, over all heads of a group. panel_rows: queries that share one packed block of keys.
    ranges: into how many the keys of few queries are divided at most, for as many threads.
    Together they bound the scratch memory of a thread, whatever the lengths.
    """

    BM: int
    BN: int
    rows_per_step: int
    panel_rows: int = 2048
    ranges: int = 16

    def head_groups(self, heads: int, q_len: int) -> Iterator[slice]:
        """Heads that are computed together, so that short sequences still fill a step.

        Depends on the sequence alone, never on its neighbors: the bits must not either.

        >>> list(CpuConfig(BM=256, BN=512, rows_per_step=512).head_groups(heads=5, q_len=2048))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        """
        together = max(self.rows_per_step // max(min(q_len, self.BM), 1), 1)
        for first in range(0, heads, together):
            yield slice(first, min(first + together, heads))

    def in_ranges(self, blocks: list[Block]) -> list[list[Block]]:
        """Blocks of keys, divided into at most `ranges` runs of about as many.

        >>> CpuConfig(BM=128, BN=512, rows_per_step=512, ranges=2).in_ranges([1, 2, 3])
        [[1, 2], [3]]
        """
        step = max(-(-len(blocks) // self.ranges), 1)
        return [blocks[first : first + step] for first in range(0, len(blocks), step)]

    def why_unsupported(self) -> str:
        """Nothing: tiles only set the pace."""
        return ""

    def explain(self) -> list[str]:
        """Each number with its name."""
        return [f"{f.name} = {getattr(self, f.name)}" for f in fields(self)]

    def tokens_per_tile(self, heads: int) -> int:
        """Tokens of a latent-form tile: as many as fill rows_per_step rows with their heads."""
        return max(self.rows_per_step // heads, 1)

    def tokens_together(self, heads: int, keys: int, total: int, shared: bool = False) -> int:
        """Tokens of a sparse piece: up to eight, or 32 that share most of their rows, while their
        scores are at most 1 MB, and a fourth of all tokens, so that there are pieces for several
        threads.

        >>> config = CpuConfig(BM=128, BN=512, rows_per_step=512)
        >>> config.tokens_together(32, 256, 64), config.tokens_together(128, 2048, 64)
        (8, 1)
        >>> config.tokens_together(8, 128, 2048, shared=True)
        32
        """
        return max(min(32 if shared else 8, 2**18 // max(heads * keys, 1), total // 4), 1)

    def keys_per_block(self, rows: int) -> int:
        """Keys of a latent-form block: up to four times as many for few rows, which take as much
        scratch. 16 rows over 8192 keys: 0.84 of the time (2026-11-16, one thread, AVX-512).

        >>> config = CpuConfig(BM=128, BN=512, rows_per_step=512)
        >>> config.keys_per_block(16), config.keys_per_block(256), config.keys_per_block(512)
        (2048, 1024, 512)
        """
        return self.BN * min(max(self.rows_per_step // max(rows, 1), 1), 4)


def plan_cpu(problem: Problem) -> CpuConfig:
    """Every problem has a CPU plan: tiles are chosen for cache size, not for fit.

    Measured 2026-11-15 on 2 cores of an AMD EPYC (AVX2), torch 2.13.0, by timing the kernels over
    a grid of tiles at the shapes of `openmla bench cpu`. Dense: BM 256 wastes twice as much of the
    causal diagonal as 128, and scores of 1024 rows × 512 keys (2 MB) still live in the caches.
    Latent: one product of 512 rows × 512 keys runs at the full matrix-product rate. Sparse: a token
    has few rows, so its blocks are longer.
    """
    if problem.form == "dense":
        return CpuConfig(BM=128, BN=512, rows_per_step=1024)
    if problem.form == "latent":
        return CpuConfig(BM=128, BN=512, rows_per_step=512)
    return CpuConfig(BM=128, BN=2048, rows_per_step=512)
