"""Kernels that a server needs, compiled side by side into Triton's disk cache before it starts.

    PYTHONPATH=src python benchmarks/device/serving_kernels.py [--seconds 60]

`openmla warmup` compiles a model's kernels for calls with one request. A batch of many has others:
this takes every kernel that a batch of 1 to 256 requests can need, found by the plans of a grid of
sizes, one process for each kernel. No process touches the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from time import perf_counter
from typing import Any

from openmla.aot.operands import operands_of
from openmla.aot.warmup import compile_group, shortened, usable_cores
from openmla.dispatch import plan_for
from openmla.kernels.launch import calls
from openmla.planning.target import Target, target_by_name
from openmla.problem import Problem

HEADS, PAGE = 128, 64
REQUESTS = (1, 4, 32, 64, 256)
TOKENS = (1, 4, 32, 64, 128, 256, 1024, 4096)
KEYS = (64, 128, 1024, 8192, 16384)
ROWS = 140_000  # of the cache


def posed_by(requests: int, tokens: int, keys: int) -> Iterator[Problem]:
    """What a batch asks for: a part that expands its keys, and one that reads pages."""
    shared: dict[str, Any] = {"heads": HEADS, "batch": requests, "total_q": tokens}
    yield Problem(
        form="dense",
        **shared,
        **{"d_nope": 128, "d_rope": 64, "d_v": 128},
        total_k=max(keys, tokens),
    )
    yield Problem(
        form="latent",
        **shared,
        **{"d_nope": 512, "d_rope": 64, "d_v": 512},
        page_size=PAGE,
        total_k=ROWS,
        table_keys=max(keys, 16 * PAGE),
    )


def posed() -> Iterator[Problem]:
    """What batches of all sizes ask for."""
    for requests, tokens, keys in product(REQUESTS, TOKENS, KEYS):
        if tokens >= requests:
            yield from posed_by(requests, tokens, keys)


def kernels(problem: Problem, target: Target) -> str:
    """What is compiled for a problem: names, constants, and which arguments there are."""
    made = []
    for call in calls(plan_for(problem, target), *operands_of(shortened(problem))):
        given = {
            name: str(x) if name.isupper() or name.startswith(("num_", "launch_")) else x is None
            for name, x in call.arguments.items()
        }
        made.append(f"{call.kernel.__name__} {sorted(given.items())}")
    return "\n".join(made)


def distinct(target: Target) -> list[Problem]:
    """One problem for each set of kernels."""
    found: dict[str, Problem] = {}
    for problem in posed():
        found.setdefault(kernels(problem, target), problem)
    return list(found.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="h200")
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args()
    start, target = perf_counter(), target_by_name(options.target)
    problems = distinct(target)
    processes = min(len(problems), usable_cores())
    # A forked child would share the compiler's threads.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = [pool.submit(compile_group, [p], target) for p in problems]
        busy = 0.0
        try:
            busy = sum(done.result() for done in as_completed(waiting, options.seconds))
        except TimeoutError:  # the engine compiles the rest while it warms up
            for process in (pool._processes or {}).values():
                process.terminate()
    took = perf_counter() - start
    done = sum(w.done() and not w.cancelled() and not w.exception() for w in waiting)
    print(f"{done} of {len(problems)} kernels, {took:.0f} s, {processes} processes, {busy:.0f} s")


if __name__ == "__main__":
    main()
