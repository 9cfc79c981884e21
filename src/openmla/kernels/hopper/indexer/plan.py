"""Plans of the indexer on Hopper: scores and selection, Gluon kernels for sm_90."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.indexer.problem import DIM, IndexProblem
from openmla.kernels.hopper.chip import (
    FP32,
    REGISTERS_PER_SM,
    WGMMA_M,
    HopperBlock,
    Registers,
    accumulator_registers,
    barriers,
    launch_tail,
    smem_reasons,
)
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import Wanted
from openmla.planning.serves import OneOf, Range, index_scores, index_selection
from openmla.planning.target import Target

COLUMNS = 128
"""N of the product: all heads of a consumer's queries."""
DECODE_QUERIES = 2
"""Requests with at most so many queries each, in the mean, share their keys with nobody."""
PIECE_FIELDS, DECODE_FIELDS = 4, 5
SCAN_BYTES = 4  # of a warp
GROUP = 128  # scores that a warp loads at once
SHORT_ROW = 8192  # scores that 8 warps hold in registers
FEW = 2048  # of a list of 4096 that was cut, a chunk of 2048 fits behind: 4 warps do
BOX_STEP = 32  # rows: a copy of fp32 scales begins at a multiple of 128 bytes of shared memory


@dataclass(frozen=True)
class HopperScoresConfig(HopperBlock):
    """Consumers divide queries or keys among them.

    Queries: 4 consumers of 128 / heads queries each share blocks of 128 keys (scores.py). Keys: all
    consumers share the one or two queries of a request (decode_scores.py), and the ring holds as
    many bytes as memory needs in flight.
    """

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
    shared_queries: int = 0
    """Queries of the tile that all consumers share, 1 or 2; 0: each has a tile of its own."""
    group: int = 32
    """Requests that a producer counts at once, where consumers share queries."""

    @cached_property
    def tile_queries(self) -> int:
        """Queries of a consumer's product."""
        return self.shared_queries or COLUMNS // self.heads

    @cached_property
    def tile_columns(self) -> int:
        """N of a consumer's product: all heads of its queries."""
        return self.tile_queries * self.heads

    @cached_property
    def registers(self) -> Registers:
        """Registers of the warp-groups; up to 64 of a consumer are the accumulator."""
        if self.shared_queries:
            return Registers(self.consumers, {2: 216, 3: 144, 4: 104}[self.consumers], 56)
        return Registers(self.consumers, 112 if self.consumers == 4 else 160, 24)

    @cached_property
    def box_rows(self) -> int:
        """Keys of one copy: no more than 64, and no box crosses a page."""
        return math.gcd(self.page_size, WGMMA_M) if self.page_size else WGMMA_M

    @cached_property
    def block_queries(self) -> int:
        """Queries of a block: a key is read once for all of them."""
        return self.tile_queries * (1 if self.shared_queries else self.consumers)

    def _buffers(self) -> Iterator[Wanted]:
        q = self.query_stages * self.block_queries * self.heads * DIM
        yield Wanted("Q", "q", q, align=128)
        yield Wanted("K", "k", self.stages * self.BN * DIM, align=128)
        yield Wanted("k_scale", "k", self.stages * self.BN * FP32, align=128)
        fields = DECODE_FIELDS if self.shared_queries else PIECE_FIELDS
        yield Wanted("pieces", "info", self.query_stages * fields * 4)
        yield from barriers(
            ("Q ready", self.query_stages),
            ("Q empty", self.query_stages),
            ("K ready", self.stages),
            ("K empty", self.stages),
            ("piece ready", self.query_stages),
        )
        # What partitions are called with goes through shared memory (triton 3.6.0).
        counted = 272 if self.page_size else 240
        arguments = 288 if self.shared_queries else counted
        yield Wanted("arguments", "scratch", arguments, align=8)
        yield from launch_tail(self.registers, epilogue=0)

    def _broken_limits(self) -> Iterator[str]:
        yield from smem_reasons(self.smem_used, "Q, K and scales")
        if self.tile_columns > COLUMNS:
            yield f"{self.tile_queries} queries x {self.heads} heads: more than {COLUMNS} columns"
        if self.shared_queries and self.stages % self.consumers:
            yield f"{self.stages} stages of {self.consumers} consumers: a stage must be of one"

    def explain(self) -> list[str]:
        """What the numbers mean."""
        queries = "1 query" if self.tile_queries == 1 else f"{self.tile_queries} queries"
        product = f"{queries} x {self.heads} heads = N {self.tile_columns}"
        keys = f"blocks of {self.BN} keys, {self.stages} stages"
        if self.shared_queries:
            lines = [
                f"few queries a request: {self.consumers} consumers divide its keys, {product}",
                f"{keys}; as many blocks for each of {self.sm_count} programs",
            ]
        else:
            lines = [
                f"{self.consumers} consumers x {product}, {keys}",
                f"pieces of {self.block_queries} queries x {self.chunk} keys, drawn by "
                f"{self.sm_count} blocks",
            ]
        accumulator = accumulator_registers(self.tile_columns)
        return [*lines, self.registers.explain("the accumulator", accumulator)]


