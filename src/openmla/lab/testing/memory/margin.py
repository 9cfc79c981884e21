"""Margins: every tensor of a case between two strips of poison, on any device.

    | 4 KiB of background | tensor | 4 KiB of background |

Where there are no guard pages (on a GPU), these find what touches memory beside a tensor: a read
brings the background (NaN) into the results, a write changes the strip. Tensors are aligned as
those of torch's own allocator are, because 4 KiB is a multiple of its 512 bytes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory import Memory, fill
from openmla.lab.testing.memory.poison import Implementation, differences, run_watched

MARGIN = 4096
"""Bytes on either side."""


class MarginMemory(Memory):
    """Memory of one device in which every tensor lies between two margins."""

    def __init__(self, device: torch.device | str = "cpu", background: str = "nan") -> None:
        super().__init__(device, background)
        self._blocks: list[tuple[Tensor, torch.dtype]] = []

    def _bytes(self, size: int, dtype: torch.dtype) -> Tensor:
        block = super()._bytes(size + 2 * MARGIN, dtype)
        fill(block, dtype, self.background)
        self._blocks.append((block, dtype))
        return block[MARGIN : MARGIN + size]

    def written(self) -> list[str]:
        """Which margins changed since they were made."""
        problems = []
        for number, (block, dtype) in enumerate(self._blocks):
            strip = torch.empty(MARGIN, dtype=torch.uint8, device=block.device)
            fill(strip, dtype, self.background)
            for side, margin in (("before", block[:MARGIN]), ("after", block[-MARGIN:])):
                changed = int((margin != strip).sum())
                if changed:
                    problems.append(f"{changed} bytes {side} buffer {number} were written")
        return problems


def margin_problems(case: Case, run: Implementation, device: torch.device | str) -> list[str]:
    """What a call touches outside its tensors; nothing, for a correct implementation.

    An `out` that the call allocates has no margins, so one is given.
    """
    if case.out == "fresh":
        case = replace(case, out="given")
    clean = run(build(case, device=device))
    memory = MarginMemory(device)
    outcome, problems = run_watched(build(case, memory=memory), run)
    problems += memory.written() + differences(outcome, clean)
    return [f"between margins: {problem}" for problem in problems]
