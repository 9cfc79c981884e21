"""Cdna4BackwardConfig: the two kernels of the dense backward pass on CDNA4.

    query pass    a block has 128 queries of a head and walks the keys: statistics, then d_q
    key pass      a block has 128 keys of a head and walks the queries: d_k and d_v

Seven products, where one kernel that adds d_q in global memory would have five. Neither adds
anything to what another block writes: no atomics, no fp32 buffer of d_q, the same bits every time.

A block is four waves, one on each SIMD, so that a lane has all 512 registers of its place. What a
wave keeps for its 32 rows decides that (128 + 64 -> 128, registers of a lane):

    query pass    Q 48, d_out 32, d_q 96                      176
    key pass      K 48, V 32, d_k 96, d_v 64                  240
    either        scores and dP of 32 rows, 16 + 16,
                  and both again as operands, 8 + 8            48

With eight waves a lane has 256: the key pass would leave nothing for fragments, and a wave of 16
rows would read every step from LDS for half as many products. LDS then holds what is walked alone,
two slots of 40 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.arithmetic import Limited, require_int, verdict_lines
from openmla.backward.problem import ONE_DELTA, BackwardProblem
from openmla.kernels.cdna4.chip import FIRST_TRITON, LONE_LANE_REGISTERS
from openmla.kernels.gluon.gradients.plan import EVERY_BACKWARD, NO_ATOMICS
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.modular.cdna4.prefill import LDS_BYTES
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import MemoryMap, Wanted, lay_out
from openmla.planning.serves import OneOf, Serves
from openmla.planning.target import Target

ELEMENT, FP32 = 2, 4
WAVE_ROWS = 32
"""Rows of a wave, and of the other side that it meets at a time: edges of a product."""
MOST_KEPT = 352
"""Registers of a lane for operands, sums and scores; the others are for fragments and addresses."""


@dataclass(frozen=True, kw_only=True)
class Cdna4BackwardConfig(Limited):
    """Both blocks."""

    heads: int
    d_nope: int
    d_rope: int
    d_v: int
    step_rows: int = 64
    """Rows of the walked side that lie in LDS together."""
    slots: int = 2
    """Steps in LDS: one is written while the one before is read."""
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name in ("heads", "d_nope", "d_v", "step_rows", "slots", "num_warps"):
            require_int(name, getattr(self, name), 1)
        require_int("d_rope", self.d_rope, 0)

    @property
    def own_rows(self) -> int:
        """Queries of a block of the query pass, keys of one of the key pass."""
        return self.num_warps * WAVE_ROWS

    def tiles(self, rows: int, batch: int) -> int:
        """Tiles of a pass: enough for any lengths of the sequences, and for the rows after them."""
        return rows // self.own_rows + batch + 1

    # Registers of a lane.

    @property
    def _operands(self) -> int:
        """32 rows of Q and d_out, or of K and V, in pairs."""
        return (self.d_nope + self.d_rope + self.d_v) * WAVE_ROWS // WAVE // 2

    @property
    def _scores(self) -> int:
        """Scores and dP of 32 x 32, and weights and dS in pairs."""
        return 3 * WAVE_ROWS * WAVE_ROWS // WAVE

    @property
    def query_registers(self) -> int:
        """What a wave of the query pass holds: with d_q."""
        sums = (self.d_nope + self.d_rope) * WAVE_ROWS // WAVE
        return self._operands + sums + self._scores

    @property
    def key_registers(self) -> int:
        """What a wave of the key pass holds: with d_k and d_v."""
        sums = (self.d_nope + self.d_rope + self.d_v) * WAVE_ROWS // WAVE
        return self._operands + sums + self._scores

    # LDS.

    def _pass(self, walked: str, values: str, more: tuple[Wanted, ...]) -> MemoryMap:
        parts = {"nope": self.d_nope, "rope": self.d_rope, values: self.d_v}

        def buffers() -> Iterator[Wanted]:
            for name, width in parts.items():
                size = self.slots * self.step_rows * width * ELEMENT
                yield Wanted(f"{walked} {name}", walked, size)
            yield from more

        return lay_out(buffers(), LDS_BYTES)

    @cached_property
    def query_pass_map(self) -> MemoryMap:
        """Byte offsets of every buffer of the query pass; deltas of its rows change lanes once."""
        moved = Wanted("deltas between lanes", "statistics", self.own_rows * FP32)
        return self._pass("keys", "values", (moved,))

    @cached_property
    def key_pass_map(self) -> MemoryMap:
        """Byte offsets of every buffer of the key pass."""
        size = self.slots * self.step_rows * FP32
        statistics = tuple(Wanted(name, "statistics", size) for name in ("totals", "deltas"))
        return self._pass("queries", "d_out", statistics)

    # Workspaces in global memory.

    def workspace(self, problem: BackwardProblem) -> int:
        """Bytes besides the gradients: statistics, parts of sinks, a part of every shared rope row
        per head, and where a query may see no key, d_out with zeros in such rows."""
        tiles = self.tiles(problem.total_q, problem.batch)
        sinks = tiles if problem.has_sink else 0
        parts = problem.total_k * self.d_rope if problem.rope == "shared" else 0
        blind = problem.causal and not problem.self_attention
        d_out = problem.total_q * self.d_v * ELEMENT if blind else 0
        return self.heads * (FP32 * (2 * tiles * self.own_rows + sinks + parts) + d_out)

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        for name, found in (("query", self.query_registers), ("key", self.key_registers)):
            if found > MOST_KEPT:
                yield f"registers: {found} > {MOST_KEPT} of a lane for what the {name} pass keeps"
        for name, used in (("query", self.query_pass_map), ("key", self.key_pass_map)):
            if used.used > LDS_BYTES:
                yield f"LDS: {used.used} > {LDS_BYTES} in the {name} pass"
        for name in ("d_nope", "d_rope", "d_v"):
            columns = getattr(self, name)
            copies = self.step_rows * columns * ELEMENT // (WAVE * DMA_BYTES)
            if columns and (copies % self.num_warps or copies & (copies - 1)):
                yield (
                    f"{name}: {self.step_rows} rows x {columns} columns are {copies} copies of "
                    f"{WAVE * DMA_BYTES} bytes, not a power of two that {self.num_warps} waves "
                    "can share evenly"
                )

    def explain(self) -> list[str]:
        """How each number came about."""
        rows, most = self.own_rows, LONE_LANE_REGISTERS
        lines = [
            f"{self.num_warps} waves, alone on their SIMDs, {WAVE_ROWS} rows each",
            f"query pass: {rows} queries of a head, {self.step_rows} keys a step, {self.slots} "
            f"slots, {self.query_registers} registers of {most} for what a lane keeps, "
            f"{self.query_pass_map.used} bytes of LDS",
            f"key pass: {rows} keys of a head, {self.step_rows} queries a step, {self.slots} "
            f"slots, {self.key_registers} registers, {self.key_pass_map.used} bytes",
            NO_ATOMICS,
        ]
        return lines + verdict_lines(self.why_unsupported())


def _lines(config: Cdna4BackwardConfig, problem: BackwardProblem) -> list[str]:
    return [*config.explain(), f"workspace: {config.workspace(problem)} bytes"]


def _block(config: Cdna4BackwardConfig, problem: BackwardProblem) -> Block:
    """The block of the key pass, which takes more."""
    return Block(
        tile_rows=config.own_rows,
        tile_keys=config.step_rows,
        stages=config.slots,
        threads=config.num_warps * WAVE,
        memory=config.key_pass_map,
        registers=config.num_warps * WAVE * LONE_LANE_REGISTERS,
    )


def _choose(problem: Any, target: Target) -> Cdna4BackwardConfig:
    return Cdna4BackwardConfig(
        heads=problem.heads, d_nope=problem.d_nope, d_rope=problem.d_rope, d_v=problem.d_v
    )


CDNA4_BACKWARD = Kernel(
    name="backward",
    serves=Serves({**EVERY_BACKWARD, "d_rope": OneOf(0, 64)}, (ONE_DELTA,)),
    config=Cdna4BackwardConfig,
    choose=_choose,
    block=_block,
    explain=_lines,
    launcher="openmla.kernels.cdna4.backward.launch",
    first_triton=FIRST_TRITON,
)
