"""Compiled kernels with one synchronization taken out: is it noticed?

What no schedule notices is redundant, or a blind spot of the interpreter.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

# The beginning of an instruction's name, and what it is called.
_KINDS = {
    "mbarrier.try_wait": "wait",
    "mbarrier.arrive": "arrive",
    "fence.proxy": "fence",
    "tcgen05.commit": "commit",
    "tcgen05.wait::st": "wait for stores",
    "tcgen05.wait::ld": "wait for loads",
    "bar.sync": "barrier",
    "barrier.sync": "barrier",
    "wgmma.wait_group": "wait for products",
    "cp.async.wait_group": "wait for copies",
    "cp.async.bulk.wait_group": "wait for bulk stores",
    "barrier.cluster.wait": "cluster barrier",
    "s_barrier": "barrier",
    "griddepcontrol.wait": "wait for the launch in front",
}


def synchronizations(kernel: Any) -> dict[int, str]:
    """The instructions that order others, by their index."""
    found = {}
    for at, instruction in enumerate(kernel.code):
        kinds = [kind for name, kind in _KINDS.items() if instruction.op.startswith(name)]
        if instruction.op == "s_waitcnt" and "vmcnt" in instruction.where.text:
            kinds = ["wait for copies"]
        if kinds:
            found[at] = kinds[0]
    return found


def without(kernel: Any, at: int) -> Any:
    """A copy of a kernel whose instruction `at` orders nothing."""
    changed = copy.copy(kernel)
    changed.code = list(kernel.code)
    old = kernel.code[at]
    if old.op.startswith("mbarrier.try_wait"):
        run = _unwaiting(old.run)
    elif old.op == "s_waitcnt" and "lgkmcnt" in old.where.text:
        text = re.sub(r"vmcnt\(\d+\)\s*&?\s*", "", old.where.text)
        run = kernel.instruction(text, old.where).run
    else:
        run = _nothing
    changed.code[at] = dataclasses.replace(old, run=run)
    return changed


def _nothing(strand: Any) -> None:
    """What is left of an instruction that was taken out."""


def _unwaiting(wait: Any) -> Any:
    """The wait says that its phase is complete, whether it is or not."""

    def run(warp: Any) -> None:
        warp.waits = False
        wait(warp)
        warp.waits = True

    return run
