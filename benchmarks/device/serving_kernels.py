"""Kernels that a server needs, compiled side by side into Triton's disk cache before it starts.

    PYTHONPATH=src python benchmarks/device/serving_kernels.py [--seconds 60]

What `openmla warmup --model deepseek-v3 --requests 256` compiles, a process for each kernel, and no
longer than the seconds there are. No process touches the GPU.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from time import perf_counter

from openmla.aot.warmup import Asked, batches_of, compile_group, problems_of, usable_cores
from openmla.planning.target import Target, target_by_name

MODEL, REQUESTS = "deepseek-v3", 256


def distinct(target: Target) -> list[Asked]:
    """What batches of the model ask for; its own load is as long as one request's problems."""
    return [*batches_of(MODEL, target, REQUESTS), *problems_of(MODEL)]


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
