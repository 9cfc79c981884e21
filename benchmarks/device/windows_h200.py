"""Time windows that neighbors share on an H200: quantized rows read in the kernel, or once.

    PYTHONPATH=src:tests python benchmarks/device/windows_h200.py RESULT.json [COMMIT]

A prompt of 2048 tokens, each of which sees the 128 rows before it, and in one case 512 entries of a
list besides. "whole" dequantizes the pool once and reads bf16 rows, which is what the plan chooses
here; "in_kernel" dequantizes every row where it is read. Results have the same bits
(tests/gpu/test_attend.py). Calls are replayed from CUDA graphs: `us` finds L2 overwritten,
`in_a_row_us` is one after another.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from openmla.dispatch import plan_call
from openmla.kernels.launch import launch
from openmla.lab.bench.gpu_timing import graph_of, race
from openmla.lab.bench.provenance import provenance
from two_sources import Setup, new_results, on_device, operands, read_by

ROUNDS = 12
_WINDOW = Setup(kinds=("span",), first=(128,) * 2048, heads=64, lengths=False)
SETUPS = {
    "window": _WINDOW,
    "window, 8 heads": replace(_WINDOW, heads=8),
    "window + 512": replace(_WINDOW, kinds=("span", "list"), second=(512,) * 2048),
}


def timed(setup: Setup) -> dict[str, Any]:
    """Microseconds of both ways, and the one that the plan chooses."""
    op = on_device(operands(setup), "cuda")
    results = new_results(op)
    chosen = plan_call(op, results, "hopper")
    calls = {}
    for way in ("in_kernel", "whole"):
        plan = read_by(replace(chosen, config=replace(chosen.config, few=None)), way)
        calls[way] = graph_of(lambda plan=plan: launch(plan, op, results))
    timings = race(calls, ROUNDS)
    return {
        "plan": chosen.config.cache_read.mode,
        "us": {way: round(1e3 * timings[way].median, 1) for way in calls},
        "in_a_row_us": {way: round(1e3 * timings[way].back_to_back, 1) for way in calls},
    }


def main(result: str, commit: str = "") -> None:
    rows = []
    for name, setup in SETUPS.items():
        rows.append({"row": name, **timed(setup)})
        print(rows[-1], flush=True)
    command = "python benchmarks/device/windows_h200.py RESULT.json"
    record = {**provenance(command, gpu=True, commit=commit), "windows": rows}
    Path(result).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
