"""Lists of rows for few queries on Hopper: when, and in how many pieces, three launches take the
place of one.

The latent kernel gives a program 64 heads of a query: one query of 128 heads keeps 2 of 132 SMs
busy. Three launches spread it: scores and then weights by blocks of 64 keys, then values by columns
(kernels in openmla.kernels.hopper.few). Every sum has the same terms in the same order as in the
latent kernel, so the bits are the same, and how many queries a call has may decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from openmla.arithmetic import ceildiv

KEYS = 64  # of a block
STEP = 128  # keys
TILE = 64  # heads
WIDTHS = (32, 64, 128)  # columns of a program: the narrowest with an SM for every program
# Microseconds, H200, 2026-11-16, 128 heads, replayed once, of the width that the plan chooses; in
# one launch 63 (bf16) and 109 (FP8 rows, dequantized in it).
#
# | queries over 2048 rows | 1 | 2 | 4 | 8 | 13 | 16 | 20 | 24 |
# |---|---|---|---|---|---|---|---|---|
# | FP8 | 16 | 19 | 25 | 35 | 57 | 64 | 83 | 95 |
# | bf16 | 16 | 18 | 24 | 35 | 53 | 62 | | |
#
# In a row, without the overwriting of L2, one launch takes 54 (bf16), and three 50 for 13 queries,
# 58 for 16. One query over 512 rows: 12, in one launch 40 (FP8) and 22; 12 over 256: 18 and 17, in
# one launch 28 and 18, in a row 20 and 12 against 15 and 14.
SMS_PER_TILE = {False: 5, True: 3}  # for FP8 rows more queries
LEAST_STEPS = 3
SPACE_CAP = 128 * 1024 * 1024  # bytes: 16 queries over 4096 rows
FP32 = 4
BF16 = 2
RINGS = {32: 8, 64: 6, 128: 4}  # of columns: steps in the shared memory of the third launch
SCRATCH = 200  # states of warps


@dataclass(frozen=True, slots=True)
class FewQueries:
    """`queries` lists of `topk` rows, or as many places of two sources (latent/listing.py).

    >>> one = FewQueries(queries=1, heads=128, topk=2048, latent=512, rope=64, width=32, span=64)
    >>> one.score_programs, one.weight_programs, one.value_programs, 4 * sum(one.words)
    (32, 64, 32, 3784704)
    """

    queries: int
    heads: int
    topk: int
    latent: int
    rope: int
    width: int
    """Columns of V of a program of the third launch."""
    span: int
    """Keys of a program of the first, of a block or half of one."""
    overlap: bool = True
    """Whether a launch may begin before the one in front of it has ended."""

    @property
    def row_columns(self) -> int:
        """Columns of a row."""
        return self.latent + self.rope

    @property
    def padded_heads(self) -> int:
        """Heads, rounded up to whole tiles."""
        return ceildiv(self.heads, TILE) * TILE

    @property
    def steps(self) -> int:
        """Steps of 128 keys of a list."""
        return ceildiv(self.topk, STEP)

    @property
    def score_programs(self) -> int:
        """One for each `span` keys."""
        return self.queries * self.steps * (STEP // self.span)

    @property
    def weight_programs(self) -> int:
        """One for each block of keys and tile of heads."""
        return self.queries * self.steps * (STEP // KEYS) * self.padded_heads // TILE

    @property
    def value_programs(self) -> int:
        """One for each tile of heads and piece of the columns."""
        return self.queries * self.padded_heads // TILE * (self.latent // self.width)

    @property
    def words(self) -> tuple[int, ...]:
        """Words of 4 bytes of each part of the workspace: scores, weights, partial sums of weights,
        largest scores, references, factors of O; V."""
        rows = self.weight_programs * TILE
        v = self.queries * self.steps * STEP * self.latent // 2
        return (*(rows * each for each in (KEYS, KEYS // 2, 4, KEYS // self.span, 1, 1)), v)

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of shared memory of each launch."""
        # Q, rows, a barrier, which keys are there; in the place of these, where two warp-groups
        # share a tile, the largest scores of one.
        meet = self.span * (FP32 if self.padded_heads == TILE else 1)
        scores = BF16 * self.row_columns * (self.padded_heads + self.span) + 8 + meet
        weights = BF16 * TILE * KEYS  # they change their layout
        # A ring of weights, columns, factors and barriers; 1 / sums, a barrier, states of warps.
        step = BF16 * STEP * (self.width + TILE) + FP32 * STEP + 2 * 8
        values = RINGS[self.width] * step + FP32 * TILE + 8 + SCRATCH
        return {"scores_kernel": scores, "weights_kernel": weights, "values_kernel": values}

    def explain(self) -> str:
        """The launches in numbers."""
        return (
            f"few queries: {self.score_programs} programs for scores of {self.span} keys, "
            f"{self.weight_programs} for weights of {TILE} heads, {self.value_programs} for "
            f"{self.width} columns of them; the bits of one launch; workspace "
            f"{FP32 * sum(self.words)} bytes"
        )


def few_queries(
    queries: int, heads: int, topk: int, columns: tuple[int, int], sm_count: int, fp8: bool = False
) -> FewQueries | None:
    """Three launches, if they are faster than one; `columns` of a latent and of rope.

    >>> v32 = {"heads": 128, "columns": (512, 64), "sm_count": 132}
    >>> few_queries(1, topk=2048, **v32).width, few_queries(12, topk=2048, **v32).width
    (32, 128)
    >>> few_queries(20, topk=2048, **v32), few_queries(1, topk=256, **v32)
    (None, None)
    >>> few_queries(20, topk=2048, fp8=True, **v32).span
    64
    """
    latent, rope = columns
    tiles, steps = queries * ceildiv(heads, TILE), ceildiv(topk, STEP)
    if not queries or steps < LEAST_STEPS or SMS_PER_TILE[fp8] * tiles > sm_count:
        return None
    fitting = (width for width in WIDTHS if tiles * (latent // width) <= sm_count)
    width = min(next(fitting, WIDTHS[-1]), latent)
    # Half a block each where the third launch, which begins meanwhile, still finds room.
    halves = 2 * queries * steps * (STEP // KEYS)
    span = KEYS // 2 if 2 * halves <= sm_count else KEYS
    few = FewQueries(queries, heads, topk, latent, rope, width, span)
    return few if FP32 * sum(few.words) <= SPACE_CAP else None
