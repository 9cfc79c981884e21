"""Compiled kernels that no case has: launches of any plan, executed one schedule after the other.

    run = compiled_calls(calls(plan, operands, results), "b200", inputs=[scores], outputs=[out])
    reports = run(schedule)         # `out` holds what this execution wrote

What is written is reset before every run, so that runs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from gluon_sim.compiled import Launches, Report, Schedule
from openmla.kernels.call import Call
from openmla.lab.testing.executed.prepare import prepared_call, written_by


def compiled_calls(
    made: Iterable[Call], target: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]
) -> Callable[[Schedule], list[Report]]:
    """Compile the calls; what comes back executes them under a schedule."""
    read_only = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    launches = [prepared_call(call, target, read_only) for call in made]
    written = {id(t): t for launch in launches for t in written_by(launch)}
    written |= {id(t): t for t in outputs}
    fresh = [(tensor, tensor.clone()) for tensor in written.values()]

    def run(schedule: Schedule) -> list[Report]:
        for tensor, before in fresh:
            tensor.copy_(before)
        order = Launches()
        return [launch.run(schedule, order) for launch in launches]

    return run
