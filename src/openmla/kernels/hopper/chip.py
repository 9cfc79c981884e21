"""What an H100 or H200 offers one block, and the arithmetic its plans share. Pure integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import Limited, ceildiv
from openmla.planning.memory import MemoryMap, Wanted, lay_out

SMEM_PER_BLOCK = 227 * 1024
REGISTERS_PER_SM = 65536
MOST_REGISTERS = 255  # of a thread
WARPGROUP = 128  # threads; wgmma is issued by a whole warp-group
WGMMA_M = 64  # rows of one wgmma
WGMMA_MAX_N = 256  # columns
WGMMA_K_BYTES = 32  # columns of one step: 16 two-byte values
SWIZZLE_BYTES = 128  # widest row of a swizzle pattern; wider tiles are cut into panels
SWIZZLE_ROWS = 8  # a swizzle pattern repeats every 8 rows, so no copied box may cut it
MBAR_BYTES = 8
FP32 = 4
# Registers kept free of accumulators for addresses and row statistics. Prototype, H200, triton
# 3.6.0: 176 of 216 (sparse) and 160 of 240 (dense) compile without a spill.
OTHER_REGISTERS = 40
# The output's change of layout before 16-byte stores. Prototype, triton 3.6.0: metadata.shared.
EPILOGUE_SCRATCH = 4096


def column_parts(width: int) -> tuple[int, ...]:
    """A width as powers of two, widest first: Gluon tiles have no other sizes.

    >>> column_parts(192), column_parts(128), column_parts(0)
    ((128, 64), (128,), ())
    """
    return tuple(1 << bit for bit in range(width.bit_length() - 1, -1, -1) if width >> bit & 1)


def accumulator_registers(columns: int) -> int:
    """Registers per thread of a 64-row fp32 tile held by one warp-group: 64 x columns / 128."""
    return ceildiv(WGMMA_M * columns, WARPGROUP)


@dataclass(frozen=True)
class Registers:
    """How setmaxnreg divides the register file between consumers and the rest.

    >>> dense = Registers(consumer_groups=2, consumer=240, producer=24)
    >>> dense.threads, dense.at_launch, dense.total
    (384, 168, 64512)
    """

    consumer_groups: int
    consumer: int
    producer: int

    @cached_property
    def threads(self) -> int:
        """Threads of the consumers, and of one warp-group for producer and scheduler warps."""
        return WARPGROUP * (self.consumer_groups + 1)

    @cached_property
    def total(self) -> int:
        """Registers of the block after setmaxnreg."""
        return WARPGROUP * (self.consumer_groups * self.consumer + self.producer)

    @cached_property
    def at_launch(self) -> int:
        """Registers of a thread at launch, as the compiler sets them: all of the SM, evenly."""
        return min(REGISTERS_PER_SM // self.threads // 8 * 8, MOST_REGISTERS)

    @cached_property
    def worker_warps(self) -> int:
        """Warps besides the first warp-group; each has a byte of state in shared memory."""
        return 4 * self.consumer_groups

    @cached_property
    def most(self) -> int:
        """Registers of the block: the larger of those at launch and after setmaxnreg."""
        return max(self.total, self.threads * self.at_launch)

    def explain(self, what: str, used: int) -> str:
        """The line that accounts for a consumer thread's registers."""
        left = self.consumer - used
        return (
            f"registers: {what} = {used} of {self.consumer}, {left} left for addresses and row "
            f"statistics; setmaxnreg {self.consumer}/{self.producer}, {self.threads} threads "
            f"launched with {self.at_launch}"
        )


class HopperBlock(Limited):
    """What every Hopper plan can say of itself, given its buffers and its limits."""

    smem_limit: ClassVar[int] = SMEM_PER_BLOCK

    def _buffers(self) -> Iterator[Wanted]:
        raise NotImplementedError

    @cached_property
    def smem_map(self) -> MemoryMap:
        """Byte offsets of every buffer."""
        return lay_out(self._buffers(), self.smem_limit)

    @property
    def smem_used(self) -> int:
        return self.smem_map.used


def barriers(*named_counts: tuple[str, int]) -> list[Wanted]:
    """Arrays of mbarriers, 8 bytes each."""
    return [Wanted(name, "barriers", count * MBAR_BYTES) for name, count in named_counts]


def launch_tail(registers: Registers, epilogue: int = EPILOGUE_SCRATCH) -> list[Wanted]:
    """What the compiler adds to a warp-specialized kernel's own buffers."""
    scratch = epilogue * registers.consumer_groups
    return [
        Wanted("epilogue scratch", "scratch", scratch, align=8),
        Wanted("warp states", "scratch", registers.worker_warps, align=1),
    ]


def register_reasons(registers: Registers, used: int, what: str) -> Iterator[str]:
    """Why an accumulator set does not fit; nothing when it does."""
    most = registers.consumer - OTHER_REGISTERS
    if used > most:
        yield (
            f"registers: {what} = {used} per thread > {registers.consumer} - {OTHER_REGISTERS} for "
            f"addresses and row statistics = {most}"
        )


def smem_reasons(used: int, parts: str) -> Iterator[str]:
    """Why a map does not fit; nothing when it does."""
    over = used - SMEM_PER_BLOCK
    if over > 0:
        yield f"{parts}: {used} bytes of shared memory, {over} more than {SMEM_PER_BLOCK}"
