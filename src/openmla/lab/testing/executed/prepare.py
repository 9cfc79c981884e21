"""From a case to compiled kernels with their arguments: all that an execution needs.

The kernels are compiled as a launch on the target would compile them: tensors at 16 bytes but for
those the kernel says may lie anywhere, strides by whether 16 divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gluon_sim import contended_by
from gluon_sim.compiled import Launches, Report, Schedule, execute
from openmla.dispatch import triton_version
from openmla.errors import Unsupported
from openmla.kernels.call import Call
from openmla.kernels.launch import calls
from openmla.lab.compiling.jobs import CompileJob, build, specialized
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.build import build as build_case
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.simulate import new_results, plan_on
from openmla.operands import Results
from openmla.planning import Plan, target_by_name

ARCHITECTURES = {"h200": "sm90", "b200": "sm100", "mi355x": "gfx950"}
"""Chips with kernels of their own. Other NVIDIA GPUs run the selection (`compiled_calls`)."""
SM_COUNT = 2
"""SMs of the chip that is planned for: few enough that a program does several work items."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """One launch: the compiled kernel, its runtime arguments in order, those it may write,
    whether it may begin before the launch in front of it has ended, and in which arguments its
    programs may overwrite one another's stores."""

    compiled: Any
    programs: int
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    dependent: bool
    contended: tuple[str, ...]

    def run(self, schedule: Schedule, launches: Launches, kernel: Any = None) -> Report:
        """Execute it after `launches`; `kernel` replaces what the compiled text says."""
        return execute(
            self.compiled,
            self.programs,
            self.arguments,
            outputs=self.outputs,
            schedule=schedule,
            kernel=kernel,
            launches=launches,
            dependent=self.dependent,
            contended=self.contended,
        )


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """A case with everything to execute it again and again."""

    built: BuiltCase
    plan: Plan
    results: Results
    launches: list[Prepared]
    _fresh: list[tuple[Tensor, Tensor]]
    """Every tensor that may be written, and what it held before the first launch."""

    def run(
        self, schedule: Schedule, kernels: dict[int, Any] | None = None
    ) -> tuple[Outcome, list[Report]]:
        """What comes out of one execution; the outcome is a copy."""
        for tensor, before in self._fresh:
            tensor.copy_(before)
        replaced = kernels or {}
        launches = Launches()
        reports = [
            launch.run(schedule, launches, replaced.get(number))
            for number, launch in enumerate(self.launches)
        ]
        found = (self.results.out, self.results.lse, self.results.max_logits)
        return Outcome(*(None if t is None else t.clone() for t in found)), reports  # type: ignore[arg-type]


def planned(built: BuiltCase, target: str) -> tuple[Plan, Results, list[Call]]:
    """The launches of a case on a target. Raises Unsupported where no kernel serves it."""
    results = new_results(built)
    plan = plan_on(target, built.operands, results, SM_COUNT)
    if plan.kernel.first_triton > triton_version():
        needed = ".".join(map(str, plan.kernel.first_triton))
        raise Unsupported(f"Triton {needed} is the first that compiles this kernel")
    return plan, results, list(calls(plan, built.operands, results))


def prepare(case: Case, target: str, background: str = "nan") -> PreparedCase:
    """Compile what a case runs on a target. Raises Unsupported where no kernel serves it."""
    return prepare_built(build_case(case, memory=Memory("cpu", background)), target)


def prepare_built(built: BuiltCase, target: str) -> PreparedCase:
    """Compile what a case runs that is built, and perhaps changed since."""
    inputs = {buffer.untyped_storage().data_ptr() for buffer in built.memory.buffers}
    plan, results, made = planned(built, target)
    launches = [prepared_call(call, target, inputs) for call in made]
    written = {id(t): t for launch in launches for t in written_by(launch)}
    written |= {id(t): t for t in (results.out, results.lse, results.max_logits) if t is not None}
    fresh = [(tensor, tensor.clone()) for tensor in written.values()]
    return PreparedCase(built, plan, results, launches, fresh)


def written_by(launch: Prepared) -> Iterator[Tensor]:
    """Tensors that a launch may write."""
    for name in launch.outputs:
        value = launch.arguments[name]
        yield value.base if hasattr(value, "block_shape") else value


def prepared_call(call: Call, target: str, inputs: set[int]) -> Prepared:
    """Compile a call for a target. `inputs`: addresses of storage that it must not write."""
    job = CompileJob("executed", call, target_by_name(target).arch.replace("_", ""))
    constexprs = specialized(job).constexprs
    names = [name for name in call.kernel.arg_names if name not in constexprs]
    arguments = {name: call.arguments[name] for name in names}
    outputs = tuple(name for name, value in arguments.items() if _may_write(value, inputs))
    dependent = bool(call.arguments.get("launch_pdl"))
    contended = contended_by(call.kernel)
    return Prepared(build(job), call.programs, arguments, outputs, dependent, contended)


def _may_write(value: Any, inputs: set[int]) -> bool:
    """Whether an argument is a tensor that is no input of the case."""
    tensor = value.base if hasattr(value, "block_shape") else value
    return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs
