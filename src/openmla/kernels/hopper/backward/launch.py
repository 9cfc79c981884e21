"""Host side of Hopper's backward pass: its kernels beside what all families share.

The calls themselves are listed by kernels/gluon/gradients/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.kernels.call import Call, launch_counter
from openmla.kernels.gluon.gradients.launch import Passes, tiles_of
from openmla.kernels.gluon.gradients.launch import calls as calls_of_passes
from openmla.kernels.hopper.backward.key_pass import key_pass_kernel
from openmla.kernels.hopper.backward.query_pass import query_pass_kernel
from openmla.kernels.hopper.backward.records import Registers
from openmla.planning import Plan

WGMMA_ROWS = 64


def calls(plan: Plan, operands: BackwardOperands, gradients: Gradients) -> Iterator[Call]:
    """What a backward pass runs, in order."""
    passes = Passes(query_pass_kernel, key_pass_kernel, WGMMA_ROWS, _launched)
    return calls_of_passes(plan, operands, gradients, passes)


def _launched(kernel: Any, plan: Plan, rows: int, arguments: dict[str, Any]) -> Call:
    """Persistent programs, which draw their work items from a counter."""
    registers = plan.config.registers
    own = {
        "bits_desc": arguments.get("bits_desc"),
        "k_tail_desc": arguments.get("k_tail_desc"),
        "VST": plan.config.value_stages,
        "counter_ptr": launch_counter(arguments["cu_q_ptr"].device),
        "REGISTERS": Registers(registers.consumer, registers.producer),
    }
    return Call(kernel, programs_of(plan, rows), {**arguments, **own})


def programs_of(plan: Plan, rows: int) -> int:
    """One per SM, or one per work item if those are fewer."""
    programs: int = min(tiles_of(plan, rows), plan.config.sm_count)
    return programs
