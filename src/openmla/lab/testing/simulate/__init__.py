"""One case on a target's Gluon kernels by way of the simulator, judged by the acceptance rule.

The kernel that a call on the target would run is planned, its launches are prepared by the same
host code, and the simulator (gluon_sim) runs them on the CPU.

>>> from openmla.lab.testing.case import Case
>>> case = Case("dense", 1, 64, 32, 64, q_lens=(5,), k_lens=(65,))
>>> check_simulated(case, "h200").kind                                     # doctest: +SKIP
''
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gluon_sim import Report, intercept
from openmla.dispatch import triton_version
from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.launch import calls
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.neighbors import neighbor_problems, turned_round
from openmla.lab.testing.memory.poison import differences, run_watched
from openmla.lab.testing.result import Result
from openmla.lab.testing.sources import SourcesCase, judged, operands
from openmla.lab.testing.sources import new_results as results_of_sources
from openmla.operands import Operands, Results
from openmla.planning import NEWEST_TRITON, TARGETS, Plan, cached_plan, target_by_name
from openmla.planning.registry import families_of

FAMILIES = {name: families_of(TARGETS[name])[0].name for name in ("h200", "b200", "mi355x")}
"""The targets that have Gluon kernels, and whose they are."""
# Few enough SMs that a program does several work items, and enough that short chunks are split.
SM_COUNTS = (1, 2, 3, 6)
SCHEDULES = ("random", "early", "random", "late", "random")


def new_results(built: BuiltCase) -> Results:
    """Outputs of a case, full of NaN, in its memory; `out` lies as the case says."""
    case, shape = built.case, built.operands.q.shape[:2]
    wanted = {"lse": case.return_lse, "max_logits": case.return_max_logits}
    found = {name: built.memory.new(shape, torch.float32) for name in wanted if wanted[name]}
    for numbers in found.values():
        numbers.fill_(torch.nan)
    return Results(built.new_out(), **found)


def plan_on(target: str, operands: Operands, results: Results, sm_count: int = 0) -> Plan:
    """The plan of the target's Gluon kernels, on a chip cut down to `sm_count` SMs (0: all)."""
    chip = target_by_name(target)
    chip = replace(chip, sm_count=sm_count) if sm_count else chip
    # The simulator runs the text of CDNA4 kernels, which not every Triton compiles; a CTA pair has
    # barriers that came with a later one.
    triton = NEWEST_TRITON if target == "mi355x" else triton_version()
    return cached_plan(operands.problem(results), chip, FAMILIES[target], triton)


def simulated(
    plan: Plan, operands: Operands, results: Results, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernels of a plan make of these operands, and what the simulator found.

    Every element of every output must be written exactly once. `options` are those of
    `gluon_sim.simulate`. Raises Unsupported where the launcher refuses.
    """
    prepared = list(calls(plan, operands, results))
    with intercept(outputs=results.tensors(), **options) as reports:
        for call in prepared:
            call.run()
    return results, reports


@dataclass(frozen=True)
class Simulation:
    """A case simulated once: its tensors, what came out, and what is wrong besides the numbers."""

    built: BuiltCase
    outcome: Outcome
    problems: list[str]
    fp8_weights: bool


def simulate_case(
    case: Case,
    target: str,
    background: str = "zero",
    change: Callable[[BuiltCase], BuiltCase] = lambda built: built,
) -> Simulation:
    """Run a case that was built and changed; the size of the chip and the schedule of the simulator
    follow from its seed."""
    seed = case.seed
    options = {"schedule": SCHEDULES[seed % len(SCHEDULES)], "resident": 1 + seed % 3}
    found: list[str] = []
    coarse: list[bool] = []

    def run(built: BuiltCase) -> Outcome:
        results = new_results(built)
        sm_count = SM_COUNTS[seed // 2 % len(SM_COUNTS)]
        plan = plan_on(target, built.operands, results, sm_count)
        outcome, reports = simulated(plan, built.operands, results, seed=seed, **options)
        found.extend(str(report) for report in reports if not report.ok)
        # Small weights that such kernels lose are what the rule allows for weights of e4m3.
        coarse.append(plan.kernel.fp8_weights or bool(plan.kernel.coarse))
        return outcome

    built = change(build(case, memory=Memory("cpu", background)))
    outcome, written = run_watched(built, run)
    return Simulation(built, outcome, found + written, any(coarse))


def check_simulated(case: Case, target: str, deep: bool = True) -> Result:
    """What is wrong with a case on the target's kernels. A refusal is raised.

    `deep`: also whether unused memory full of NaN changes any bit, or the order of the queries of a
    call of mla_attend.
    """
    try:
        clean = simulate_case(case, target)
        if clean.problems:
            return Result("failed", "simulator", "\n".join(clean.problems))
        summed = target == "h200"  # FP8 products, as its tensor cores do
        verdict = judge(clean.built, clean.outcome, fp8_sums=summed, fp8_weights=clean.fp8_weights)
        if not verdict.ok:
            return Result("failed", "accuracy", verdict.report())
        if deep:
            poisoned = simulate_case(case, target, "nan")
            problems = poisoned.problems + differences(poisoned.outcome, clean.outcome)
            if problems:
                return Result("failed", "poison", "\n".join(problems))
        if deep and case.sources:
            turned = simulate_case(case, target, change=turned_round)
            problems = turned.problems + neighbor_problems(turned.outcome, clean.outcome)
            if problems:
                return Result("failed", "neighbors", "\n".join(problems))
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:
        return Result("failed", "error", f"{type(error).__name__}: {error}")
    return Result("right", bound=verdict.bound)


def check_simulated_sources(case: SourcesCase, target: str) -> Result:
    """What a call over several sources shows, whose unseen rows are NaN and then zeros."""
    schedule = SCHEDULES[case.seed % len(SCHEDULES)]
    outcomes = []
    try:
        for poisoned in (True, False):
            op = operands(case, poisoned)
            results = results_of_sources(op)
            plan = plan_on(target, op, results)
            outcome, reports = simulated(plan, op, results, seed=case.seed, schedule=schedule)
            if found := [str(report) for report in reports if not report.ok]:
                return Result("failed", "simulator", "\n".join(found))
            outcomes.append(outcome)
        verdict = judged(operands(case), outcomes[0])
        if verdict.status == "right" and (problems := differences(*outcomes)):
            return Result("failed", "poison", "\n".join(problems))
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:
        return Result("failed", "error", f"{type(error).__name__}: {error}")
    return verdict
