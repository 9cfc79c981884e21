"""Runs of a changed copy of the Hopper kernels, dense or latent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import openmla.kernels.hopper as package
from kernels.hopper import simulated, simulated_rows
from kernels.mutants import load_mutant, once
from openmla.operands import Results
from openmla.plan import Plan
from openmla.sim import Kind, Limits, intercept
from openmla.testing.build import BuiltCase, Outcome
from openmla.testing.compare import judge

LIMITS = Limits(steps=20_000)


def mutant(form: str, file: str, old: str, new: str, folder: Path) -> ModuleType:
    """The launcher of a form in a copy of the package in which `old` became `new`."""
    launcher = "launch" if form == "dense" else "sparse_launch"
    return load_mutant(package, file, once(old, new), launcher, folder)


def plan_of(built: BuiltCase, sm_count: int = 2) -> Plan:
    """For a small chip, and with FP8 rows widened in the kernel."""
    if built.case.form == "dense":
        return simulated.plan_of(built, sm_count)
    chosen = simulated_rows.plan_of(built, sm_count)
    if not built.case.kv.startswith("fp8"):
        return chosen
    read = replace(chosen.config.cache_read, mode="in_kernel")
    return replace(chosen, config=replace(chosen.config, cache_read=read))


def results_of(built: BuiltCase) -> Results:
    """Outputs full of NaN, in the memory of the case."""
    case = built.case
    shape = (*built.operands.q.shape[:2], case.d_v)

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = built.memory.new(shape, dtype)
        made.fill_(torch.nan)
        return made

    out = new(shape, built.operands.q.dtype)
    lse = new(shape[:2], torch.float32) if case.return_lse else None
    logits = new(shape[:2], torch.float32) if case.return_max_logits else None
    return Results(out, lse, logits)


def run_on(
    launcher: ModuleType, built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    results = results_of(built)
    with intercept(limits=LIMITS, **options) as reports:
        for call in launcher.calls(chosen or plan_of(built), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(built, Outcome(results.out, results.lse, results.max_logits)).ok
