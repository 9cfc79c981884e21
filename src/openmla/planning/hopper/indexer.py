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
from openmla.planning.serves import ALIGNED, ANY, YES_OR_NO, OneOf, Range, Serves
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


@dataclass(frozen=True)
class HopperSelectConfig(HopperBlock):
    """A block of `warps` per row at a time: see kernels' select.py.

    Rows of up to `list_size` scores are cut in registers, 32 of 256 threads each; longer ones are
    first thinned out to a list of that size.
    """

    topk: int
    long_rows: bool
    sm_count: int
    warps: int = 8
    values: int = 8
    """Neighboring scores in a thread: with more of them scans are shorter, with fewer reads of
    shared memory have fewer bank conflicts (8: two-way)."""
    chunk: int = 4096
    list_size: int = 8192
    long_stages: int = 4
    """64 KiB of scores in flight: 132 SMs need about 30 KiB each to cover 0.8 us at 4.8 TB/s."""

    @property
    def stages(self) -> int:
        """Chunks of the ring; a row that is loaded whole needs room for the list."""
        return self.long_stages if self.long_rows else self.list_size // self.chunk

    @property
    def blocks_per_sm(self) -> int:
        """As many as registers allow."""
        return 65536 // (32 * self.warps * self.max_registers)

    @property
    def max_registers(self) -> int:
        """Short rows want many blocks, the walk of long ones wants registers (H200, 2026-11-15:
        0.152 against 0.29 ms at 4096 x 8192, 1.07 against 1.5 ms at 4096 x 131072)."""
        return 128 if self.long_rows else 64

    @property
    def box(self) -> int:
        """Scores of one copy: the most that TMA allows."""
        return 256

    def _buffers(self) -> Iterator[Wanted]:
        yield Wanted("scores", "k", self.stages * self.chunk * FP32, align=128)
        yield from barriers(("chunk ready", self.stages), ("row ready", 1))

    def _broken_limits(self) -> Iterator[str]:
        most = self.list_size - self.chunk
        if self.topk > most:
            yield f"topk {self.topk}: a list of {self.list_size} that was cut has room for {most}"

    def explain(self) -> list[str]:
        """What the numbers mean."""
        return [
            f"{self.warps} warps per row, {self.blocks_per_sm} rows on an SM at a time",
            f"rows of up to {self.list_size} scores in registers; longer ones once through "
            f"{self.stages} chunks of {self.chunk}",
        ]


def _select(problem: IndexProblem, target: Target) -> HopperSelectConfig:
    long_rows = problem.width > HopperSelectConfig.list_size
    return HopperSelectConfig(problem.topk, long_rows, target.sm_count)


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
        Kernel(
            serves=Serves(
                {
                    "form": OneOf("select"),
                    "topk": Range(1),
                    "page_size": ANY,
                    "add_starts": YES_OR_NO,
                    "wants_counts": YES_OR_NO,
                    "wants_mask": YES_OR_NO,
                    "total_q": ANY,
                    "width": ANY,
                    "aligned_16": ALIGNED,
                }
            ),
            config=HopperSelectConfig,
            choose=_select,
            launcher="openmla.kernels.hopper.indexer.launch",
        ),
    ),
)
