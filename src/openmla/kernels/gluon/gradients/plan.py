"""What plans of dense backward passes share: tiles, workspaces, and what is served.

    query pass    a block has 128 queries of a head and walks the keys: statistics, then d_q
    key pass      a block has 128 keys of a head and walks the queries: d_k and d_v

Seven products, where one kernel that adds d_q in global memory would have five. Neither adds
anything to what another block writes: no atomics, no fp32 buffer of d_q, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from openmla.arithmetic import require_int
from openmla.backward.problem import BACKWARD_FORM, BackwardProblem
from openmla.planning.memory import Wanted
from openmla.planning.serves import (
    ALIGNED,
    DTYPES,
    LENGTHS,
    Allowed,
    Field,
    OneOf,
    Range,
    alike,
    either,
)
from openmla.problem import MAX_HEADS

ELEMENT = 2  # bytes of a value
FP32 = 4
OWN_ROWS = 128
ORDERS = 2  # of the bits of a key mask, one for each pass
L2_HEADS = 4  # tiles of more heads than these are no neighbors: their keys would not stay in L2


@dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """The tiles of both passes, and the workspaces between them."""

    heads: int
    d_nope: int
    d_rope: int
    d_v: int
    BN: int
    """Keys of a step of the query pass."""
    key_stages: int
    """Steps of the query pass whose keys are in flight."""
    BQ: int
    """Queries of a step of the key pass."""
    query_stages: int
    """Steps of the key pass whose queries are in flight."""

    def __post_init__(self) -> None:
        for name in ("heads", "d_nope", "d_v", "BN", "key_stages", "BQ", "query_stages"):
            require_int(name, getattr(self, name), 1)
        require_int("d_rope", self.d_rope, 0)

    @property
    def own_rows(self) -> int:
        """Queries of a block of the query pass, keys of one of the key pass."""
        return OWN_ROWS

    @cached_property
    def heads_per_l2_group(self) -> int:
        """Heads whose tiles are neighbors in the order of work: a divisor of heads, at most 4."""
        return next(n for n in range(L2_HEADS, 0, -1) if self.heads % n == 0)

    # Shared memory.

    def own_tiles(self, own: str) -> Iterator[Wanted]:
        """The rows of Q and d_out, or of K and V, that a block keeps."""
        for name, width in self._widths.items():
            yield Wanted(f"{own} {name}", own, self.own_rows * width * ELEMENT)

    def walked_tiles(self, walked: str, step: int, stages: Mapping[str, int]) -> Iterator[Wanted]:
        """The rings of what a pass walks; `stages`: steps in flight of each part of the columns."""
        for name, width in self._widths.items():
            yield Wanted(f"{walked} {name}", walked, stages[name] * step * width * ELEMENT)

    @property
    def second_tile(self) -> int:
        """Columns of K without rope that are in the tile of those with: 64 of 192."""
        return self.d_nope % 128 if self.d_nope > 128 else 0

    @property
    def key_launches(self) -> tuple[str, ...]:
        """Gradients of a launch of the key pass: "all", or "v" and "k" one after the other."""
        return ("all",)

    @property
    def _widths(self) -> dict[str, int]:
        return {"nope": self.d_nope, "rope": self.d_rope, "values": self.d_v}

    # Workspaces in global memory.

    def statistics_rows(self, total_q: int, batch: int) -> int:
        """Rows of statistics of a head: every sequence's begin at a multiple of a tile."""
        return (total_q // self.own_rows + batch + 1) * self.own_rows

    def workspace(self, problem: BackwardProblem) -> int:
        """Bytes besides the gradients: statistics, a part of every shared rope row per head, and
        the bits of a key mask, if one sequence has all keys."""
        rows = self.statistics_rows(problem.total_q, problem.batch)
        parts = problem.total_k * self.d_rope if problem.rope == "shared" else 0
        bits = 0
        if problem.has_key_mask:
            tiles = -(-problem.total_k // self.own_rows)
            bits = ORDERS * rows * tiles * self.own_rows // 8
        return FP32 * self.heads * (2 * rows + parts) + bits


NO_ATOMICS = "no atomics: each gradient has one writer, rope parts of the heads are added in order"
EVERY_BACKWARD: Mapping[Field, Allowed] = {
    "form": OneOf(BACKWARD_FORM),
    DTYPES: OneOf(*alike("bf16")),
    "heads": Range(1, MAX_HEADS),
    "d_nope": OneOf(64, 128),
    "d_rope": OneOf(0, 32, 64),
    "d_v": OneOf(64, 128),
    "rope": OneOf("none", "shared", "per_head", why="rope of a cache has no gradient"),
    **LENGTHS,
    **either("causal", "has_sink", "wants_lse", "has_d_lse"),
    "aligned_16": ALIGNED,
}
"""What such passes serve of every field."""
