"""The golden compile reports of tests/compiled are those of today's kernels, all and no more.

Each file is of one family and one Triton, sorted by job: key, registers, spills, shared memory, and
the barriers that warps of one partition meet at, which the compiler adds by its own rules and the
simulator takes for granted. A changed kernel is compiled by the tests that use its report, which
replaces the entry; `openmla compile --update tests/compiled` does so for all and drops what no job
has. Here the files are read as they were before any test ran, so what is not committed fails.
"""

from __future__ import annotations

import pytest
import triton

from cases import CASES
from openmla.aot import store as aot_store
from openmla.aot import table as aot_table
from openmla.aot.jobs import job_key
from test_language import COMPILED_TOO

HERE = aot_store.folder()
MOST_FILES = 12
FAMILIES = ("hopper", "blackwell", "cdna4", "sim")
KEPT = {name: aot_store.read(aot_store.file_of(name, triton.__version__)) for name in FAMILIES}


@pytest.mark.compile
@pytest.mark.parametrize("family", ["hopper", "blackwell", "cdna4"])
def test_every_job_has_its_report_and_every_report_its_job(family: str) -> None:
    jobs = {j.label: job_key(j) for j in aot_table.discover() if j.name.split()[0] == family}
    assert {label: entry["key"] for label, entry in KEPT[family].items()} == jobs


@pytest.mark.compile
def test_no_report_is_of_a_toy_that_is_gone() -> None:
    assert {label.split()[1] for label in KEPT["sim"]} <= {*CASES, *COMPILED_TOO}


def test_files_are_few_and_sorted() -> None:
    files = sorted(HERE.glob("*.json"))
    assert 0 < len(files) <= MOST_FILES
    for path in files:
        labels = list(aot_store.read(path))
        assert labels == sorted(labels), path.name
