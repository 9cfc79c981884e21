"""The portable backward pass: two kernels of plain Triton that own what they write.

    query pass    a program has BM queries of a head and walks the keys: delta, then d_q
    key pass      a program has BN keys of a head and walks the queries: d_k and d_v

Seven products, where one kernel that adds d_q in global memory would have five: nothing is added by
two programs, so bits are the same every time and depend on the request alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from openmla.arithmetic import Limited, verdict_lines
from openmla.backward.problem import BACKWARD_FORM, BackwardProblem
from openmla.kernels.portable.plan import padded, require_bf16_products
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import DTYPE_BYTES, MAX_HEADS

WIDEST = 256
SCRATCH = 4096
"""Shared memory that the compiler takes besides operands, estimated."""


class Tile(NamedTuple):
    """Queries and keys of a step, or heads and entries of a list, and how a program runs them."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The tiles of the two passes."""

    query: Tile
    key: Tile


TIMED = Tiles(Tile(128, 64, 8, 3), Tile(32, 128, 8, 3))
"""The fastest of 15 that fit, on an H200 with 128 + 64 columns (2026-11-18, `python
benchmarks/device/portable_backward_h200.py`): 2.8 and 2.0 times as fast as 64 x 64."""
WIDE = Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2))
NARROW = (
    Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
)
"""Hopper multiplies out of shared memory. Elsewhere operands that stay, K and V of the key pass,
take registers as well: with 64 x 64 an A100's key pass spilled 1,336 bytes, with 32 x 32 none. None
of these was chosen by its speed."""
NARROW_COLUMNS = 320
"""Most columns of Q and V together that `NARROW` is for: 128 + 64 and 128. Wider accumulators take
more warps where a thread has 255 registers; with 512 of them, as on AMD, more warps have fewer
each (GLM-5's 192 + 64 and 256, Triton 3.7.1: an L40S's key pass spilled 196 bytes, an MI300X's 307
registers; with `BROAD` neither spills)."""
BROAD = {32: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)), 64: NARROW[1]}
"""By the lanes of a warp."""
BROAD_COLUMNS = 576
FP32 = 4
SMALL = Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))
WARP_ROWS = 16  # of a product whose left operand stays in the registers of the warps


class PassConfig(Limited):
    """The config of a backward pass, dense or sparse: limited by shared memory alone."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # a subclass is one, says `fields`
    smem_limit: int

    @property
    def smem_used(self) -> int:
        """Shared memory of a program, estimated."""
        raise NotImplementedError

    def _broken_limits(self) -> Iterator[str]:
        if self.smem_used > self.smem_limit:
            yield f"shared memory: {self.smem_used} > {self.smem_limit}"

    def explain(self) -> list[str]:
        """Each number with its name."""
        numbers = [f"{f.name} = {getattr(self, f.name)}" for f in fields(self)]
        return [", ".join(numbers), *verdict_lines(self.why_unsupported())]


@dataclass(frozen=True, kw_only=True)
class PortableBackwardConfig(PassConfig):
    """One program of either kernel; widths are padded to powers of two."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    key_BM: int
    """Queries of a step of the key pass, which keeps keys and has numbers of its own."""
    key_BN: int
    key_warps: int
    key_stages: int
    nope_cols: int
    rope_cols: int
    v_cols: int
    smem_limit: int
    warp: int = 32
    """Lanes of a warp."""

    @property
    def query_tile(self) -> Tile:
        """The tile of the query pass."""
        return Tile(self.BM, self.BN, self.num_warps, self.num_stages)

    @property
    def key_tile(self) -> Tile:
        """The tile of the key pass."""
        return Tile(self.key_BM, self.key_BN, self.key_warps, self.key_stages)

    def tiles(self, problem: BackwardProblem) -> int:
        """Tiles of the query pass: enough for any lengths of the sequences."""
        return problem.total_q // self.BM + problem.batch + 1

    def workspace(self, problem: BackwardProblem) -> int:
        """Bytes besides the gradients: delta, parts of sinks, a part of every shared rope row per
        head, and where a query may see no key, d_out with zeros in such rows."""
        sinks = self.tiles(problem) if problem.has_sink else 0
        parts = problem.total_k * problem.d_rope if problem.rope == "shared" else 0
        blind = problem.has_key_mask or (problem.causal and not problem.self_attention)
        d_out = problem.total_q * problem.d_v * DTYPE_BYTES[problem.q_dtype] if blind else 0
        return problem.heads * (FP32 * (problem.total_q + sinks + parts) + d_out)

    @property
    def smem_used(self) -> int:
        """Shared memory of a program, estimated: what stays, the stages of a step, and P and dS
        where they do not stay in registers. On AMD what stays and the stage in flight are in
        registers, and so are P and dS. Without stages the compiler stores a part of what stays a
        second time."""
        query, key = self.query_tile, self.key_tile
        return max(self._smem(query, query.BM, query.BN), self._smem(key, key.BN, key.BM))

    def _smem(self, tile: Tile, kept: int, walked: int) -> int:
        columns = self.nope_cols + self.rope_cols + self.v_cols
        if self.warp == 64:
            return 2 * max(1, tile.num_stages - 1) * walked * columns + SCRATCH
        rows = kept + tile.num_stages * walked
        moved = 0 if kept == WARP_ROWS * tile.num_warps else 2 * kept * walked
        again = kept * max(self.nope_cols, self.v_cols) if tile.num_stages == 1 else 0
        return 2 * (rows * columns + moved + again) + SCRATCH


