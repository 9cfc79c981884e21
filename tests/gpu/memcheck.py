"""Drawn cases under compute-sanitizer: no kernel may touch memory that is not its own.

    python tests/gpu/memcheck.py [--cases 200] [--seed 0] [--jobs 8] [--tool memcheck]

Case i is `random_case(seed + i)`, run by the public call; one that is refused is replaced by a
later one, so that exactly `--cases` run. Of every fourth the offsets, lengths, tables and lists
then hold anything, and it runs again: nobody looks at those, and kernels must live with them. After
every other fourth, gradients are computed of a case that gradient_fuzz.py draws; where these are
refused, which some are, the case counts without them. PyTorch's caching allocator would hide an
access past the end of a tensor behind its neighbors, so it is switched off. Exits nonzero unless
the sanitizer reports 0 errors in every process.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

from run import run_limited

SANITIZER = "compute-sanitizer"
USUAL_PLACE = f"/usr/local/cuda/bin/{SANITIZER}"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
RAN = re.compile(r"^RAN (\d+)$", re.MULTILINE)
TAIL = 4000
SECONDS = 1800  # limit of one process


def run_cases(cases: int, first: int, step: int) -> None:
    """In a process under the sanitizer: so many cases, every `step`-th seed from `first` on."""
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from gradient_fuzz import KINDS as GRADIENTS
    from gradient_fuzz import drawn, run_gradients

    from kernels.wild_values import KINDS, with_wild_values
    from openmla import Unsupported
    from openmla.lab.testing.build import build
    from openmla.lab.testing.draw import random_case

    kinds = list(GRADIENTS.values())

    done = 0
    for seed in count(first, step):
        if done == cases:
            break
        case = random_case(seed)
        try:
            build(case, "cuda").run()
            if done % 4 == 3:
                with_wild_values(build(case, "cuda"), KINDS[seed % len(KINDS)], seed).run()
            if done % 4 == 1:
                kind = kinds[(done // 4 + first) % len(kinds)]
                with suppress(Unsupported):  # with another seed it would be refused again
                    run_gradients(kind, drawn(kind, seed), "nan")
        except Unsupported:
            continue
        torch.cuda.synchronize()
        done += 1
        print(f"seed {seed}: {case}", flush=True)
    print(f"RAN {done}", flush=True)


def problem_of(status: int | None, output: str, cases: int) -> str:
    """What the end of such a process means; empty when all cases ran without an error.

    >>> problem_of(0, "RAN 3\\n========= ERROR SUMMARY: 0 errors", 3)
    ''
    """
    ran, errors = RAN.search(output), SUMMARY.findall(output)
    if set(errors) != {"0"}:
        return f"the sanitizer reports {' and '.join(errors) or 'no number of'} errors"
    if status != 0 or ran is None:
        return f"ended with status {status} before all cases ran"
    return "" if int(ran[1]) == cases else f"{ran[1]} cases ran instead of {cases}"


def sanitized(tool: str, cases: int, first: int, step: int) -> str:
    """One process under the sanitizer; what is wrong with it, empty if nothing."""
    sanitizer = shutil.which(SANITIZER) or USUAL_PLACE
    child = [sys.executable, __file__, "--child", f"{cases},{first},{step}"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, output = run_limited([sanitizer, "--tool", tool, *child], SECONDS, environment)
    problem = problem_of(status, output, cases)
    return f"{problem}\n{output[-TAIL:]}" if problem else ""


def main(arguments: list[str] | None = None) -> int:
    """The command line; how many processes were not clean."""
    parser = argparse.ArgumentParser(description="Drawn cases under compute-sanitizer.")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_cases(*map(int, options.child.split(",")))
        return 0
    jobs = min(options.jobs, options.cases)
    shares = [options.cases // jobs + (i < options.cases % jobs) for i in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [
            pool.submit(sanitized, options.tool, share, options.seed + i, jobs)
            for i, share in enumerate(shares)
        ]
        problems = [done.result() for done in waiting]
    for problem in filter(None, problems):
        print(problem)
    bad = sum(map(bool, problems))
    print(f"{options.tool}: {options.cases} cases in {jobs} processes, {bad} not clean")
    return bad


if __name__ == "__main__":
    sys.exit(main())
