"""Where a benchmark's figures come from: date, commit, command, versions and machine.

A record without these cannot be compared with a later one. The commit is that of the source that
ran; where that is no git checkout (a copy on a borrowed machine, an installed package), whoever
starts the run may know it and pass it on.
"""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from openmla import __version__

UNKNOWN = "unknown: not a git checkout"
SMI_QUERY = "name,driver_version,power.limit,clocks.max.sm"


def commit_of_source() -> str:
    """The commit of this source tree, "-dirty" if files differ from it; empty if there is none."""
    here = Path(__file__).resolve()
    # An environment may lie inside some other project's checkout: this file must be one of its own.
    if not _printed("git", "-C", str(here.parent), "ls-files", here.name):
        return ""
    return _printed(
        "git",
        "-C",
        str(here.parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    )


def provenance(command: str, *, gpu: bool, commit: str = "") -> dict[str, Any]:
    """What a result was measured with, on a GPU or on the CPU."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or commit_of_source() or UNKNOWN,
        "command": command,
        "openmla": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **(_gpu() if gpu else _cpu()),
    }


def _cpu() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _gpu() -> dict[str, Any]:
    import triton

    smi = _printed("nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv,noheader")
    return {
        "gpu": smi or torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _printed(*command: str) -> str:
    """What a program printed; empty if it failed or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
