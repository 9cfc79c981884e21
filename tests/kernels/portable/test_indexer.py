"""The portable indexer in Triton's interpreter, on a CPU, and compiled for every kind of GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.portable.test_compile import CHIPS, shared_memory
from openmla.aot.operands import index_operands_of
from openmla.indexer.problem import IndexProblem
from openmla.kernels.launch import calls
from openmla.planning import TARGETS
from openmla.planning.indexer import index_plan

pytest.importorskip("triton")
TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("interpreted_indexer.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "done"), [("scores", 33), ("select", 55), ("paging", 8), ("wild", 10)]
)
def test_interpreted(part: str, done: int) -> None:
    path = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), part],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    *problems, counts = [json.loads(line) for line in run.stdout.splitlines()]
    assert not problems
    assert counts == {"done": done, "rejected": 0}


STEPS = {
    "indexer scores": IndexProblem(form="scores", heads=64, page_size=64, total_q=4, width=128),
    "indexer select": IndexProblem(
        form="select", topk=64, page_size=64, wants_counts=True, wants_mask=True, total_q=4,
        width=128,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_compiles_and_fits(name: str, chip: str) -> None:
    chosen = index_plan(STEPS[name], chip, "portable")
    (call,) = calls(chosen, *index_operands_of(STEPS[name]))
    shared = shared_memory(f"{name} on {chip}, kernel 0", call, chip)
    assert 0 < shared <= TARGETS[chip].smem_per_block
