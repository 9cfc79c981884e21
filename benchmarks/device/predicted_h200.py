"""Cycles that the Hopper kernels take on an H200, for openmla.lab.prediction to be tested with.

    PYTHONPATH=src python benchmarks/device/predicted_h200.py --out DIR --section cycles

Nsight Compute counts them: cycles, unlike milliseconds, do not depend on the power limit.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from sections import Section, run

from openmla.lab.bench import dense, sparse
from openmla.lab.bench.predicted import DENSE, SHAPES, SPARSE

METRIC = "sm__cycles_elapsed.max"


def cycles(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One process under Nsight Compute for all shapes."""
    command = [
        "ncu",
        "--csv",
        "--metrics",
        METRIC,
        "--clock-control",
        "none",
        "--kernel-name",
        "regex:dense_kernel|latent_kernel",
        "--target-processes",
        "all",
        sys.executable,
        __file__,
        "--child",
        "shapes:",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    found = [row for row in csv.DictReader(lines) if row["Metric Name"] == METRIC]
    if len(found) != len(SHAPES):
        raise RuntimeError(f"{len(found)} kernels: {done.stdout[-500:]} {done.stderr[-500:]}")
    for shape, row in zip(SHAPES, found, strict=True):
        yield {"shape": str(shape), "cycles": float(row["Metric Value"].replace(",", ""))}


def shapes(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Every shape once, in order: what `cycles` watches."""
    for shape in DENSE:
        dense.Inputs(shape).openmla()
    for lists in SPARSE:
        sparse.Inputs(lists).openmla()
    torch.cuda.synchronize()
    yield {"ran": len(SHAPES)}


if __name__ == "__main__":
    run(__file__, {"cycles": Section(cycles, 120), "shapes": Section(shapes, 60)}, json.dumps)
