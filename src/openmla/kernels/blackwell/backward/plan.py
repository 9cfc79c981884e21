"""BlackwellBackwardConfig: the two kernels of the dense backward pass on Blackwell.

What both do is in kernels/gluon/gradients/plan.py. Accumulators, scores and the weights that are
multiplied lie in tensor memory: of its 512 columns the key pass takes all with 128 + 64 -> 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.arithmetic import Limited, verdict_lines
from openmla.backward.problem import ONE_DELTA, BackwardProblem
from openmla.kernels.blackwell.chip import Partitioned, Worker, allocated, argument_bytes
from openmla.kernels.gluon.gradients.plan import (
    ELEMENT,
    EVERY_BACKWARD,
    FP32,
    NO_ATOMICS,
    OWN_ROWS,
    BackwardTiles,
)
from openmla.modular.blackwell.units import SMEM_CARVEOUT, TMEM_COLS
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import Columns, Wanted
from openmla.planning.serves import Serves
from openmla.planning.target import Target

GROUP_REGISTERS, SINGLE_REGISTERS = 200, 96
COLUMN_BITS = 32
LAYOUT_CHANGE = 512  # bytes: deltas, once they are summed, become one per thread


@dataclass(frozen=True, kw_only=True)
class BlackwellBackwardConfig(BackwardTiles, Limited):
    """Both blocks."""

    BN: int = 64
    key_stages: int = 3
    BQ: int = 64
    query_stages: int = 3

    def _broken_limits(self) -> Iterator[str]:
        for name, found in (("query pass", QueryPass(self)), ("key pass", KeyPass(self))):
            used = found.memory().used
            if used > SMEM_CARVEOUT:
                over = used - SMEM_CARVEOUT
                yield f"{name}: {used} bytes of shared memory, {over} more than {SMEM_CARVEOUT}"
            if found.columns_used > TMEM_COLS:
                over = found.columns_used - TMEM_COLS
                yield f"{name}: {found.columns_used} columns of tensor memory, {over} too many"

    def explain(self, problem: BackwardProblem | None = None) -> list[str]:
        """How each number came about; of a problem, or of the one that takes the most."""
        rows = self.own_rows
        lines = [
            f"query pass: {rows} queries of a head, {self.BN} keys a step, {self.key_stages} steps "
            f"in flight, {QueryPass(self, problem).taken}",
            f"key pass: {rows} keys of a head, {self.BQ} queries a step, {self.query_stages} steps "
            f"in flight, {KeyPass(self, problem).taken}",
            NO_ATOMICS,
        ]
        return lines + verdict_lines(self.why_unsupported())


class _Pass(Partitioned):
    """The kernel of one pass, for a problem; None stands for the one that takes the most."""

    own: str
    walked: str

    def __init__(
        self, config: BlackwellBackwardConfig, problem: BackwardProblem | None, step: int, ring: int
    ) -> None:
        self.config, self.problem, self.step, self.ring = config, problem, step, ring

    @property
    def accumulators(self) -> dict[str, int]:
        """Columns of what the pass adds up."""
        raise NotImplementedError

    @property
    def packed(self) -> tuple[str, ...]:
        """Tiles of 16 bits in tensor memory."""
        raise NotImplementedError

    def statistics(self) -> Iterator[Wanted]:
        """Totals and deltas in shared memory."""
        raise NotImplementedError

    @property
    def workers(self) -> list[Worker]:
        singles = [Worker(name, 1, SINGLE_REGISTERS) for name in ("multiply", "load")]
        return [Worker("group 1", 4, GROUP_REGISTERS), *singles]

    def tiles(self) -> Iterator[Wanted]:
        rings = dict.fromkeys(("nope", "rope", "values"), self.ring)
        yield from self.config.own_tiles(self.own)
        yield from self.config.walked_tiles(self.walked, self.step, rings)
        yield from self.statistics()

    def has(self, option: str) -> bool:
        """Whether the problem has it."""
        return self.problem is None or bool(getattr(self.problem, option))

    @property
    def rope_parts(self) -> int:
        """1 with rope, else 0: Q and K have as many parts more."""
        return int(self.config.d_rope > 0)

    @cached_property
    def tile_columns(self) -> dict[str, Columns]:
        """Tensor memory, the widest first: each begins at a multiple of its width, and Triton 3.8
        slices no others."""
        widths = {name: n for name, n in self.accumulators.items() if n}
        widths |= dict.fromkeys(("scores", "products"), self.step)
        widths |= dict.fromkeys(self.packed, self.step * 8 * ELEMENT // COLUMN_BITS)
        found, at = {}, 0
        for name, width in sorted(widths.items(), key=lambda item: -item[1]):
            found[name] = Columns(name, at, width)
            at += width
        return found

    @property
    def columns_used(self) -> int:
        return max(c.first + c.count for c in self.tile_columns.values())

    @property
    def widest(self) -> int:
        """Columns of the widest tile."""
        return max(c.count for c in self.tile_columns.values())

    @property
    def taken(self) -> str:
        """What a block takes, in words."""
        return (
            f"{self.columns_used} columns of tensor memory, "
            f"{self.memory().used} bytes of shared memory"
        )

    @cached_property
    def block(self) -> Block:
        return Block(
            tile_rows=OWN_ROWS,
            tile_keys=self.step,
            stages=self.ring,
            threads=self.threads,
            registers=self.block_registers,
            memory=self.memory(),
            tensor_memory=allocated(tuple(self.tile_columns.values())),
        )


class QueryPass(_Pass):
    """128 queries of a head."""

    own, walked = "queries", "keys"

    def __init__(
        self, config: BlackwellBackwardConfig, problem: BackwardProblem | None = None
    ) -> None:
        super().__init__(config, problem, config.BN, config.key_stages)

    @property
    def accumulators(self) -> dict[str, int]:
        return {"d_q nope": self.config.d_nope, "d_q rope": self.config.d_rope}

    @property
    def packed(self) -> tuple[str, ...]:
        return ("dS",)

    def statistics(self) -> Iterator[Wanted]:
        yield Wanted("total, delta", "statistics", 2 * OWN_ROWS * FP32)

    def own_regions(self, scratch: int) -> list[Wanted]:
        """Where the change of layout is the largest, all else lies in its place."""
        if self.arguments < LAYOUT_CHANGE:
            return [Wanted("change of layout, arguments, warp states", "scratch", LAYOUT_CHANGE)]
        return super().own_regions(scratch)

    def barriers(self) -> dict[str, int]:
        """See the table of query_pass.py."""
        rings = ("k_ready", "k_empty", "v_ready", "v_empty")
        single = ("q_ready", "d_ready", "t_full", "s_full", "s_empty")
        single += ("dp_full", "dp_empty", "ds_full", "ds_empty")
        return {**dict.fromkeys(rings, self.ring), **dict.fromkeys(single, 1)}

    @property
    def arguments(self) -> int:
        sink, d_lse = self.has("has_sink"), self.has("has_d_lse")
        # Tensor memory, out, d_out, lse, statistics and d_q, a sink and its parts; descriptors.
        pointers = 6 + 2 * sink + d_lse + 4 + 2 * self.rope_parts
        # The work item, which has a limit if causal; strides; factor and scale; rows and heads of
        # the statistics; a place and a length for each of both lines in shared memory.
        integers = 8 + self.has("causal") + 8 + 2 * d_lse + 2 + 2 + 2 * 3
        return argument_bytes(
            tiles=4 + 2 * self.rope_parts,
            arrays=len(self.barriers()),
            pointers=pointers,
            integers=integers,
        )


class KeyPass(_Pass):
    """128 keys of a head."""

    own, walked = "keys", "queries"

    def __init__(
        self, config: BlackwellBackwardConfig, problem: BackwardProblem | None = None
    ) -> None:
        super().__init__(config, problem, config.BQ, config.query_stages)

    @property
    def accumulators(self) -> dict[str, int]:
        config = self.config
        return {"d_v": config.d_v, "d_k nope": config.d_nope, "d_k rope": config.d_rope}

    @property
    def packed(self) -> tuple[str, ...]:
        return ("P", "dS")

    def statistics(self) -> Iterator[Wanted]:
        size = self.ring * self.step * FP32
        yield from (Wanted(name, "statistics", size, 128) for name in ("total", "delta"))

    def barriers(self) -> dict[str, int]:
        """See the table of key_pass.py."""
        rings = ("q_ready", "q_empty", "d_ready", "d_empty")
        single = ("k_ready", "v_ready", "s_full", "s_empty", "dp_full", "dp_empty")
        single += ("p_full", "p_empty", "ds_full", "ds_empty")
        return {**dict.fromkeys(rings, self.ring), **dict.fromkeys(single, 1)}

    @property
    def arguments(self) -> int:
        ropes = self.rope_parts
        # Tensor memory, d_k, d_v and that of rope; descriptors.
        pointers = 3 + ropes + 5 + 2 * ropes
        # The work item, which has a limit if causal; strides; factor, scale and heads.
        integers = 9 + self.has("causal") + 4 + 2 * ropes + 3
        return argument_bytes(
            tiles=4 + 2 * ropes,
            arrays=len(self.barriers()) + 2,  # totals and deltas have two dimensions
            pointers=pointers,
            integers=integers,
        )


def _lines(config: BlackwellBackwardConfig, problem: BackwardProblem) -> list[str]:
    return [*config.explain(problem), f"workspace: {config.workspace(problem)} bytes"]


def _block(config: BlackwellBackwardConfig, problem: BackwardProblem) -> Block:
    """The block of the query pass."""
    return QueryPass(config, problem).block


def _choose(problem: BackwardProblem, target: Target) -> BlackwellBackwardConfig:
    return BlackwellBackwardConfig(
        heads=problem.heads, d_nope=problem.d_nope, d_rope=problem.d_rope, d_v=problem.d_v
    )


BLACKWELL_BACKWARD = Kernel(
    name="backward",
    serves=Serves(EVERY_BACKWARD, (ONE_DELTA,)),
    config=BlackwellBackwardConfig,
    choose=_choose,
    block=_block,
    explain=_lines,
    launcher="openmla.kernels.blackwell.backward.launch",
)
