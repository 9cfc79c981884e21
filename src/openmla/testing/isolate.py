"""Run guarded cases in a child process, so that a crash or a hang is a finding, not the end.

The parent sends cases and reads one line per case. When the child dies or falls silent, the case it
had begun is to blame, and a fresh child goes on with the next.

An implementation is named "module:function" and takes a BuiltCase; the default is the public call.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from openmla.testing.build import build
from openmla.testing.case import Case
from openmla.testing.guard import EDGES, GuardedMemory
from openmla.testing.poison import Implementation, differences, run_watched

PUBLIC_CALL = "openmla.testing.poison:run_public"
SECONDS_PER_CASE = 60.0


def run_guarded(
    cases: Sequence[Case], implementation: str = PUBLIC_CALL
) -> Iterator[tuple[Case, str]]:
    """Every case with what went wrong, empty if nothing, in order."""
    position = 0
    while position < len(cases):
        for problem in _one_child(cases[position:], implementation):
            yield cases[position], problem
            position += 1


def _one_child(cases: Sequence[Case], implementation: str) -> Iterator[str]:
    """Verdicts until the child ends; the last one tells of its death, if it died."""
    command = [sys.executable, "-m", "openmla.testing.isolate"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    request = {"implementation": implementation, "cases": [case.to_json() for case in cases]}
    done = 0
    hung = threading.Event()

    def give_up() -> None:
        hung.set()
        child.kill()

    try:
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        for _ in cases:
            timer = threading.Timer(SECONDS_PER_CASE, give_up)
            timer.start()
            line = child.stdout.readline()
            timer.cancel()
            if not line:
                break
            done += 1
            yield json.loads(line)["problem"]
        if done < len(cases):
            yield _death(child, hung.is_set())
    finally:
        child.kill()
        child.wait()


def _death(child: subprocess.Popen[str], hung: bool) -> str:
    if hung:
        return f"no answer within {SECONDS_PER_CASE:.0f} s"
    assert child.stderr is not None
    last_words = child.stderr.read().strip().splitlines()[-1:]
    code = child.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}: memory outside a tensor was touched"
    return f"ended with status {code}: {' '.join(last_words)}"


def guard_problems(case: Case, run: Implementation) -> list[str]:
    """Compare guarded runs with a plain one; a fault ends this process."""
    clean = run(build(case))
    problems = []
    for edge in EDGES:
        outcome, written = run_watched(build(case, memory=GuardedMemory(edge)), run)
        problems += [f"guard at the {edge}: {p}" for p in written + differences(outcome, clean)]
    return problems


def _child(request: dict[str, Any]) -> None:
    """Answer each case with one line of JSON."""
    torch.set_num_threads(1)  # the cases are tiny
    module, _, name = request["implementation"].partition(":")
    run: Implementation = getattr(importlib.import_module(module), name)
    for fields in request["cases"]:
        try:
            problem = "; ".join(guard_problems(Case.from_json(fields), run))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"problem": problem}), flush=True)


if __name__ == "__main__":
    _child(json.load(sys.stdin))
