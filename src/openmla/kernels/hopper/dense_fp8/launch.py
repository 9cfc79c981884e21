"""Host side of the dense FP8 kernel: from a Plan and its operands to kernel calls.

A launch is what it is for bf16 (dense/launch.py); e4m3 values are upcast first. Nothing here reads
a device tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from openmla.kernels.call import Call, LaunchNumbers, scale_arguments, vector
from openmla.kernels.gluon.upcast.launch import room_for, upcast, upcast_numbers
from openmla.kernels.hopper.dense.launch import (
    descriptors,
    fixed_of,
    launches,
    outputs,
    tile_layouts,
)
from openmla.kernels.hopper.dense.launch import numbers as dense_numbers
from openmla.kernels.hopper.dense_fp8.kernel import dense_fp8_kernel
from openmla.kernels.hopper.dense_fp8.plan import HopperDenseFp8Config
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.problem import Problem


def calls(plan: Plan, op: DenseOperands, results: Results) -> Iterator[Call]:
    """What a launch runs, in order; nothing for an empty output."""
    if not results.out.numel():
        return
    if not op.has_keys:
        results.clear()  # no query sees a key, and a descriptor cannot describe an empty tensor
        return
    config: HopperDenseFp8Config = plan.config
    fixed = fixed_of(plan.problem, config)
    v = op.v
    if config.v_bytes == 1:
        v = room_for(op.v)
        yield upcast(op.v, v)
    arguments = {
        **fixed.constexprs,
        "LAYOUTS": tile_layouts(fixed.columns, element=1, rope_element=config.rope_bytes),
        **descriptors(fixed, config.BN, op, v),
        **outputs(op, results),
        **scale_arguments(op.weights.scale),
        "q_scale_ptr": vector(op.weights.q_scale),
        "k_scale_ptr": vector(op.weights.k_scale),
        "heads": op.q.shape[1],
    }
    yield from launches(dense_fp8_kernel, plan, op, arguments)


def numbers(plan: Plan, problem: Problem) -> list[LaunchNumbers] | None:
    """What a problem's token counts decide: as for bf16, and of the copy of e4m3 values."""
    found = dense_numbers(plan, problem)
    if found is None or plan.config.v_bytes != 1:
        return found
    return [upcast_numbers(problem), *found]
