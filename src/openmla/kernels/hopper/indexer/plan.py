"""Plans of the indexer's scores on Hopper, Gluon kernels for sm_90; the selection is shared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.indexer.problem import DIM, KEY_DTYPES, IndexProblem
from openmla.kernels.gluon.select.plan import SELECTION
from openmla.kernels.hopper.chip import (
    FP32,
    WARPGROUP,
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
from openmla.planning.serves import OneOf, Range, index_scores
from openmla.planning.target import Target

COLUMNS = 128
"""N of the product: all heads of a consumer's queries."""
DECODE_QUERIES = 2
"""Requests with at most so many queries each, in the mean, are scored one by one: each reads its
keys for itself (decode_scores.py)."""
ITEM_FIELDS, DECODE_FIELDS = 4, 5
BOX_STEP = 32  # rows: a copy of fp32 scales begins at a multiple of 128 bytes of shared memory


@dataclass(frozen=True)
class ConvertingRegisters(Registers):
    """Registers of consumers, the producer's warp-group and the one that converts FP4 keys."""

    converter: int = 0
    converter_groups: int = 1

    @cached_property
    def threads(self) -> int:
        """Threads of all warp-groups."""
        return WARPGROUP * (self.consumer_groups + self.converter_groups + 1)

    @cached_property
    def total(self) -> int:
        """Registers of the block after setmaxnreg."""
        return super().total + WARPGROUP * self.converter_groups * self.converter

    @cached_property
    def worker_warps(self) -> int:
        """Warps besides the first warp-group; each has a byte of state in shared memory."""
        return super().worker_warps + 4 * self.converter_groups


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
    """Keys of a work item: 1024 of them at 2048 queries x 8192 keys, on 132 SMs. H200: 4096 is
    5 % slower there, 1024 3 % slower at 4096 x 65536 (2026-11-15)."""
    shared_queries: int = 0
    """Queries of the tile that all consumers share, 1 or 2; 0: each has a tile of its own."""
    group: int = 32
    """Requests that a producer counts at once, where consumers share queries."""
    fp4: bool = False
    """Keys are e2m1: a warp-group converts them, and three consumers have registers beside it."""

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
        if self.fp4:
            if self.shared_queries:
                consumer, converter = (136, 72) if self.tile_columns > 64 else (120, 88)
                return ConvertingRegisters(2, consumer, 56, converter, converter_groups=2)
            return ConvertingRegisters(3, 128, 24, converter=72)
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
        if self.fp4:
            keys = self.stages * self.BN
            yield Wanted("codes", "k", keys * DIM // 2, align=128)
            yield Wanted("exponents", "k", keys * FP32, align=128)
            yield Wanted("wide keys", "k", keys * FP32)
            yield Wanted("any wide", "info", self.stages * WARPGROUP // 32 * 4)
            yield from barriers(("codes ready", self.stages), ("codes empty", self.stages))
        fields = DECODE_FIELDS if self.shared_queries else ITEM_FIELDS
        yield Wanted("work items", "info", self.query_stages * fields * 4)
        yield from barriers(
            ("Q ready", self.query_stages),
            ("Q empty", self.query_stages),
            ("K ready", self.stages),
            ("K empty", self.stages),
            ("item ready", self.query_stages),
        )
        # What partitions are called with goes through shared memory (triton 3.6.0).
        counted = 272 if self.page_size else 240
        arguments = 288 if self.shared_queries else counted
        arguments += 96 if self.fp4 else 0
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
                f"work items of {self.block_queries} queries x {self.chunk} keys, fetched by "
                f"{self.sm_count} blocks",
            ]
        accumulator = accumulator_registers(self.tile_columns)
        return [*lines, self.registers.explain("the accumulator", accumulator)]


def _scores(problem: IndexProblem, target: Target) -> HopperScoresConfig:
    config = HopperScoresConfig(problem.heads, problem.page_size, target.sm_count)
    if problem.key_dtype == "e2m1":
        config = replace(config, fp4=True, consumers=3)
    if problem.page_size and problem.total_q <= DECODE_QUERIES * problem.batch:
        queries = 2 if problem.total_q > problem.batch and 2 * problem.heads <= COLUMNS else 1
        # An accumulator of 128 columns has room in the registers of three consumers.
        consumers, stages = (3, 9) if queries * problem.heads > 64 else (4, 8)
        if config.fp4:
            consumers, stages = 2, 6
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


INDEX_KERNELS = (
    Kernel(
        name="scores",
        serves=index_scores(
            OneOf(32, 64, 128), Range(0, 1024, BOX_STEP), key_dtype=OneOf(*KEY_DTYPES)
        ),
        config=HopperScoresConfig,
        choose=_scores,
        finds_windows=lambda config: config.shared_queries > 0,
        block=_scores_block,
        launcher="openmla.kernels.hopper.indexer.launch",
    ),
    SELECTION,
)
