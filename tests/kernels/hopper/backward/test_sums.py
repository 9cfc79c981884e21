"""The ordered sum of partial gradients: any number of parts, and columns past element 2^31."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from gluon_sim import simulate, unreserved
from kernels.mutants import load_mutant
from kernels.patch import once
from openmla.kernels import hopper
from openmla.kernels.gluon.gradients import sums
from openmla.kernels.gluon.gradients.sums import SUM_BLOCK

FAR = 2**31 + 100  # columns: more than 32 bits count
APART = 2**30 + 8  # parts begin so far apart: the third of them past 2^31
LANES = 32  # of a warp
PARTS = 9  # one more than are loaded at once


def summed_at_the_end(columns: int, parts: int = PARTS, module: ModuleType = sums) -> bool:
    """Whether the sums of the last columns are right; the first and the last program run."""
    last = slice((columns - 1) // SUM_BLOCK * SUM_BLOCK, columns)
    part = torch.frombuffer(unreserved(parts * columns * 4), dtype=torch.float32)
    part = part.view(parts, columns)
    part[:, last] = torch.randn(parts, columns - last.start)
    result = torch.frombuffer(unreserved(columns * 2), dtype=torch.bfloat16)
    result[last] = torch.nan
    programs = -(-columns // SUM_BLOCK)
    arguments = (part, result, parts, columns, SUM_BLOCK, LANES)
    report = simulate(module.sum_kernel, programs, arguments, only=(0, programs - 1))
    want = torch.zeros(columns - last.start)
    for each in part[:, last]:
        want += each
    return report.ok and torch.equal(result[last], want.to(torch.bfloat16))


@pytest.mark.parametrize("columns", [FAR, APART])
def test_far_columns_are_summed(columns: int) -> None:
    assert summed_at_the_end(columns)


@pytest.mark.parametrize("parts", [1, 7, 8, 17])
def test_any_number_of_parts(parts: int) -> None:
    assert summed_at_the_end(700, parts)


@pytest.mark.parametrize(
    ("old", "new", "columns"),
    [
        ("gl.program_id(0).to(gl.int64) * BLOCK", "gl.program_id(0) * BLOCK", FAR),
        ("columns.to(gl.int64))", "columns)", APART),
        ("first + i < parts", "first + i <= parts", 700),
    ],
    ids=["a column of 32 bits", "a distance of 32 bits", "a part too many"],
)
def test_a_defect_is_found(old: str, new: str, columns: int, tmp_path: Path) -> None:
    changed = load_mutant(hopper, "gradients.sums", once(old, new), "gradients.sums", tmp_path)
    assert not summed_at_the_end(columns, module=changed)
