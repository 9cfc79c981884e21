"""The portable backward pass of the sparse form: passes that own what they write, and ordered sums.

    query pass    a program has BM heads of a query and walks its list: delta, then d_q
    row pass      a program has BN entries of a list and walks the heads: what each gives to its row
    row sum       a program has a row and adds its entries, in the order of queries

No atomics: bits are the same every time. Entries wait in a workspace of bounded size, so queries go
some at a time; which ones changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.backward.problem import SPARSE_BACKWARD_FORM, BackwardProblem
from openmla.kernels.portable.backward.plan import SCRATCH, PassConfig, Tile
from openmla.kernels.portable.plan import padded, require_bf16_products
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

WIDEST, WIDEST_ROPE = 512, 64
FP32 = 4
PART_CAP = 512 * 1024 * 1024  # bytes of what entries give to rows, of one launch


TILES = {
    32: (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    64: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
}
"""By the lanes of a warp, best first by what fits and does not spill; none was chosen by its speed,
and on an H200 no other was timed. With 32 x 32 and 8 warps an MI355X spilled 229
registers (512 + 64 columns, Triton 3.7.1)."""


@dataclass(frozen=True, slots=True)
class SparseBackwardVariant:
    """The launches of a backward pass."""

    tokens: int
    """Queries whose entries share the workspace; 0 where there is nothing to compute."""


@dataclass(frozen=True, kw_only=True)
class PortableSparseBackwardConfig(PassConfig):
    """One program of either pass; widths are padded to powers of two."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    latent_cols: int
    rope_cols: int
    smem_limit: int
    warp: int = 32
    """Lanes of a warp."""

    @property
    def smem_used(self) -> int:
        """Shared memory of a program, estimated: Q, d_out and K, which two products read in two
        ways. On AMD a tile of rows at a time: the rest stays in registers."""
        if self.warp == 64:
            return 2 * max(self.BM, self.BN) * self.latent_cols + SCRATCH
        twice = 2 * self.latent_cols
        return 2 * (self.BM * (twice + self.rope_cols) + self.BN * twice) + SCRATCH

    def variant(self, problem: BackwardProblem) -> SparseBackwardVariant:
        """The launches that a problem takes: the only place that decides."""
        token = problem.topk * problem.d_qk * FP32
        if not token or not problem.total_q or not problem.total_k:
            return SparseBackwardVariant(tokens=0)
        return SparseBackwardVariant(tokens=min(problem.total_q, max(1, PART_CAP // token)))


def select_config(problem: BackwardProblem, target: Target) -> PortableSparseBackwardConfig:
    """The first tile that fits; when none does, the smallest, which then says why not."""
    last = None
    for tile in TILES[target.warp]:
        last = PortableSparseBackwardConfig(
            **tile._replace(BM=min(tile.BM, padded(problem.heads)))._asdict(),
            latent_cols=padded(problem.d_nope),
            rope_cols=padded(problem.d_rope),
            smem_limit=target.smem_per_block,
            warp=target.warp,
        )
        if last.supported():
            break
    assert last is not None
    return last


def _choose(problem: Any, target: Target) -> PortableSparseBackwardConfig:
    require_bf16_products(target)
    return select_config(problem, target)


SERVED = Serves(
    {
        "form": OneOf(SPARSE_BACKWARD_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1, WIDEST),
        "d_rope": Range(0, WIDEST_ROPE),
        "d_v": Range(1, WIDEST),
        # fp16 would flush gradients of scores that a loss without a scale leaves.
        DTYPES: OneOf(*alike("bf16")),
        "rope": OneOf("none", "shared"),
        "topk": ANY,
        **LENGTHS,
        **either("causal", "has_topk_lengths", "has_sink", "wants_lse", "aligned_16", "has_d_lse"),
    }
)
PORTABLE_SPARSE_BACKWARD = Kernel(
    name="sparse_backward",
    serves=SERVED,
    config=PortableSparseBackwardConfig,
    choose=_choose,
    variant=PortableSparseBackwardConfig.variant,
    launcher="openmla.kernels.portable.sparse_backward.launch",
)
