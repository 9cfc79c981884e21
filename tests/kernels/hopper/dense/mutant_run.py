"""Runs of a changed copy of the Hopper kernels, dense or latent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import openmla.kernels.hopper as package
from gluon_sim import Kind, Limits, intercept
from kernels.hopper import simulated
from kernels.mutants import load_mutant, once
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.planning import Plan

LIMITS = Limits(steps=20_000)


def mutant(form: str, file: str, old: str, new: str, folder: Path, after: str = "") -> ModuleType:
    """The launcher of a form in a copy of the package in which `old` became `new`.

    after: see `once`.
    """
    launcher = "dense.launch" if form == "dense" else "latent.launch"
    return load_mutant(package, file, once(old, new, after), launcher, folder)


def plan_of(built: BuiltCase, sm_count: int = 2) -> Plan:
    """For a small chip, and with FP8 rows dequantized in the kernel."""
    if built.case.form == "dense":
        return simulated.plan_of(built, sm_count)
    chosen = simulated.plan_of(built, sm_count)
    if not built.case.kv.startswith("fp8"):
        return chosen
    read = replace(chosen.config.cache_read, mode="in_kernel")
    return replace(chosen, config=replace(chosen.config, cache_read=read))


def run_on(
    launcher: ModuleType, built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    results = new_results(built)
    with intercept(limits=LIMITS, **options) as reports:
        for call in launcher.calls(chosen or plan_of(built), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(built, Outcome(results.out, results.lse, results.max_logits)).ok
