"""Hopper's plans of the indexer: Gluon kernels for sm_90."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.indexer.problem import DIM, IndexProblem
from openmla.planning.family import Family, Kernel
from openmla.planning.hopper.chip import (
    FP32,
    REGISTERS_PER_SM,
    WGMMA_M,
    HopperBlock,
    Registers,
    barriers,
    launch_tail,
    smem_reasons,
)
from openmla.planning.memory import Wanted
from openmla.planning.serves import ALIGNED, ANY, YES_OR_NO, OneOf, Range, Serves
from openmla.planning.target import Target

COLUMNS = 128
"""N of the product: all heads of a consumer's queries."""
SCAN_BYTES = 16  # of a warp
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

    # 64 of a consumer's are the accumulator.
    registers = cached_property[Registers](
        lambda c: Registers(c.consumers, 112 if c.consumers == 4 else 160, 24)
    )
    # Keys of one copy: no more than 64, and no box crosses a page.
    box_rows = cached_property[int](
        lambda c: math.gcd(c.page_size, WGMMA_M) if c.page_size else WGMMA_M
    )
    # Queries of a block: a key is read once for all of them.
    block_queries = cached_property[int](lambda c: c.consumers * (COLUMNS // c.heads))

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
        yield from smem_reasons(self.smem_used, "Q, K and scales")

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

    box: ClassVar[int] = 256  # scores of one copy: the most that TMA allows
    # Chunks of the ring; a row that is loaded whole needs room for the list.
    stages = cached_property[int](
        lambda c: c.long_stages if c.long_rows else c.list_size // c.chunk
    )
    # Short rows want many blocks, the walk of long ones wants registers (H200, 2026-11-15: 0.152
    # against 0.29 ms at 4096 x 8192, 1.07 against 1.5 ms at 4096 x 131072).
    max_registers = cached_property[int](lambda c: 128 if c.long_rows else 64)
    blocks_per_sm = cached_property[int](
        lambda c: REGISTERS_PER_SM // (32 * c.warps * c.max_registers)
    )

    def _buffers(self) -> Iterator[Wanted]:
        yield Wanted("scores", "k", self.stages * self.chunk * FP32, align=128)
        # Warps exchange sums of scans; a short row is all there by then.
        ready = "" if self.long_rows else "chunk ready, then "
        yield Wanted(f"{ready}scans", "scratch", self.warps * SCAN_BYTES)
        if self.long_rows:
            yield from barriers(("chunk ready", self.stages))
        yield from barriers(("row ready", 1))

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
