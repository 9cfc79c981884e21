"""The portable indexer in Triton's interpreter, on a CPU, and compiled for every kind of GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("interpreted_indexer.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "done"),
    [
        ("scores", 33),
        ("select", 55),
        pytest.param("defects", 6, marks=pytest.mark.seeded),
        ("paging", 32),
        ("wild", 11),
        pytest.param("far", 2, marks=pytest.mark.long),  # a minute: rows beyond 2^31 elements
    ],
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