def select_config(problem: BackwardProblem, target: Target) -> PortableBackwardConfig:
    """The first tiles that fit; when none do, the smallest, which then say why not."""
    last = None
    for tiles in _candidates(problem, target):
        last = PortableBackwardConfig(
            **tiles.query._asdict(),
            key_BM=tiles.key.BM,
            key_BN=tiles.key.BN,
            key_warps=tiles.key.num_warps,
            key_stages=tiles.key.num_stages,
            nope_cols=padded(problem.d_nope),
            rope_cols=padded(problem.d_rope),
            v_cols=padded(problem.d_v),
            smem_limit=target.smem_per_block,
            warp=target.warp,
        )
        if last.supported():
            break
    assert last is not None
    return last


def _candidates(problem: BackwardProblem, target: Target) -> tuple[Tiles, ...]:
    """Tiles for the chip and the columns, best first."""
    if target.arch == "sm_90":
        return TIMED, WIDE, *NARROW
    columns = padded(problem.d_nope) + padded(problem.d_rope) + padded(problem.d_v)
    if columns <= NARROW_COLUMNS:
        return *NARROW, SMALL
    return (BROAD[target.warp], SMALL) if columns <= BROAD_COLUMNS else (SMALL,)


def _choose(problem: Any, target: Target) -> PortableBackwardConfig:
    require_bf16_products(target)
    return select_config(problem, target)


def _lines(config: PortableBackwardConfig, problem: BackwardProblem) -> list[str]:
    return [*config.explain(), f"workspace: {config.workspace(problem)} bytes"]


SERVED = Serves(
    {
        "form": OneOf(BACKWARD_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1, WIDEST),
        "d_rope": Range(0, WIDEST),
        "d_v": Range(1, WIDEST),
        # fp16 would flush gradients of scores that a loss without a scale leaves.
        DTYPES: OneOf(*alike("bf16")),
        "rope": OneOf("none", "shared", "per_head", why="rope of a cache has no gradient"),
        "window": ANY,
        **LENGTHS,
        **either("causal", "has_sink", "has_key_mask", "wants_lse", "aligned_16", "has_d_lse"),
    }
)
PORTABLE_BACKWARD = Kernel(
    name="backward",
    serves=SERVED,
    config=PortableBackwardConfig,
    choose=_choose,
    explain=_lines,
    launcher="openmla.kernels.portable.backward.launch",
)
