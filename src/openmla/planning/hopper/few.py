"""Lists of rows for few queries on Hopper: when, and in how many pieces, two launches take the
place of one.

The latent kernel gives a program 64 heads of a query: one query of 128 heads keeps 2 of 132 SMs
busy. Two launches spread it: scores by blocks of 64 keys, then values by columns (kernels in
openmla.kernels.hopper.few). Every sum has the same terms in the same order as in the latent kernel,
so the bits are the same, and how many queries a call has may decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from openmla.planning.arithmetic import ceildiv

KEYS = 64  # of a block
STEP = 128  # keys
TILE = 64  # heads
WIDTHS = (32, 64, 128)  # columns of a program: the narrowest that leave nobody waiting for an SM
# Microseconds, H200, 2026-11-16, 128 heads, lists of 2048 rows, replayed once; in one launch 56
# (bf16) and 107 (FP8 rows, dequantized in it).
#
# | queries | 1 | 4 | 8 | 16 | 32 |
# |---|---|---|---|---|---|
# | FP8, 32 columns | 30 | 35 | 66 | | |
# | FP8, 64 columns | 32 | 36 | 44 | 93 | |
# | FP8, 128 columns | 40 | 48 | 55 | 79 | 156 |
# | bf16, 32 columns | 28 | 31 | 57 | | |
# | bf16, 64 columns | 30 | 32 | 39 | 75 | |
# | bf16, 128 columns | 30 | 33 | 40 | 55 | 105 |
#
# Of one query, scores take 6 us and values the rest. Shorter lists are left to the one launch.
SMS_PER_TILE, LEAST_STEPS = 4, 4
SPACE_CAP = 64 * 1024 * 1024  # bytes of scores
FP32 = 4
BF16 = 2
RING = 4  # steps of weights and rows in shared memory
SCRATCH = 528  # of the second launch: changes of layout, and states of warps


@dataclass(frozen=True, slots=True)
class FewQueries:
    """`queries` lists of `topk` rows, and the columns of V that a program takes.

    >>> one = FewQueries(queries=1, heads=128, topk=2048, latent=512, rope=64, width=32)
    >>> one.score_programs, one.value_programs, 4 * one.space
    (32, 32, 1064960)
    """

    queries: int
    heads: int
    topk: int
    latent: int
    rope: int
    width: int
    overlap: bool = True
    """Whether the second launch may begin before the first has ended."""

    @property
    def row_columns(self) -> int:
        """Of a row."""
        return self.latent + self.rope

    @property
    def padded_heads(self) -> int:
        """Whole tiles."""
        return ceildiv(self.heads, TILE) * TILE

    @property
    def steps(self) -> int:
        """Of a list."""
        return ceildiv(self.topk, STEP)

    @property
    def score_programs(self) -> int:
        """One for each block of keys."""
        return self.queries * self.steps * (STEP // KEYS)

    @property
    def value_programs(self) -> int:
        """One for each tile of heads and piece of the columns."""
        return self.queries * self.padded_heads // TILE * (self.latent // self.width)

    @property
    def scores(self) -> int:
        """Scores in the workspace."""
        return self.queries * self.steps * self.padded_heads * STEP

    @property
    def space(self) -> int:
        """Numbers in the workspace: scores, and the largest of each block."""
        return self.scores + self.scores // KEYS

    @property
    def scores_shared(self) -> int:
        """Bytes of shared memory of the first launch: Q, a block of rows, a barrier, and where two
        warp-groups share the keys of a tile, the largest scores of one."""
        meet = FP32 * TILE if self.padded_heads == TILE else 0
        return 8 + BF16 * self.row_columns * (self.padded_heads + KEYS) + meet

    @property
    def values_shared(self) -> int:
        """Of the second: a ring of columns, weights and factors; 1 / sums, barriers."""
        ring = BF16 * STEP * (self.width + TILE) + FP32 * 2 * TILE + 3 * 8
        return RING * ring + FP32 * TILE + 8 + SCRATCH

    def explain(self) -> str:
        """The launches in numbers."""
        return (
            f"few queries: {self.score_programs} programs for scores of {KEYS} keys, then "
            f"{self.value_programs} for {self.width} columns of {TILE} heads; the bits of one "
            f"launch; workspace {FP32 * self.space} bytes"
        )


def few_queries(
    queries: int, heads: int, topk: int, columns: tuple[int, int], sm_count: int
) -> FewQueries | None:
    """Two launches, if they are faster than one; `columns` of a latent and of rope.

    >>> v32 = {"heads": 128, "columns": (512, 64), "sm_count": 132}
    >>> few_queries(1, topk=2048, **v32).width, few_queries(12, topk=2048, **v32).width
    (32, 128)
    >>> few_queries(64, topk=2048, **v32), few_queries(1, topk=256, **v32)
    (None, None)
    """
    latent, rope = columns
    tiles = queries * ceildiv(heads, TILE)
    if not queries or ceildiv(topk, STEP) < LEAST_STEPS or SMS_PER_TILE * tiles > sm_count:
        return None
    fitting = (width for width in WIDTHS if tiles * (latent // width) <= sm_count)
    width = min(next(fitting, WIDTHS[-1]), latent)
    few = FewQueries(queries, heads, topk, latent, rope, width)
    return few if FP32 * few.space <= SPACE_CAP else None
