"""Every seeded defect of the dense Blackwell kernel is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kernels.blackwell.dense_defects import DEFECTS, DenseDefect, load_defect
from kernels.blackwell.simulated import plan_of
from openmla.operands import DenseOperands
from openmla.sim import Kind, Limits, intercept
from openmla.testing.build import Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import judge
from openmla.testing.memory import Memory
from openmla.testing.simulate import new_results

TWO = Case("dense", 1, 128, 64, 128, q_lens=(140,), k_lens=(200,))
CASES = {
    "two blocks": TWO,
    "ring turns": replace(TWO, k_lens=(520,)),
    "falling": replace(TWO, k_lens=(380,), values="rising", scale=-0.07),
    "scales": replace(TWO, dtype="e4m3", q_scale=True, k_scale=True, k_lens=(700,)),
    "fp8 rope": replace(TWO, rope="cache", kv="fp8_block32", page_size=64),
}
RUNS = [("late", 0), ("early", 0), ("random", 1), ("random", 2), ("random", 3)]


def test_there_are_enough() -> None:
    assert len({d.name for d in DEFECTS}) == len(DEFECTS) >= 8


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: DenseDefect, tmp_path: Path) -> None:
    mutant = load_defect(defect, tmp_path)
    kinds: set[Kind] = set()
    wrong = False
    for schedule, seed in RUNS:
        found, ok = _run(mutant, CASES[defect.case], defect.num_qo, schedule, seed)
        kinds |= found
        wrong |= not ok
        if defect.kind in kinds or (wrong and defect.kind is None):
            return
    pytest.fail(f"not found; wrong numbers: {wrong}, findings: {kinds}")


def _run(
    mutant: ModuleType, case: Case, num_qo: int, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    built = build(case, memory=Memory("cpu", "nan"))
    results = new_results(built)
    assert isinstance(built.operands, DenseOperands)
    outcome = Outcome(results.out, results.lse)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in mutant.calls(plan_of(built, num_qo), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(build(case), outcome).ok


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    import openmla.kernels.blackwell.launch as kernel

    assert _run(kernel, CASES[name], 2, "random", 1) == (set(), True)
