"""What a B200 offers one block, and what Triton makes of a kernel in partitions. Pure integers.

The first partition is the kernel's own four warps, the others are workers. Workers are called with
values that pass through shared memory, and each of their warps has a byte of state there. Triton
places buffers by size, the largest first, most at multiples of 16 bytes; 3.6 and 3.9 alike.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from openmla.modular.blackwell.units import MBAR_BYTES, SMEM_CARVEOUT, WARPGROUP
from openmla.planning.family import Block
from openmla.planning.memory import Columns, MemoryMap, Wanted, lay_out

REGISTERS_PER_SM = 65536
REGISTER_STEP = 8  # setmaxnreg takes multiples of it
MOST_REGISTERS = 256  # of a thread, as setmaxnreg counts
TMEM_ALLOCATIONS = (32, 64, 128, 256, 512)


class Worker(NamedTuple):
    """A partition besides the first."""

    name: str
    warps: int
    registers: int
    """Registers of a thread."""


class Partitioned:
    """A kernel in partitions. Subclasses say what it allocates and which partitions it has."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The partitions besides the first."""
        raise NotImplementedError

    def tiles(self) -> Iterator[Wanted]:
        """Buffers of rows and of what belongs to them; those of 0 bytes are not there."""
        raise NotImplementedError

    def barriers(self) -> dict[str, int]:
        """How many mbarriers of each kind."""
        raise NotImplementedError

    @property
    def arguments(self) -> int:
        """Bytes of what the workers are called with."""
        raise NotImplementedError

    @property
    def block(self) -> Block:
        """What one block takes of the chip."""
        raise NotImplementedError

    @cached_property
    def worker_groups(self) -> int:
        """Warp groups besides the first."""
        return len(self._group_registers)

    @cached_property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.worker_groups)

    @cached_property
    def registers_at_launch(self) -> int:
        """Registers of every thread before the partitions divide those of the SM."""
        return REGISTERS_PER_SM // self.threads // REGISTER_STEP * REGISTER_STEP

    @cached_property
    def tmem_columns(self) -> int:
        """Columns of tensor memory that are allocated."""
        return max(c.first + c.count for c in self.block.tensor_memory)

    @cached_property
    def _group_registers(self) -> list[int]:
        """Registers of a thread by warp-group; single warps share one, sized for the largest."""
        whole = [worker.registers for worker in self.workers if worker.warps == 4]
        return [*whole, max(worker.registers for worker in self.workers if worker.warps < 4)]

    @property
    def first_registers(self) -> int:
        """Registers of a thread of the first partition: what the others leave."""
        budget = self.registers_at_launch * (1 + self.worker_groups)
        return min(budget - sum(self._group_registers), MOST_REGISTERS)

    @property
    def block_registers(self) -> int:
        """Registers of the whole block."""
        divided = WARPGROUP * (self.first_registers + sum(self._group_registers))
        return max(divided, self.threads * self.registers_at_launch)

    def memory(self, scratch: int = 0) -> MemoryMap:
        """Shared memory as Triton lays it out; `scratch` comes where the arguments were."""
        bars = [Wanted(name, "barriers", n * MBAR_BYTES) for name, n in self.barriers().items()]
        wanted = [*self.tiles(), *bars, *self.own_regions(scratch)]
        return lay_out(sorted(wanted, key=lambda region: -region.size), SMEM_CARVEOUT)

    def own_regions(self, scratch: int) -> list[Wanted]:
        """What Triton needs for itself."""
        return [
            Wanted("arguments of partitions", "scratch", max(self.arguments, scratch)),
            Wanted("warp states", "scratch", 4 * self.worker_groups, align=1),
        ]

    def compiled_lines(self, differences: Iterator[str], rescale: tuple[float, float]) -> list[str]:
        """What Triton makes of the plan; `rescale` is (threshold, bias) of the weights."""
        used, tiles = self.block.memory.used, sum(tile.size for tile in self.tiles())
        count = sum(self.barriers().values())
        rest = used - tiles - count * MBAR_BYTES - self.arguments
        named = [f"softmax {self.first_registers}"]
        named += [f"{worker.name} {worker.registers}" for worker in self.workers]
        threshold, bias = rescale
        lifted = f", weights are lifted by 2^{bias:g}" if bias else ""
        return [
            f"compiled: {used} bytes of shared memory: {tiles} of tiles, {count} barriers, "
            f"{self.arguments} of arguments to partitions, {rest} of warp states and alignment",
            *(f"  unlike Modular's: {what}" for what in differences),
            f"registers of a thread: {', '.join(named)}; {self.threads} threads launched with "
            f"{self.registers_at_launch}",
            f"O is rescaled when a row's maximum grew by more than 2^{threshold:g}{lifted}",
        ]


def argument_bytes(*, tiles: int, arrays: int, pointers: int, integers: int) -> int:
    """Bytes of a partition's arguments: an address with three dimensions (a tile) or two (an array
    of barriers), an address alone (a pointer, tensor memory) and a number take these."""
    return 20 * tiles + 16 * arrays + 8 * pointers + 4 * integers


def allocated(columns: Sequence[Columns]) -> tuple[Columns, ...]:
    """Columns of tensor memory, and those that come with them: allocations are powers of two.

    >>> allocated([Columns("S", 0, 128), Columns("O", 128, 256)])[-1]
    Columns(name='not used', first=384, count=128)
    """
    end = max(c.first + c.count for c in columns)
    whole = next(n for n in TMEM_ALLOCATIONS if n >= end)
    return (*columns, Columns("not used", end, whole - end)) if whole > end else tuple(columns)
