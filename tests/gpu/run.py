"""Run the tests that need a GPU: every file in a process of its own.

    python tests/gpu/run.py [--jobs 6] [--shards 1] [--seconds 900] [FILE ...]

An illegal memory access ends every later CUDA call of its process, and a hang ends nothing at all:
so a file that dies, or takes longer than it may, is counted as failed, and the others run on. Files
run side by side (`--jobs`): most of their time is spent compiling kernels on the CPU. With
`--shards 4` a file is four processes, each with every fourth of its tests. A file whose
tests were all skipped counts as failed too: here, unlike in `make test`, a GPU is the point.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TAIL = 6000  # characters of a failed file's output that are shown
SHARD = "OPENMLA_TEST_SHARD"
NOTHING_COLLECTED = 5  # pytest's status


@dataclass(frozen=True)
class Ran:
    """How one file ended; no problem means that all its tests passed."""

    name: str
    summary: str
    problem: str
    output: str
    seconds: float

    def __str__(self) -> str:
        verdict = f"FAILED, {self.problem}" if self.problem else "passed"
        return f"{self.name}: {verdict}: {self.summary} ({self.seconds:.0f} s)"


def run_file(path: Path, shard: int, shards: int, seconds: float) -> Ran:
    """pytest on one file, or on one shard of it (see conftest.py), for at most so long."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "--color=no",
        str(path),
    ]
    started = time.monotonic()
    environment = {**os.environ, SHARD: f"{shard}/{shards}"}
    status, output = run_limited(command, seconds, environment)
    summary = summary_of(output)
    name = path.name if shards == 1 else f"{path.name} {shard + 1}/{shards}"
    problem = problem_of(status, summary, may_be_empty=shard > 0)
    return Ran(name, summary, problem, output, time.monotonic() - started)


def run_limited(
    command: list[str], seconds: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Status and output of a process; the status is None if it had to be ended at its limit."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as child:
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            return None, child.communicate()[0]
    return child.returncode, output


def summary_of(output: str) -> str:
    """pytest's last line of counts, without its frame.

    >>> summary_of("...\\n2 failed, 3 passed in 1.20s\\n")
    '2 failed, 3 passed in 1.20s'
    """
    counts = re.findall(r"^=* ?(\d+ \w+.* in [\d.]+s.*?)=*$", output, re.MULTILINE)
    return counts[-1].strip() if counts else "no summary"


def problem_of(status: int | None, summary: str, may_be_empty: bool = False) -> str:
    """What a file's end means; empty when tests ran and all passed. A shard after the first may be
    empty: the file has fewer tests than shards.

    >>> problem_of(0, "3 passed in 1.20s"), problem_of(-11, "no summary")
    ('', 'died of signal 11')
    >>> problem_of(5, "no summary"), problem_of(5, "no summary", may_be_empty=True)
    ('status 5', '')
    """
    if status is None:
        return "no end within its limit"
    if status == NOTHING_COLLECTED and may_be_empty:
        return ""
    if status:
        return f"status {status}" if status > 0 else f"died of signal {-status}"
    return "" if re.search(r"\d+ passed", summary) else "nothing ran"


def main(arguments: list[str] | None = None) -> int:
    """The command line; the number of files that failed."""
    parser = argparse.ArgumentParser(description="Run every file of GPU tests in its own process.")
    parser.add_argument("files", nargs="*", type=Path, help="default: all beside this script")
    parser.add_argument("--jobs", type=int, default=1, help="files side by side")
    parser.add_argument("--shards", type=int, default=1, help="processes of one file")
    parser.add_argument("--seconds", type=float, default=900, help="limit of one process")
    options = parser.parse_args(arguments)
    files = options.files or sorted(HERE.glob("test_*.py"))
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [(file, shard) for file in files for shard in range(options.shards)]
        run = partial(run_file, shards=options.shards, seconds=options.seconds)
        for ran in pool.map(lambda part: run(*part), parts):
            print(ran, flush=True)
            if ran.problem:
                failed += 1
                print(ran.output[-TAIL:], flush=True)
    print(f"{len(parts) - failed} of {len(parts)} processes passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
