"""Compile every registered kernel configuration and print a table: what `openmla compile` runs.

A module that owns kernels lists its configurations in `COMPILE_JOBS` (a sequence of `CompileJob`,
or a function that returns one). All modules under `openmla.kernels` are looked at.

It compiles with the Triton of the interpreter that runs it, so a second environment with another
Triton checks the same kernels against that version.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from openmla.aot.jobs import CompileJob, CompileReport, compile_job

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[CompileJob, CompileReport]


def discover() -> list[CompileJob]:
    """The jobs of every kernel module of the package."""
    import openmla.kernels as package

    jobs: list[CompileJob] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        jobs += jobs_of(importlib.import_module(found.name))
    return jobs


def jobs_of(module: ModuleType) -> list[CompileJob]:
    """The jobs a module lists."""
    listed = getattr(module, "COMPILE_JOBS", ())
    return list(listed() if callable(listed) else listed)


def compile_all(
    jobs: Sequence[CompileJob] | None = None,
    *,
    targets: Iterable[str] = (),
    use_cache: bool = True,
    console: Console | None = None,
) -> list[Row]:
    """Compile jobs with a progress bar, print the table, and return jobs with their reports."""
    from rich.console import Console
    from rich.progress import track

    out = console or Console()
    chosen = discover() if jobs is None else list(jobs)
    wanted = set(targets)
    if wanted:
        chosen = [j for j in chosen if j.target in wanted]
    rows: list[Row] = []
    for job in track(chosen, description="compiling", console=out, transient=True):
        rows.append((job, compile_job(job, use_cache=use_cache)))
    _print(rows, out)
    return rows


def failures(rows: Iterable[Row]) -> list[str]:
    """One line per job that does not compile or does not match its plan."""
    return [
        f"{job.label}: {difference}"
        for job, report in rows
        for difference in report.differences(job.predicted)
    ]


def _print(rows: Sequence[Row], console: Console) -> None:
    from rich.table import Table

    version = rows[0][1].triton if rows else "?"
    table = Table(title=f"{len(rows)} kernel configurations, triton {version}")
    table.add_column("kernel", no_wrap=True)
    for heading in ("target", "regs", "spills", "shared", "TMEM", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan")
    for job, report in rows:
        wrong = report.differences(job.predicted)
        verdict = "[red]" + "; ".join(wrong) if wrong else "ok"
        seconds = "cached" if report.cached else f"{report.seconds:.1f}"
        table.add_row(
            job.name,
            job.target,
            _registers(report),
            _number(report.spills),
            _number(report.shared),
            _number(report.tmem),
            seconds,
            verdict,
        )
    console.print(table)
    for _, report in rows:
        for warning in report.warnings:
            console.print(f"{report.name}: {warning}", highlight=False)


def _registers(report: CompileReport) -> str:
    """Registers at launch; on AMD with the accumulator registers among them."""
    extra = f" ({report.accumulators} acc)" if report.accumulators else ""
    return _number(report.registers) + extra


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
