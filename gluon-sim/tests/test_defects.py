"""Every seeded defect is found in a handful of runs; correct kernels are clean over 50 seeds."""

import pytest

from gluon_sim import Limits
from launches import CASES
from seeded import DEFECTS
from seeded.defect import load_mutant

RUNS = [("random", 1), ("late", 0), ("early", 0), ("random", 2), ("random", 3)]


def test_there_are_enough():
    assert len(DEFECTS) >= 40
    assert len({(d.case, d.name) for d in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.case}: {d.name}")
def test_defect_is_found(defect, tmp_path):
    mutant = load_mutant(defect, CASES[defect.case]().module, tmp_path)
    kinds, wrong = set(), False
    for schedule, seed in RUNS:
        launch = CASES[defect.case]()
        launch.module = mutant
        report = launch.run(seed=seed, schedule=schedule, limits=Limits(steps=50_000))
        kinds |= report.kinds()
        for finding in report.findings:
            assert finding.file or finding.buffer
        wrong |= report.ok and _is_wrong(launch)
        if wrong or defect.kind in kinds:
            break
    if defect.kind is None:
        assert wrong, kinds
    else:
        assert defect.kind in kinds, kinds


def _is_wrong(launch):
    try:
        launch.check()
    except AssertionError:
        return True
    return False


def test_one_seed_gives_the_same_findings(tmp_path):
    defect = next(d for d in DEFECTS if d.case == "hopper_dense")
    mutant = load_mutant(defect, CASES[defect.case]().module, tmp_path)
    reports = []
    for _ in range(3):
        launch = CASES[defect.case]()
        launch.module = mutant
        reports.append(launch.run(seed=11))
    assert reports[0].findings
    assert len({(r.findings, r.steps, r.reason) for r in reports}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_correct_kernel_is_clean_over_50_seeds(name):
    for seed in range(50):
        launch = CASES[name]()
        launch.run(seed=seed).raise_if_bad()
    launch.check()
