"""Every seeded defect of the dense Hopper kernel is found in a few runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.hopper as package
from kernels.hopper.dense.defects import DEFECTS, SETUPS, DenseDefect
from kernels.hopper.dense.setups import run
from kernels.mutants import assert_found, load_mutant
from openmla.kernels.hopper.dense import launch


def test_there_are_enough() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 20


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: DenseDefect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "dense.launch", tmp_path)
    assert_found(defect.kind, partial(run, mutant, SETUPS[defect.case], defect.num_qo))


ONE_QUERY_TILE = ("two launches", "split", "groups", "strided, split")


@pytest.mark.parametrize(
    ("name", "num_qo"), [*((name, 2) for name in SETUPS), *((name, 1) for name in ONE_QUERY_TILE)]
)
def test_the_kernel_itself_is_clean_and_right(name: str, num_qo: int) -> None:
    assert run(launch, SETUPS[name], num_qo, "random", 1) == (set(), True)
