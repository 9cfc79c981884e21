"""Guard pages: tensors that end, or begin, exactly where the process's memory does.

Each tensor gets its own mapping with an inaccessible page before and after it. Flush against the
end, reading one element too far is a segmentation fault instead of luck; flush against the start,
so is reading one element too early.

    end     | guard | ......unused......tensor | guard |
    start   | guard | tensor......unused...... | guard |

CPU only. Because a fault ends the process, guarded cases run in a child: see
openmla.lab.testing.isolate.
"""

import ctypes
import mmap
from typing import Any, Literal

import torch
from torch import Tensor

from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.isolate import named
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.poison import Implementation, differences, run_watched

Edge = Literal["end", "start"]
EDGES: tuple[Edge, ...] = ("end", "start")
_PROT_NONE = 0


class GuardedMemory(Memory):
    """CPU memory in which every tensor lies against an inaccessible page."""

    def __init__(self, edge: Edge, background: str = "nan") -> None:
        super().__init__("cpu", background)
        self.edge = edge

    def _bytes(self, size: int, dtype: torch.dtype) -> Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return guarded_bytes(size, self.edge)


def guarded_bytes(size: int, edge: Edge) -> Tensor:
    """`size` bytes with a guard page touching the given edge; the mapping lives as long."""
    page = mmap.PAGESIZE
    middle = -(-size // page) * page
    mapping = mmap.mmap(-1, middle + 2 * page)
    start = page if edge == "start" else page + middle - size
    # The array keeps the mapping alive, and the tensor keeps the array.
    array = (ctypes.c_char * size).from_buffer(mapping, start)
    first = ctypes.addressof(array) - start
    for guard in (first, first + page + middle):
        _protect(guard, page)
    return torch.frombuffer(array, dtype=torch.uint8)


def _protect(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), _PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")


def guard_problems(case: Case, run: Implementation) -> list[str]:
    """Compare guarded runs with a plain one; a fault ends this process."""
    clean = run(build(case))
    problems = []
    for edge in EDGES:
        outcome, written = run_watched(build(case, memory=GuardedMemory(edge)), run)
        problems += [f"guard at the {edge}: {p}" for p in written + differences(outcome, clean)]
    return problems


def check(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """`guard_problems` as an answer of a child process; see openmla.lab.testing.isolate."""
    problems = "; ".join(guard_problems(case, named(options["implementation"])))
    return {"status": "failed" if problems else "right", "kind": "guard", "message": problems}
