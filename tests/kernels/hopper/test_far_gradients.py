"""Gradients of rows past element 2^31: an offset of 32 bits is found.

The kernels' own tests have the cases; here they show what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import kernels.hopper.sparse_backward.simulated as sparse
import openmla.kernels.hopper as package
from kernels.gradients import FAR as DENSE
from kernels.hopper.backward.simulated import HOPPER
from kernels.hopper.sparse_backward.test_kernel import FAR as SPARSE
from kernels.mutants import load_mutant
from kernels.patch import once


@dataclass(frozen=True)
class Narrow:
    """An offset of 32 bits: `old` becomes `new` in `file`."""

    name: str
    file: str
    old: str
    new: str
    axis: int = 0
    after: str = ""


STEP = "wide(rows.stride_t) * VECTOR", "rows.stride_t * VECTOR"
TOKEN = "token = (gl.program_id(0) // head_blocks).to(gl.int64)"
ROW = "gl.where(ok, index, 0).to(gl.int64) * step"
LISTS = "item.token.to(gl.int64) * lists.stride"
DEFECTS = [
    Narrow("gradients, by token", "backward.store", *STEP),
    Narrow(
        "gradients, by head",
        "backward.store",
        "item.head * (wide(rows.stride_h) * VECTOR)",
        "item.head * (rows.stride_h * VECTOR)",
        axis=1,
    ),
    Narrow(
        "lse of a tile",
        "gradients.statistics",
        "row * wide(saved.lse.stride_t)",
        "row * saved.lse.stride_t",
    ),
    Narrow(
        "gradient of lse",
        "gradients.statistics",
        "row * wide(saved.d_lse.stride_t)",
        "row * saved.d_lse.stride_t",
    ),
    Narrow(
        "rows that lists name",
        "sparse_backward.gather",
        ROW,
        "gl.where(ok, index, 0) * step.to(gl.int32)",
    ),
    Narrow("lists", "sparse_backward.gather", LISTS, "item.token * lists.stride"),
    Narrow("saved rows", "sparse_backward.statistics", TOKEN, TOKEN.replace(".to(gl.int64)", "")),
    Narrow(
        "saved rows, by head",
        "sparse_backward.statistics",
        "head.to(gl.int64) * out_stride_h",
        "head * out_stride_h",
        axis=1,
    ),
    Narrow(
        "gradients of queries",
        "sparse_backward.kernel",
        "item.token * (wide(rows.stride_t) * VECTOR)",
        "item.token * (rows.stride_t * VECTOR)",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_an_offset_of_32_bits_is_found(defect: Narrow, tmp_path: Path) -> None:
    is_sparse = defect.file.startswith("sparse_backward")
    launch = "sparse_backward.launch" if is_sparse else "backward.launch"
    edit = once(defect.old, defect.new, defect.after)
    changed: ModuleType = load_mutant(package, defect.file, edit, launch, tmp_path)
    if is_sparse:
        assert not sparse.is_right_and_clean_far_away(SPARSE, defect.axis, changed)
    else:
        assert not HOPPER.is_right_and_clean_far_away(DENSE, defect.axis, changed)


def test_the_kernels_themselves_are_clean_and_right() -> None:
    assert HOPPER.is_right_and_clean_far_away(DENSE, 0)
    assert sparse.is_right_and_clean_far_away(SPARSE, 0)
