"""The loss of an indexer by plain Triton kernels: passes over a bounded workspace.

    score pass    a program has BM queries x BN keys: attention's weights summed over its heads,
                  and the indexer's scores
    row pass      a program has a query row: its loss, or the gradients of its scores
    query pass    a program has BM queries of an index head: d_q, d_weights
    key pass      a program has BN keys and GROUP index heads: d_k, whose groups are added in order

Sums and scores of some tiles of queries at a time wait in a workspace of bounded size. Everything
is added in a fixed order and nothing by two programs: bits are the same every time, depend on the
request alone, and not on how many tiles share the workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.arithmetic import ceildiv
from openmla.indexer.loss_problem import LOSS_FORM, LossProblem
from openmla.kernels.portable.backward.plan import SCRATCH, WIDEST, PassConfig, Tile
from openmla.kernels.portable.plan import padded, require_bf16_products
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

FP32 = 4
SCORE_CAP = 512 * 1024 * 1024  # bytes of sums and scores of one launch
GROUP = 16
"""Index heads that a program of the key pass adds: a constant, so that bits are a request's own."""
WIDE = Tile(64, 64, 4, 2)
"""Where products read their operands from shared memory, as Hopper's do: elsewhere operands take
registers too (an A100's score pass spilled 108 bytes with it, Triton 3.7.1)."""
TILES = (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))
"""Best first by what fits; none was chosen by its speed."""


@dataclass(frozen=True, slots=True)
class LossVariant:
    """The launches of a call."""

    tiles: int
    """Tiles of queries whose sums and scores share the workspace; 0 where there is nothing to
    compute."""


@dataclass(frozen=True, kw_only=True)
class PortableLossConfig(PassConfig):
    """One program of any pass; widths are padded to powers of two."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    nope_cols: int
    rope_cols: int
    index_cols: int
    smem_limit: int

    @property
    def smem_used(self) -> int:
        """Shared memory of a program, estimated: in the score pass the stages of Q and K of a
        head; in the key pass K and dz, which stay, and the stages of Q."""
        both = (self.BM + self.BN) * (self.nope_cols + self.rope_cols)
        kept = self.BN * self.index_cols + self.BM * self.BN
        score, key = self.num_stages * both, kept + self.num_stages * self.BM * self.index_cols
        return 2 * max(score, key) + SCRATCH

    def columns(self, total_k: int) -> int:
        """Keys of a line of the workspace: whole blocks of them."""
        return ceildiv(total_k, self.BN) * self.BN

    def variant(self, problem: LossProblem) -> LossVariant:
        """The launches that a problem takes: the only place that decides."""
        if not problem.total_q or not problem.total_k:
            return LossVariant(tiles=0)
        tile = 2 * FP32 * self.BM * self.columns(problem.total_k)
        return LossVariant(tiles=max(1, min(self.tiles(problem), SCORE_CAP // tile)))

    def tiles(self, problem: LossProblem) -> int:
        """Tiles of queries of a call: enough for any lengths of its sequences, and for the tokens
        after the last one."""
        return problem.total_q // self.BM + problem.batch + 1


def select_config(problem: LossProblem, target: Target) -> PortableLossConfig:
    """The first tile that fits; when none does, the smallest, which then says why not."""
    last = None
    for tile in (WIDE, *TILES) if target.arch == "sm_90" else TILES:
        last = PortableLossConfig(
            **tile._asdict(),
            nope_cols=padded(problem.d_nope),
            rope_cols=padded(problem.d_rope),
            index_cols=padded(problem.index_dim),
            smem_limit=target.smem_per_block,
        )
        if last.supported():
            break
    assert last is not None
    return last


def _choose(problem: Any, target: Target) -> PortableLossConfig:
    require_bf16_products(target)
    return select_config(problem, target)


SERVED = Serves(
    {
        "form": OneOf(LOSS_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1, WIDEST),
        "d_rope": Range(0, WIDEST),
        "d_v": ANY,
        # fp16 would flush gradients of scores, as it would in the backward pass of attention.
        DTYPES: OneOf(*alike("bf16")),
        "rope": OneOf("none", "shared", "per_head"),
        "index_heads": Range(1, MAX_HEADS),
        "index_dim": Range(1, WIDEST),
        **LENGTHS,
        **either("causal", "has_sink", "has_key_mask", "wants_lse", "aligned_16"),
        **either("wants_gradients"),
    }
)
PORTABLE_LOSS = Kernel(
    name="index_loss",
    serves=SERVED,
    config=PortableLossConfig,
    choose=_choose,
    variant=PortableLossConfig.variant,
    launcher="openmla.kernels.portable.indexer_loss.launch",
)
