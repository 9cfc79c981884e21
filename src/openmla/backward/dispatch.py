"""From operands to launches: the plan of a backward pass, and its kernels' only launcher."""

from __future__ import annotations

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.backward.problem import BackwardProblem
from openmla.dispatch import device_target, triton_version
from openmla.kernels.fallback import launcher_of, run_calls, run_plan, without_failed
from openmla.kernels.launch import current
from openmla.operands import DenseOperands, Results
from openmla.planning import NEWEST_TRITON
from openmla.planning.backward import BackwardPlan, cached_backward_plan
from openmla.planning.target import Target


def plan_for(problem: BackwardProblem, target: Target, backend: str) -> BackwardPlan:
    """The plan that runs with the Triton that is installed; an explicit backend stays."""
    triton = NEWEST_TRITON if target.vendor == "cpu" else triton_version()
    return without_failed(lambda name: cached_backward_plan(problem, target, name, triton), backend)


def require_backward(operands: DenseOperands, results: Results, backend: str) -> None:
    """Raise Unsupported, before the forward pass, if no kernel computes its gradients."""
    problem = BackwardProblem.of(operands.problem(results))
    plan_for(problem, device_target(operands.q.device), backend)


def run_backward(operands: BackwardOperands, gradients: Gradients, backend: str) -> BackwardPlan:
    """Plan and launch: every element of the gradients that are wanted is written."""
    problem, target = operands.problem(), device_target(operands.device)

    def launch(plan: BackwardPlan) -> None:
        with current(operands.device):
            run_calls(launcher_of(plan).calls(plan, operands, gradients))

    return run_plan(lambda: plan_for(problem, target, backend), launch)[0]
