"""Blackwell's plan of the indexer's scores, a Gluon kernel; the selection is shared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.arithmetic import Limited, Part
from openmla.indexer.problem import DIM, IndexProblem
from openmla.kernels.gluon.select.plan import SELECTION
from openmla.modular.blackwell.units import MBAR_BYTES, SMEM_CARVEOUT, TMEM_COLS
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import Columns, MemoryMap, Wanted, lay_out
from openmla.planning.serves import OneOf, Range, index_scores
from openmla.planning.target import Target

COLUMNS = 128
"""N of a product: all heads of a tile's queries."""
PART = 32  # of them are in registers at a time
FP32 = 4
BOX_STEP = 32  # rows: a copy of fp32 scales begins at a multiple of 128 bytes of shared memory
LARGEST_BOX = 64  # keys of one copy
ITEM_FIELDS = 4
THREADS = 384  # 12 warps: two partitions of sums, and those that multiply and load
REGISTERS_AT_LAUNCH = 168  # of a thread: 12 warps share 65536


@dataclass(frozen=True)
class BlackwellScoresConfig(Limited):
    """Four tiles of 128 / heads queries against blocks of 128 keys: see kernels' scores.py."""

    heads: int
    page_size: int
    sm_count: int
    tiles: int = TMEM_COLS // COLUMNS
    BN: int = 128
    stages: int = 4
    query_stages: int = 2
    chunk: int = 2048
    """Keys of a work item, as on Hopper."""
    registers: tuple[int, int, int] = (192, 24, 24)
    """Registers per thread: second partition of sums, the one that multiplies, the producer."""

    @cached_property
    def box_rows(self) -> int:
        """Keys of one copy: no box crosses a page."""
        return math.gcd(self.page_size, LARGEST_BOX) if self.page_size else LARGEST_BOX

    @cached_property
    def block_queries(self) -> int:
        """Queries of a block: a key is read once for all of them."""
        return self.tiles * (COLUMNS // self.heads)

    @cached_property
    def smem_map(self) -> MemoryMap:
        """Byte offsets of every buffer."""
        return lay_out(self._buffers(), SMEM_CARVEOUT)

    smem_used = Part[int]("smem_map.used")

    def _buffers(self) -> Iterator[Wanted]:
        queries, keys = self.query_stages * self.tiles * COLUMNS, self.stages * self.BN
        yield Wanted("Q", "q", queries * DIM, align=128)
        yield Wanted("K", "k", keys * DIM, align=128)
        yield Wanted("k_scale", "k", keys * FP32, align=128)
        yield Wanted("weights", "q", self.tiles * COLUMNS * FP32)
        yield Wanted("work items", "info", self.query_stages * ITEM_FIELDS * 4)
        counts = {
            "Q ready": self.query_stages,
            "Q empty": self.query_stages,
            "K ready": self.stages,
            "K empty": self.stages,
            "item ready": self.query_stages,
            "product ready": self.tiles,
            "product empty": self.tiles,
        }
        for name, count in counts.items():
            yield Wanted(name, "barriers", count * MBAR_BYTES)
        # What partitions are called with goes through shared memory, with a byte for every warp.
        yield Wanted("arguments", "scratch", 320 if self.page_size else 304, align=8)
        yield Wanted("warp states", "scratch", 8, align=1)

    def _broken_limits(self) -> Iterator[str]:
        over = self.smem_used - SMEM_CARVEOUT
        if over > 0:
            yield f"{self.smem_used} bytes of shared memory, {over} more than {SMEM_CARVEOUT}"

    def explain(self) -> list[str]:
        """What the numbers mean."""
        queries = COLUMNS // self.heads
        return [
            f"{self.tiles} tiles x {queries} queries x {self.heads} heads = N {COLUMNS}, "
            f"blocks of {self.BN} keys, {self.stages} stages",
            f"work items of {self.block_queries} queries x {self.chunk} keys, fetched by "
            f"{self.sm_count} blocks",
        ]


def _scores(problem: IndexProblem, target: Target) -> BlackwellScoresConfig:
    return BlackwellScoresConfig(problem.heads, problem.page_size, target.sm_count)


def _scores_block(config: BlackwellScoresConfig, problem: IndexProblem) -> Block:
    return Block(
        tile_rows=config.tiles * COLUMNS,
        tile_keys=config.BN,
        stages=config.stages,
        threads=THREADS,
        memory=config.smem_map,
        registers=THREADS * REGISTERS_AT_LAUNCH,
        tensor_memory=tuple(
            Columns(f"products of tile {tile}", tile * COLUMNS, COLUMNS)
            for tile in range(config.tiles)
        ),
    )


INDEX_KERNELS = (
    Kernel(
        name="scores",
        serves=index_scores(OneOf(32, 64, 128), Range(0, 1024, BOX_STEP)),
        config=BlackwellScoresConfig,
        choose=_scores,
        block=_scores_block,
        launcher="openmla.kernels.blackwell.indexer.launch",
    ),
    SELECTION,
)
