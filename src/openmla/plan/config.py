"""`Plan`: what will run. Data only: it prints itself, compares equal, and kernels obey it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.problem import Problem


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernel that serves a problem on a target, and its numbers."""

    problem: Problem
    target: str
    backend: str
    """Kernel family: reference, cpu, portable, hopper, blackwell, cdna4."""
    config: Any
    """The family's own frozen config (CpuConfig, MLAConfig, …); None for the reference."""
