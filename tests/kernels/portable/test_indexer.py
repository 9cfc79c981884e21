"""The portable indexer in Triton's interpreter, on a CPU, and compiled for every kind of GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from indexer import cases
from kernels.portable.test_compile import CHIPS, call_key, label_of
from openmla.aot import store as aot_store
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.planning import TARGETS
from openmla.planning.indexer import index_plan

triton = pytest.importorskip("triton")
TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("interpreted_indexer.py")


@pytest.mark.slow
@pytest.mark.parametrize(("part", "done"), [("scores", 33), ("select", 55), ("paging", 8)])
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


def steps(name: str) -> tuple:
    """Small CPU tensors that compile a step's kernel."""
    case = cases.paged([4], [128], heads=64, page_size=64)
    row = torch.zeros(4, dtype=torch.int32)
    windows = Windows(row, row, row, row[:1])
    table, scores = case.options["block_table"], torch.zeros(4, 128)
    if name == "indexer scores":
        return ScoresOperands(case.q, case.weights, case.keys, windows, table), scores
    results = SelectResults(torch.zeros(4, 64, dtype=torch.int32), row, torch.zeros(4, 4).int())
    return SelectOperands(scores, 64, windows, table, 64), results


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["indexer scores", "indexer select"])
def test_compiles_and_fits(name: str, chip: str) -> None:
    from kernels.portable.ahead import compiling_for
    from openmla.kernels.portable.indexer.launch import calls

    operands, results = steps(name)
    chosen = index_plan(operands.problem(results), chip, "portable")
    (call,) = calls(chosen, operands, results)
    with compiling_for(TARGETS[chip].arch):
        label, key = label_of(name, chip, 0), call_key(call, chip)
        kept = aot_store.stored(label, triton.__version__, key)
        if kept is None:
            kept = {"shared": call.compile().metadata.shared}
            aot_store.keep(label, triton.__version__, key, kept)
    assert 0 < kept["shared"] <= TARGETS[chip].smem_per_block
