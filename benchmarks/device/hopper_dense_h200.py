"""Time the dense Hopper kernel on an H200: against cuDNN, and the host's share of a call.

    PYTHONPATH=src python benchmarks/device/hopper_dense_h200.py --out DIR [--section speed|host]

speed has two groups, --only chunks and --only short.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sections import Section, host_microseconds, run

from openmla.lab.bench.dense import CHUNKS, SHORT, Inputs, Shape, matmul_tflops, run_dense


def speed(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    yield {"matmul_tflops": matmul_tflops(rounds)}
    for row in run_dense(rounds, {"chunks": CHUNKS, "short": SHORT}[group]):
        yield row.to_json()
    yield {"matmul_tflops": matmul_tflops(rounds)}


def host(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Time on the host of the public call: repeated, split, with token counts never seen before."""
    plain = Shape(16, 256, 256)
    calls = {
        "plain": [Inputs(plain)],
        "split": [Inputs(Shape(4, 64, 16384))],
        "new counts": [Inputs(replace(plain, q_len=n, k_len=n)) for n in range(128, 428)],
    }
    for name, inputs in calls.items():
        yield {
            "host": name,
            "microseconds": host_microseconds(lambda n, x=inputs: x[n % len(x)].openmla()),
        }


def line(r: dict[str, Any]) -> str:
    if "timings" not in r:
        return json.dumps(r)
    peer = f"{r['tflops']['cudnn']:5.0f}" if "cudnn" in r["tflops"] else "    -"
    bars = f"bars {r['bar_kernel']:.2f}/{r['bar_layer']:.2f}" if r["bar_kernel"] else ""
    return (
        f"{r['shape']:38s} {r['timings']['openmla']['median']:8.3f} ms "
        f"{r['tflops']['openmla']:5.0f} cudnn {peer} kernel {r['kernel']:.3f} "
        f"(row {r['kernel_back_to_back']:.3f}) layer {r['layer']:.3f} "
        f"(row {r['layer_back_to_back']:.3f}) {bars}"
    )


if __name__ == "__main__":
    run(
        __file__,
        {"speed": Section(speed, 90, ("short", "chunks")), "host": Section(host, 60)},
        line,
    )
