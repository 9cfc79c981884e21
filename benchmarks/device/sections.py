"""A device script in sections, shared by the scripts beside this file.

Every group of a section runs in a process of its own with a time limit, so that a hang costs
seconds. A process prints one line "RESULT {json}" per result; the script writes one JSON file with
provenance after every section, so that what came before a failure is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

import openmla

Results = Iterator[dict[str, Any]]
Found = dict[str, dict[str, Any]]
SANITIZERS = ("memcheck", "consan")


@dataclass(frozen=True)
class Script:
    """What a script checks and times."""

    path: str
    """The script's own file."""
    seconds: dict[str, int]
    """Time limit of each section, in the order they run. consan only runs when it is asked for: an
    instrumented kernel is some 20 MB of PTX, which ptxas does not finish in ten minutes."""
    groups: Callable[[str], list[str]]
    """Names of a section's groups; [""] for a section in one process."""
    sources: dict[str, Callable[[str, int], Results]]
    """Per section, the results of a group: (name, rounds) -> results."""
    sanitize: Callable[[int], None]
    """Runs so many small cases under a sanitizer."""
    sanitized: int
    """How many of them run under memcheck."""
    report: Callable[[str, Found], None]
    """Prints what a section found."""

    @property
    def name(self) -> str:
        """The script's name, which its JSON file has too."""
        return Path(self.path).stem


def run(script: Script) -> None:
    """The command line of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--section", action="append", choices=sorted(script.seconds))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        _child(script, options.child, options.rounds)
        return
    record = provenance(script.name)
    for section in options.section or [s for s in script.seconds if s != "consan"]:
        started = time.time()
        print(f"== {section}", flush=True)
        if section in SANITIZERS:
            record[section] = _under_sanitizer(script, section)
            print("ok" if record[section]["ok"] else f"BAD\n{record[section]['tail']}")
        else:
            record[section] = _run_groups(script, section, options.rounds)
            script.report(section, record[section])
        print(f"   {time.time() - started:.0f} s", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{script.name}.json"
            path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def provenance(name: str) -> dict[str, Any]:
    """Where and when."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "gpu": smi, "torch": torch.__version__,
        "triton": triton.__version__, "python": sys.version.split()[0],
        "openmla": openmla.__version__,
        "command": f"python benchmarks/device/{name}.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def _child(script: Script, argument: str, rounds: int) -> None:
    torch.set_num_threads(2)  # the children share the processor
    kind, _, name = argument.partition(":")
    if kind == "sanitize":
        # ConSan keeps its state in memory that Triton asks the program for.
        def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int8, device="cuda")

        triton.set_allocator(allocate)
        script.sanitize(int(name))
        torch.cuda.synchronize()
        print("sanitize cases done")
        return
    for result in script.sources[kind](name, rounds):
        print("RESULT " + json.dumps(result), flush=True)


def _run_groups(script: Script, section: str, rounds: int) -> Found:
    """Run the groups of a section side by side; what each printed, and how it ended."""
    names = [f"{section}:{name}" if name else section for name in script.groups(section)]
    base = [sys.executable, os.path.abspath(script.path), "--rounds", str(rounds), "--child"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [(name, subprocess.Popen([*base, name], text=True, **pipes)) for name in names]
    limit = script.seconds[section]
    end = time.time() + limit
    found = {}
    for name, process in started:
        ended = "finished"
        try:
            text, _ = process.communicate(timeout=max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            text, ended = process.communicate()[0], f"no end within {limit} s"
        if ended == "finished" and process.returncode:
            ended = f"status {process.returncode}"
        lines = [json.loads(x[7:]) for x in text.splitlines() if x.startswith("RESULT ")]
        tail = "" if ended == "finished" else text[-2500:]
        found[name] = {"ended": ended, "results": lines, "tail": tail}
    return found


def _under_sanitizer(script: Script, section: str) -> dict[str, Any]:
    me = [sys.executable, os.path.abspath(script.path), "--child"]
    if section == "memcheck":
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        command = [tool, "--tool", "memcheck", *me, f"sanitize:{script.sanitized}"]
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    else:
        command, env = [*me, "sanitize:1"], {**os.environ, "TRITON_INSTRUMENTATION_MODE": "consan"}
    limit = script.seconds[section]
    try:
        made = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        return {"tool": section, "ok": False, "tail": f"{type(error).__name__}: {error}"}
    text = made.stdout + made.stderr
    clean = made.returncode == 0 and "sanitize cases done" in text
    if section == "memcheck":
        clean = clean and "ERROR SUMMARY: 0 errors" in text
    return {"tool": section, "ok": clean, "returncode": made.returncode, "tail": text[-1500:]}
