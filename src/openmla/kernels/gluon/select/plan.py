"""The plan of the selection: a Gluon kernel for GPUs with cp.async, or with CDNA4's loads to LDS.

Its numbers were chosen on an H200. A warp of 64 lanes does what one of 32 does, with half of the
vectors in each thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.arithmetic import Limited, Part
from openmla.indexer.problem import IndexProblem
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import MemoryMap, Wanted, lay_out
from openmla.planning.serves import index_selection
from openmla.planning.target import KB, Target

REGISTERS_OF_A_LANE = 2048
"""Registers of an SM or CU, divided by the lanes of a warp: 65536 / 32, and 131072 / 64."""
FP32 = 4
SCAN_BYTES = 4  # of a warp
RESERVED = KB
"""Shared memory that CUDA keeps of every block; an SM has as much more than one block may use."""
VECTOR = 4  # scores that a lane loads at once
SHORT_ROW = 8192  # scores that 8 warps hold in registers
FEW = 2048  # of a list of 4096 that was cut, a chunk of 2048 fits behind: 4 warps do


@dataclass(frozen=True)
class GluonSelectConfig(Limited):
    """A block of `warps` per row at a time: see kernel.py.

    Rows of up to `list_size` scores are cut in registers, 32 of them in each thread; longer ones
    are first thinned out to a list of that size, `chunk` scores at a time.
    """

    topk: int
    long_rows: bool
    sm_count: int
    smem_limit: int = 227 * KB
    """Shared memory that a block may have."""
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
    lanes: int = 32
    """Threads of a warp."""
    loads_to_lds: bool = False
    """Whether chunks are copied by CDNA4's loads to LDS; else by cp.async."""

    @cached_property
    def chunk(self) -> int:
        return self.warps * self.chunk_vectors * self.lanes * VECTOR

    @cached_property
    def list_size(self) -> int:
        return self.warps * self.list_vectors * self.lanes * VECTOR

    @cached_property
    def blocks_per_sm(self) -> int:
        """Rows that an SM works on: as many as its registers and its shared memory hold.

        >>> short = GluonSelectConfig(2048, True, 128, warps=4, max_registers=96)
        >>> short.blocks_per_sm, replace(short, smem_limit=99 * KB).blocks_per_sm
        (5, 3)
        """
        by_registers = REGISTERS_OF_A_LANE // (self.warps * self.max_registers)
        by_memory = (self.smem_limit + RESERVED) // (self.smem_used + RESERVED)
        return min(by_registers, by_memory)

    @cached_property
    def smem_map(self) -> MemoryMap:
        """Byte offsets of every buffer."""
        return lay_out(self._buffers(), self.smem_limit)

    smem_used = Part[int]("smem_map.used")

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


def select_config(problem: IndexProblem, target: Target) -> GluonSelectConfig:
    """Short rows in registers; of long ones, few winners take fewer warps."""
    whole = GluonSelectConfig(problem.topk, False, target.sm_count, target.smem_per_block)
    if problem.width <= SHORT_ROW:
        return replace(whole, max_registers=64)
    if problem.topk <= FEW:
        return replace(whole, long_rows=True, warps=4, max_registers=96)
    return replace(whole, long_rows=True)


def _select_block(config: GluonSelectConfig, problem: IndexProblem) -> Block:
    threads = config.lanes * config.warps
    return Block(
        tile_rows=1,
        tile_keys=config.chunk if config.long_rows else config.list_size,
        stages=config.stages if config.long_rows else 1,
        threads=threads,
        memory=config.smem_map,
        registers=threads * config.max_registers,
    )


def selection(
    choose: Callable[[IndexProblem, Target], GluonSelectConfig] = select_config,
    first_triton: tuple[int, int] = (0, 0),
    name: str = "select",
    archs: tuple[str, ...] = (),
) -> Kernel:
    """The kernel as a family declares it."""
    return Kernel(
        name=name,
        archs=archs,
        serves=index_selection(),
        config=GluonSelectConfig,
        choose=choose,
        block=_select_block,
        launcher="openmla.kernels.gluon.select.launch",
        first_triton=first_triton,
    )


SELECTION = selection()
