"""Compiling kernels for a GPU that this machine does not have.

>>> with compiling_for("sm_90"):                                             # doctest: +SKIP
...     made = [call.compile() for call in calls(plan, operands, results)]
>>> made[0].metadata.shared                                                  # doctest: +SKIP
172032
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


class _Driver:
    """Answers what a launch asks before it compiles; nothing can be run with it."""

    def __init__(self, arch: str) -> None:
        if arch.startswith("sm"):
            self.target = GPUTarget("cuda", int(arch.removeprefix("sm").removeprefix("_")), 32)
        else:
            self.target = GPUTarget("hip", arch, 64)
        self.device = zlib.crc32(arch.encode())  # compiled kernels are kept by device number

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Inside, `Call.compile` compiles for `arch` ("sm_80", "sm90", "gfx942"), with any tensors."""
    drivers = triton.runtime.driver
    before = drivers._active  # None as long as nobody asked; asking would need a GPU
    drivers.set_active(_Driver(arch))
    try:
        yield
    finally:
        drivers._active = before