@dataclass(frozen=True)
class HopperSelectConfig(HopperBlock):
    """A block of `warps` per row at a time: see kernels' select.py.

    Rows of up to `list_size` scores are cut in registers, 32 of them in each thread; longer ones
    are first thinned out to a list of that size, `chunk` scores at a time.
    """

    topk: int
    long_rows: bool
    sm_count: int
    warps: int = 8
    chunk_vectors: int = 4
    """Vectors of four scores in a thread: their counts are packed into one word."""
    list_vectors: int = 8
    stages: int = 3
    """Chunks of the ring: all but one are being loaded. H200, 4096 x 131072 of 2048, 4 warps
    (2026-11-16): 2 take 0.97 ms, 3 0.75, 4 0.76."""
    max_registers: int = 128
    """The fewer, the more rows on an SM: 96 of 4 warps take 0.72 ms there, 128 0.75. Short rows:
    64 take 0.136 ms at 4096 x 8192, 80 0.143, 128 0.147."""

    @cached_property
    def chunk(self) -> int:
        return self.warps * self.chunk_vectors * GROUP

    @cached_property
    def list_size(self) -> int:
        return self.warps * self.list_vectors * GROUP

    @cached_property
    def blocks_per_sm(self) -> int:
        return REGISTERS_PER_SM // (32 * self.warps * self.max_registers)

    def _buffers(self) -> Iterator[Wanted]:
        if self.long_rows:
            yield Wanted("chunks", "k", self.stages * self.chunk * FP32)
        # Warps exchange sums.
        yield Wanted("scans", "scratch", self.warps * SCAN_BYTES)

    def _broken_limits(self) -> Iterator[str]:
        most = self.list_size - self.chunk
        if self.long_rows and self.topk > most:
            yield f"topk {self.topk}: a list of {self.list_size} that was cut has room for {most}"

    def explain(self) -> list[str]:
        """What the numbers mean."""
        long = f"; longer ones once through chunks of {self.chunk}" if self.long_rows else ""
        return [
            f"{self.warps} warps per row, {self.blocks_per_sm} rows on an SM at a time",
            f"rows of up to {self.list_size} scores in registers{long}",
        ]


def _select(problem: IndexProblem, target: Target) -> HopperSelectConfig:
    if problem.width <= SHORT_ROW:
        return HopperSelectConfig(problem.topk, False, target.sm_count, max_registers=64)
    few = problem.topk <= FEW
    return HopperSelectConfig(
        problem.topk, True, target.sm_count, 4 if few else 8, max_registers=96 if few else 128
    )


def _scores(problem: IndexProblem, target: Target) -> HopperScoresConfig:
    config = HopperScoresConfig(problem.heads, problem.page_size, target.sm_count)
    if problem.page_size and problem.total_q <= DECODE_QUERIES * problem.batch:
        queries = 2 if problem.total_q > problem.batch and 2 * problem.heads <= COLUMNS else 1
        # An accumulator of 128 columns has room in the registers of three consumers.
        consumers, stages = (3, 9) if queries * problem.heads > 64 else (4, 8)
        shared = replace(config, shared_queries=queries, consumers=consumers, stages=stages)
        return replace(shared, group=32 if problem.batch <= 32 else 128)
    return config


def _scores_block(config: HopperScoresConfig, problem: IndexProblem) -> Block:
    return Block(
        tile_rows=config.block_queries * config.heads,
        tile_keys=config.BN,
        stages=config.stages,
        threads=config.registers.threads,
        memory=config.smem_map,
        registers=config.registers.most,
    )


def _select_block(config: HopperSelectConfig, problem: IndexProblem) -> Block:
    threads = 32 * config.warps
    return Block(
        tile_rows=1,
        tile_keys=config.chunk if config.long_rows else config.list_size,
        stages=config.stages if config.long_rows else 1,
        threads=threads,
        memory=config.smem_map,
        registers=threads * config.max_registers,
    )


INDEX_KERNELS = (
    Kernel(
        name="scores",
        serves=index_scores(OneOf(32, 64, 128), Range(0, 1024, BOX_STEP)),
        config=HopperScoresConfig,
        choose=_scores,
        finds_windows=lambda config: config.shared_queries > 0,
        block=_scores_block,
        launcher="openmla.kernels.hopper.indexer.launch",
    ),
    Kernel(
        name="select",
        serves=index_selection(),
        config=HopperSelectConfig,
        choose=_select,
        block=_select_block,
        launcher="openmla.kernels.hopper.indexer.launch",
    ),
)
