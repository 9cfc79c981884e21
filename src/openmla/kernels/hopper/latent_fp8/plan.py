"""HopperLatentFp8Config: one block of latent MLA prefill on Hopper with FP8 queries and rows.

64 rows of scores, as `HopperLatentConfig`, whose rows of keys take half the shared memory: two
steps of them are in flight. One warp-group computes scores and weights, two multiply values, each
half of the columns: so neither the exponentials nor the conversion of values keeps the tensor cores
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from openmla.kernels.hopper.chip import (
    FP32,
    SMEM_PER_BLOCK,
    WARPGROUP,
    WGMMA_M,
    Registers,
    accumulator_registers,
    barriers,
    launch_tail,
    smem_reasons,
)
from openmla.kernels.hopper.latent.plan import (
    B_TOPK,
    BLOCKS,
    ITEM_FIELDS,
    MAX_STAGES,
    HopperLatentConfig,
    LatentVariant,
    RowsLaunch,
    requests_together,
)
from openmla.planning.memory import Wanted
from openmla.problem import Problem

WEIGHT = 2  # bytes of a weight, fp16
WEIGHT_OFFSET = 8.0
"""How far, in log2 units, the reference of a row lies below its maximum. Weights are below
2^(8 + 6): fp16 ends at 2^16, and the smallest it holds is then 2^-32 of the largest."""
LATENT = 512
ROPE_WIDTHS = (0, 64)
INVERSES = 4  # work items whose divisors have a place
ARGUMENTS = 512  # of the partitions: at most, what it is depends on the call
# Two tiles of values, 64 x 32 fp16, are multiplied while a third is made of the words of a fourth.
VALUE_REGISTERS = 7 * accumulator_registers(16) // 2


@dataclass(frozen=True)
class Roles(Registers):
    """Four warp-groups: two for values, one for scores, one that loads."""

    scores: int = 0

    @cached_property
    def threads(self) -> int:
        return WARPGROUP * (self.consumer_groups + 2)

    @cached_property
    def total(self) -> int:
        return WARPGROUP * (self.consumer_groups * self.consumer + self.scores + self.producer)

    @cached_property
    def worker_warps(self) -> int:
        return 4 * (self.consumer_groups + 1)


REGISTERS = Roles(consumer_groups=2, consumer=176, producer=48, scores=112)


@dataclass(frozen=True, kw_only=True)
class HopperLatentFp8Config(HopperLatentConfig):
    """The plan of one latent FP8 block.

    >>> e4m3 = select_hopper_latent_fp8_config(heads=128, latent=512, rope=64)
    >>> e4m3.row_blocks, e4m3.num_kv_stages
    (2, 2)
    """

    scaled: bool = False
    """Whether rows have scales, one each."""

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of the rows of a step, with their scales."""
        return BLOCKS * B_TOPK * (self.width + (FP32 if self.scaled else 0))

    @cached_property
    def p_overlays_rope(self) -> bool:
        return False

    @cached_property
    def q_bytes(self) -> int:
        return WGMMA_M * self.width

    def variant(self, problem: Problem) -> LatentVariant:
        """One launch over FP8 rows as they are; sequences are never split."""
        rows = RowsLaunch(False, self.dynamic, False, requests_together(problem))
        return LatentVariant(None, False, None, (rows,), None)

    # Registers.

    @property
    def registers(self) -> Roles:
        """Registers by role; a consumer's are those of a warp-group for values."""
        return REGISTERS

    @property
    def accumulators(self) -> int:
        """Registers of half the output columns, and of values."""
        return accumulator_registers(self.latent // 2) + VALUE_REGISTERS

    def _accumulator_sum(self) -> str:
        return f"half of O {accumulator_registers(self.latent // 2)} + values {VALUE_REGISTERS}"

    # Shared memory.

    def _buffers(self) -> Iterator[Wanted]:
        steps, keys = self.num_kv_stages, self.keys_per_step
        for step in range(steps):
            yield Wanted(f"K{step} latent {self.latent}", "k", keys * self.latent)
        for step in range(steps):
            yield Wanted(f"K{step} rope", "rope", keys * self.rope)
        if self.scaled:
            yield Wanted("scales", "stats", steps * keys * FP32)
        yield Wanted(f"Q latent {self.latent}", "q", self.BM * self.latent)
        yield Wanted("Q rope", "q", self.BM * self.rope)
        for step in range(steps):
            yield Wanted(f"P{step}", "p", self.BM * keys * WEIGHT)
        yield Wanted("key validity", "stats", steps * keys * FP32)
        yield Wanted("factors of O", "stats", steps * self.BM * FP32)
        yield Wanted("divisors", "stats", INVERSES * self.BM * FP32)
        yield Wanted("work items", "stats", 2 * ITEM_FIELDS * FP32)
        yield Wanted("validity flags", "stats", 16 * steps * FP32)
        yield Wanted("flags of factors", "stats", 4 * steps * FP32)
        yield from barriers(
            ("ready", steps),
            ("p_free", steps),
            ("sums_ready", INVERSES),
            ("t_ready", 2),
            ("t_empty", 2),
            ("q_ready, q_free", 2),
        )
        yield Wanted("arguments of partitions", "scratch", ARGUMENTS)
        yield from launch_tail(self.registers, 0)

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        if self.latent != LATENT:
            yield f"latent width {self.latent} is not {LATENT}"
        if self.rope not in ROPE_WIDTHS:
            yield f"rope width {self.rope} is not one of {', '.join(map(str, ROPE_WIDTHS))}"
        yield from smem_reasons(self.smem_used, self._smem_sum())

    def _smem_sum(self) -> str:
        p = BLOCKS * self.num_kv_stages * self.BM * B_TOPK * WEIGHT
        rest = self.smem_used - self.q_bytes - p - self.num_kv_stages * self.step_bytes
        return (
            f"Q {self.q_bytes} + {self.num_kv_stages} x ({self.keys_per_step} keys = "
            f"{self.step_bytes}) + P {p} + {rest} of statistics, barriers and scratch"
        )

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        lines = super().explain()
        lines[1] = (
            f"a step is {self.keys_per_step} keys; each warp-group that multiplies values holds "
            f"{self.latent // 2} of {self.latent} output columns"
        )
        return ["scores are FP8 products of Q and rows; values become fp16 in registers", *lines]


def select_hopper_latent_fp8_config(**arguments: Any) -> HopperLatentFp8Config:
    """The deepest ring that fits; the arguments are those of HopperLatentFp8Config."""
    config = HopperLatentFp8Config(**arguments)
    deeper = (replace(config, num_kv_stages=stages) for stages in range(MAX_STAGES, 1, -1))
    return next((c for c in deeper if c.smem_used <= SMEM_PER_BLOCK), config)
