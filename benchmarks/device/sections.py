"""A speed script in sections, shared by the scripts beside this file.

    PYTHONPATH=src python benchmarks/device/SCRIPT.py [--out DIR] [--section NAME ...] [--only RE]

Every group of a section runs in a process of its own with a time limit, so that a hang costs
seconds. A process prints one line "RESULT {json}" per result; the script writes one JSON file with
provenance after every section, so that what came before a failure is kept. What is right and what
is not, tests/gpu says; a script times what those tests have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openmla.lab.bench.provenance import commit_of_source, provenance

Results = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """One part of a script: groups of results, each from a process of its own."""

    results: Callable[[str, int], Results]
    """(group, rounds) -> what was measured."""
    seconds: int
    """Time limit of a group."""
    groups: tuple[str, ...] = ("",)
    side_by_side: bool = False
    """Whether all groups run at once: for compiling, never for timing."""


def run(path: str, sections: dict[str, Section], line: Callable[[dict[str, Any]], str]) -> None:
    """The command line of the script in file `path`; `line` is how a result is printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--section", action="append", choices=sorted(sections))
    parser.add_argument("--only", default="", help="only groups whose name matches")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--commit", default=commit_of_source(), help="where git cannot tell")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        torch.set_num_threads(2)  # the children share the processor
        name, _, group = options.child.partition(":")
        for result in sections[name].results(group, options.rounds):
            print("RESULT " + json.dumps(result), flush=True)
        return
    if not options.commit:
        parser.error("this is no git checkout: name the commit that is measured with --commit")
    script = Path(path).stem
    told = " ".join(sys.argv[1:]).replace(str(options.out), "DIR")  # where to is nobody's business
    command = f"python benchmarks/device/{script}.py {told}"
    record = provenance(command.strip(), gpu=True, commit=options.commit)
    for name in options.section or sections:
        started = time.time()
        print(f"== {name}", flush=True)
        record[name] = _run_section(path, name, sections[name], options)
        for group, found in record[name].items():
            print(*map(line, found["results"]), sep="\n")
            if found["ended"] != "finished":
                print(f"{group}: {found['ended']}\n{found['tail']}")
        print(f"   {time.time() - started:.0f} s", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / f"{script}.json"
            file.write_text(json.dumps(record, indent=1) + "\n")


def _run_section(
    path: str, name: str, section: Section, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """What the processes of a section printed, and how they ended."""
    groups = [g for g in section.groups if re.search(options.only, g)]
    base = [sys.executable, os.path.abspath(path), "--rounds", str(options.rounds), "--child"]

    def start(group: str) -> subprocess.Popen[str]:
        command = [*base, f"{name}:{group}"]
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    started = {g: start(g) for g in groups} if section.side_by_side else {}
    found = {}
    for group in groups:
        process = started.get(group) or start(group)
        found[f"{name}:{group}" if group else name] = _ended(process, section.seconds)
    return found


def _ended(process: subprocess.Popen[str], seconds: int) -> dict[str, Any]:
    ended = "finished"
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, ended = process.communicate()[0], f"no end within {seconds} s"
    if ended == "finished" and process.returncode:
        ended = f"status {process.returncode}"
    lines = [json.loads(x[7:]) for x in text.splitlines() if x.startswith("RESULT ")]
    return {"ended": ended, "results": lines, "tail": "" if ended == "finished" else text[-2500:]}


def host_microseconds(call: Callable[[int], object], calls: int = 300) -> float:
    """Median time before a call returns, without waiting for the GPU; `call` gets its number."""
    for number in (0, calls - 1) * 10:
        call(number)
    torch.cuda.synchronize()
    samples = []
    for number in range(calls):
        start = time.perf_counter()
        call(number)
        samples.append((time.perf_counter() - start) * 1e6)
        if number % 50 == 0:
            torch.cuda.synchronize()
    return sorted(samples)[calls // 2]
