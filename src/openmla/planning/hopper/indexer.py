"""Hopper's plans of the indexer: Gluon kernels for sm_90."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from openmla.indexer.problem import DIM, IndexProblem
from openmla.planning.family import Family, Kernel
from openmla.planning.hopper.chip import (
    FP32,
    WGMMA_M,
    HopperBlock,
    Registers,
    barriers,
    launch_tail,
    smem_reason,
)
from openmla.planning.memory import Wanted
from openmla.planning.serves import ALIGNED, ANY, OneOf, Range, Serves
from openmla.planning.target import Target

COLUMNS = 128
"""N of the product: all heads of a consumer's queries."""
BOX_STEP = 32  # rows: a copy of fp32 scales begins at a multiple of 128 bytes of shared memory


@dataclass(frozen=True)
class HopperScoresConfig(HopperBlock):
    """4 consumers of 128 / heads queries each, over blocks of 128 keys: see kernels' scores.py."""

    heads: int
    page_size: int
    sm_count: int
    consumers: int = 4
    BN: int = 128
    stages: int = 4
    query_stages: int = 2
    chunk: int = 2048
    """Keys of a piece of work: 1024 of them at 2048 queries x 8192 keys, on 132 SMs. H200: 4096 is
    5 % slower there, 1024 3 % slower at 4096 x 65536 (2026-11-15)."""

    @property
    def registers(self) -> Registers:
        """64 of a consumer's are the accumulator."""
        return Registers(self.consumers, 112 if self.consumers == 4 else 160, 24)

    @property
    def box_rows(self) -> int:
        """Keys of one copy: no more than 64, and no box crosses a page."""
        return math.gcd(self.page_size, WGMMA_M) if self.page_size else WGMMA_M

    @property
    def block_queries(self) -> int:
        """Queries of a block: a key is read once for all of them."""
        return self.consumers * (COLUMNS // self.heads)

    def _buffers(self) -> Iterator[Wanted]:
        q = self.query_stages * self.consumers * COLUMNS * DIM
        yield Wanted("Q", "q", q, align=128)
        yield Wanted("K", "k", self.stages * self.BN * DIM, align=128)
        yield Wanted("k_scale", "k", self.stages * self.BN * FP32, align=128)
        yield Wanted("pieces", "info", self.query_stages * 4 * 4)
        yield from barriers(
            ("Q ready", self.query_stages), ("Q empty", self.query_stages),
            ("K ready", self.stages), ("K empty", self.stages), ("piece ready", self.query_stages),
        )  # fmt: skip
        # What partitions are called with goes through shared memory (triton 3.6.0).
        yield Wanted("arguments", "scratch", 272 if self.page_size else 240, align=8)
        yield from launch_tail(self.registers, epilogue=0)

    def _broken_limits(self) -> Iterator[str]:
        reason = smem_reason(self.smem_used, "Q, K and scales")
        if reason:
            yield reason

    def explain(self) -> list[str]:
        """What the numbers mean."""
        queries = COLUMNS // self.heads
        return [
            f"{self.consumers} consumers x {queries} queries x {self.heads} heads = N {COLUMNS}, "
            f"blocks of {self.BN} keys, {self.stages} stages",
            f"pieces of {self.block_queries} queries x {self.chunk} keys, drawn by "
            f"{self.sm_count} blocks",
            self.registers.explain("the accumulator", COLUMNS * WGMMA_M // 128),
        ]


def _scores(problem: IndexProblem, target: Target) -> HopperScoresConfig:
    return HopperScoresConfig(problem.heads, problem.page_size, target.sm_count)


HOPPER_INDEX = Family(
    name="hopper",
    archs=("sm_90",),
    kernels=(
        Kernel(
            serves=Serves(
                {
                    "form": OneOf("scores"),
                    "heads": OneOf(32, 64, 128),
                    "page_size": Range(0, 1024, BOX_STEP),
                    "total_q": ANY,
                    "width": ANY,
                    "aligned_16": ALIGNED,
                }
            ),
            config=HopperScoresConfig,
            choose=_scores,
            launcher="openmla.kernels.hopper.indexer.launch",
        ),
    ),
)
