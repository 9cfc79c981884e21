"""Rows past element 2^31 on the latent CDNA4 kernel, of lists and of pages: right, and an offset
of 32 bits is found.

Strides count pieces of 16 bytes, so a cache must span 2^32 pieces (64 GiB; an MI355X has 288 GB)
before a product of 32 bits is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

import openmla.kernels.cdna4 as package
from gluon_sim import Kind, Limits, intercept
from kernels.cdna4.simulated import plan_of
from kernels.far_memory import FarMemory
from kernels.mutants import load_mutant, once
from openmla.kernels.cdna4.sparse import launch
from openmla.lab.testing.build import Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results

ROWS = Case("sparse", 2, 512, 64, 512, q_lens=(2,), k_lens=(150,), topk=70, scale=0.1)
LISTED = replace(ROWS, kv="bf16", page_size=16)
# Four pages and more, and keys in every row of a page.
PAGES = replace(LISTED, form="latent", topk=0, q_lens=(2, 1), k_lens=(66, 20))
CASES = {
    "rows": ROWS,
    "rows, pages": LISTED,
    "rows, fp8 and scales": replace(LISTED, kv="fp8_block32"),
    "pages": PAGES,
    "pages, fp8": replace(PAGES, kv="fp8_656"),
    "pages, fp8 and scales": replace(PAGES, kv="fp8_block32"),
}


def run_on(launcher: ModuleType, case: Case, axis: int) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    built = build(case, memory=FarMemory(axis, pieces=True))
    results = new_results(built)
    with intercept(seed=1, limits=Limits(steps=50_000)) as reports:
        for call in launcher.calls(plan_of(built), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(built, Outcome(results.out, results.lse, results.max_logits)).ok


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str, axis: int) -> None:
    assert run_on(launch, CASES[name], axis) == (set(), True)


@dataclass(frozen=True)
class Narrow:
    """An offset of 32 bits: `old` becomes `new` in sparse/rows.py."""

    name: str
    old: str
    new: str
    case: str
    axis: int = 0


DEFECTS = [
    Narrow("pages of a sequence", "- 1).to(gl.int64)", "- 1)", "pages"),
    Narrow(
        "rows of a sequence's page",
        "(position(at, source) % PAGE).to(gl.int64)",
        "(position(at, source) % PAGE)",
        "pages",
        1,
    ),
    Narrow("rows", "safe.to(gl.int64) *", "safe *", "rows"),
    Narrow("pages of a list's rows", "(safe // PAGE).to(gl.int64)", "safe // PAGE", "rows, pages"),
    Narrow("rows of a list's page", "(safe % PAGE).to(gl.int64)", "safe % PAGE", "rows, pages", 1),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_an_offset_of_32_bits_is_found(defect: Narrow, tmp_path: Path) -> None:
    edit = once(defect.old, defect.new)
    changed = load_mutant(package, "sparse.rows", edit, "sparse.launch", tmp_path)
    kinds, right = run_on(changed, CASES[defect.case], defect.axis)
    assert Kind.BOUNDS in kinds or not right
