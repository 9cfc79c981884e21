"""The files that a first dense call on an H200 passes: few, and all on the page that follows it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

import openmla
from kernels.cached_calls import dense
from kernels.noted import note_launches

PACKAGE = Path(openmla.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "a-call-step-by-step.md"
# The figure should fall; the aim is 18. It was 23 before DTensors and batched tensors were refused
# by name, with what refuses them in caches.
MOST_FILES = 24


def files_of_first_call(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    note_launches(monkeypatch)
    import_module("openmla.kernels.hopper.dense.launch")  # functions count, not imports
    openmla.planning.cached_plan.cache_clear()
    call, found = dense(q_len=4096, k_len=4096, equal=True), set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_a_first_call_passes_few_files_and_the_page_has_them(monkeypatch) -> None:
    found = files_of_first_call(monkeypatch)
    page = PAGE.read_text()
    assert {"api/attention.py", "planning/registry.py", "kernels/hopper/dense/launch.py"} <= found
    assert len(found) <= MOST_FILES, sorted(found)
    assert [name for name in sorted(found) if f"src/openmla/{name})" not in page] == []
