"""Guard pages: tensors that end, or begin, exactly where the process's memory does.

Each tensor gets its own mapping with an inaccessible page before and after it. Flush against the
end, reading one element too far is a segmentation fault instead of luck; flush against the start,
so is reading one element too early.

    end     | guard | ......unused......tensor | guard |
    start   | guard | tensor......unused...... | guard |

CPU only. Because a fault ends the process, guarded cases run in a child: see
openmla.testing.isolate.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from typing import Any, Literal

import torch
from torch import Tensor

from openmla.testing.build import build
from openmla.testing.case import Case
from openmla.testing.isolate import named
from openmla.testing.memory import Memory
from openmla.testing.memory.poison import Implementation, differences, run_watched

Edge = Literal["end", "start"]
EDGES: tuple[Edge, ...] = ("end", "start")
_PROT_NONE = 0
_FAULTS = (-signal.SIGSEGV, -signal.SIGBUS)


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
    """`guard_problems` as an answer of a child process; see openmla.testing.isolate."""
    problems = "; ".join(guard_problems(case, named(options["implementation"])))
    return {"status": "failed" if problems else "right", "kind": "guard", "message": problems}


def read_beside(edge: Edge, elements_beyond: int) -> float:
    """Read one float32 at, or `elements_beyond` past, the guarded edge of a small tensor."""
    values = guarded_bytes(16, edge).view(torch.float32)
    offset = 3 + elements_beyond if edge == "end" else -elements_beyond
    return ctypes.c_float.from_address(values.data_ptr() + 4 * offset).value


def self_test() -> dict[str, bool]:
    """Whether guards bite here: the last element is readable, one further is a fault.

    Each read happens in its own process. All values must be True before a clean guarded run means
    anything.
    """
    command = [sys.executable, "-m", "openmla.testing.memory.guard"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, bool] = json.loads(child.stdout)
    return results


def _forked_reads() -> dict[str, bool]:
    """Read at and beyond both edges, each in a fork of this process, which may die of it."""
    results = {}
    for edge in EDGES:
        for beyond in (0, 1):
            reader = os.fork()
            if reader == 0:
                read_beside(edge, beyond)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
            name = f"{edge}, {'one element beyond' if beyond else 'inside'}"
            results[name] = code in _FAULTS if beyond else code == 0
    return results


if __name__ == "__main__":
    print(json.dumps(_forked_reads()))
