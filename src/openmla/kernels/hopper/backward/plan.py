"""HopperBackwardConfig: the two kernels of the dense backward pass on Hopper.

What both do is in kernels/gluon/gradients/plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.arithmetic import Limit, require_int, verdict_lines
from openmla.backward.problem import ONE_DELTA, BackwardProblem
from openmla.kernels.gluon.gradients.plan import (
    EVERY_BACKWARD,
    NO_ATOMICS,
    BackwardTiles,
)
from openmla.kernels.hopper.chip import (
    FP32,
    HopperBlock,
    Registers,
    accumulator_registers,
    barriers,
    launch_tail,
    register_reasons,
    smem_reasons,
)
from openmla.kernels.hopper.dense.plan import TILE_INFO_BYTES, TILE_SLOTS
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import MemoryMap, Wanted, lay_out
from openmla.planning.serves import Allowed, Field, OneOf, Serves, either
from openmla.planning.target import Target

CONSUMERS = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
WIDE = 192 + 64, 256  # columns of K and of V with which a step of the query pass has 32 keys
WIDE_STEP = 32


@dataclass(frozen=True, kw_only=True)
class HopperBackwardConfig(BackwardTiles, HopperBlock):
    """Both blocks."""

    BN: int = 64
    key_stages: int = 3
    BQ: int = 32
    query_stages: int = 3
    value_stages: int = 3
    """Steps whose V, or whose d_out, are in flight."""
    key_mask: bool = False
    sm_count: int = 132

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("value_stages", self.value_stages, 2)
        require_int("sm_count", self.sm_count, 1)

    @cached_property
    def registers(self) -> Registers:
        return Registers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS)

    # Threads and registers.

    @property
    def query_accumulators(self) -> int:
        """Registers of the query pass: d_q, the scores, dP, and dS of the step before in pairs."""
        scores = accumulator_registers(self.BN)
        return accumulator_registers(self.d_nope + self.d_rope) + 2 * scores + scores // 2

    @property
    def key_accumulators(self) -> int:
        """Registers of the key pass: d_k, d_v, S^T, dP^T, and P^T and dS^T in pairs."""
        return self._sums + 3 * accumulator_registers(self.BQ)

    @property
    def _sums(self) -> int:
        """Registers of the key pass's sums: d_k and d_v, or the wider of them."""
        widths = self.d_nope + self.d_rope, self.d_v
        return accumulator_registers(max(widths) if self.key_launches[1:] else sum(widths))

    @property
    def key_launches(self) -> tuple[str, ...]:
        """d_v and d_k of 256 columns each would take 256 registers of a thread: two launches."""
        wide = (self.d_nope + self.d_rope, self.d_v) == WIDE
        return ("v", "k") if wide else ("all",)

    # Shared memory.

    def _pass(
        self, own: str, walked: str, step: int, stages: int, more: tuple[Wanted, ...] = ()
    ) -> MemoryMap:
        """A pass keeps rows of its own, and has rings of what it walks; with a key mask, of a bit
        for each of its rows and of those of a step."""

        def buffers() -> Iterator[Wanted]:
            yield from self.own_tiles(own)
            rings = {"nope": stages, "rope": stages, "values": self.value_stages}
            yield from self.walked_tiles(walked, step, rings)
            yield from more
            if self.key_mask:
                yield Wanted("bits", "statistics", stages * self.own_rows * step // 8, 128)
            yield Wanted("tile info", "barriers", TILE_INFO_BYTES)
            yield from barriers(("own ready", CONSUMERS), ("own empty", CONSUMERS))
            for name in ("ready", "empty"):
                yield from barriers((f"{walked} {name}", stages))
                yield from barriers((f"{walked} values {name}", self.value_stages))
            yield from barriers(("t_ready", TILE_SLOTS), ("t_empty", TILE_SLOTS), ("t_req", 1))
            yield from launch_tail(self.registers)

        return lay_out(buffers(), self.smem_limit)

    @cached_property
    def query_pass_map(self) -> MemoryMap:
        """Byte offsets of every buffer of the query pass."""
        return self._pass("queries", "keys", self.BN, self.key_stages)

    @cached_property
    def key_pass_map(self) -> MemoryMap:
        """Byte offsets of every buffer of the key pass; a bulk copy writes to multiples of 128."""
        size = self.query_stages * self.BQ * FP32
        statistics = tuple(Wanted(name, "statistics", size, 128) for name in ("total", "delta"))
        return self._pass("keys", "queries", self.BQ, self.query_stages, statistics)

    @cached_property
    def smem_map(self) -> MemoryMap:
        """That of the pass that takes more."""
        return max(self.query_pass_map, self.key_pass_map, key=lambda found: found.used)

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        yield from register_reasons(self.registers, self.query_accumulators, "query pass")
        for name, found in (("query pass", self.query_pass_map), ("key pass", self.key_pass_map)):
            yield from smem_reasons(found.used, name)

    def explain(self) -> list[str]:
        """How each number came about."""
        rows = self.own_rows
        lines = [
            f"query pass: {rows} queries of a head, {self.BN} keys a step, {self.key_stages} steps "
            f"in flight, {self.query_accumulators} accumulator registers of "
            f"{self.registers.consumer}, {self.query_pass_map.used} bytes of shared memory",
            f"key pass: {rows} keys of a head, {self.BQ} queries a step, {self.query_stages} steps "
            f"in flight, {self.key_accumulators} accumulator registers, "
            f"{self.key_pass_map.used} bytes",
            NO_ATOMICS,
        ]
        return lines + verdict_lines(self.why_unsupported())


def _lines(config: HopperBackwardConfig, problem: BackwardProblem) -> list[str]:
    return [*config.explain(), f"workspace: {config.workspace(problem)} bytes"]


def _block(config: HopperBackwardConfig, problem: BackwardProblem) -> Block:
    """The block of the query pass."""
    return Block(
        tile_rows=config.own_rows,
        tile_keys=config.BN,
        stages=config.key_stages,
        threads=config.registers.threads,
        memory=config.query_pass_map,
        registers=config.registers.most,
    )


def _choose(problem: Any, target: Target) -> HopperBackwardConfig:
    wide = (problem.d_qk, problem.d_v) == WIDE
    return HopperBackwardConfig(
        heads=problem.heads,
        d_nope=problem.d_nope,
        d_rope=problem.d_rope,
        d_v=problem.d_v,
        BN=WIDE_STEP if wide else 64,
        value_stages=2 if wide else 3,
        key_mask=problem.has_key_mask,
        sm_count=target.sm_count,
    )


def _not_measured(config: HopperBackwardConfig, problem: BackwardProblem) -> str:
    """Other widths, and rope per head, ran in the simulator and not yet on an H200."""
    widths = (problem.d_nope, problem.d_rope, problem.d_v)
    measured = widths == (128, 64, 128) and problem.rope == "shared"
    return "" if measured else "because with these widths or this rope it was simulated alone"


WIDE_WHOLE: Limit[BackwardProblem] = Limit(
    lambda p: (p.d_nope, p.d_rope, p.d_v) == (192, 64, 256) or (p.d_nope != 192 and p.d_v != 256),
    lambda p: "192 columns of K without rope, or 256 of V, are served as 192 + 64 -> 256",
)
SERVED: Mapping[Field, Allowed] = {
    **EVERY_BACKWARD,
    "d_nope": OneOf(64, 128, 192),
    "d_v": OneOf(64, 128, 256),
    **either("has_key_mask"),
}
HOPPER_BACKWARD = Kernel(
    name="backward",
    serves=Serves(SERVED, (ONE_DELTA, WIDE_WHOLE)),
    config=HopperBackwardConfig,
    choose=_choose,
    block=_block,
    explain=_lines,
    slower=_not_measured,
    launcher="openmla.kernels.hopper.backward.launch",
)
