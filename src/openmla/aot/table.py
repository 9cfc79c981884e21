"""Compile every registered kernel configuration and print a table: what `openmla compile` runs.

The configurations are the problems that the kernels list in their modules `jobs`: each is planned
for its chip, and every call of the plan is compiled.

It compiles with the Triton of the interpreter that runs it, so a second environment with another
Triton checks the same kernels against that version.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openmla.aot.jobs import CompileJob, CompileReport, compile_job
from openmla.aot.operands import index_operands_of, operands_of
from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.gluon.compat import TRITON
from openmla.kernels.jobs import Jobs
from openmla.kernels.launch import calls
from openmla.planning import TARGETS, Plan, cached_plan
from openmla.planning.indexer import IndexPlan, cached_index_plan
from openmla.planning.registry import families_of

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[CompileJob, CompileReport]
TARGET_NAMES = ("sm90", "sm100", "gfx950")


def discover() -> list[CompileJob]:
    """The jobs of every kernel of the package that compiles with this Triton."""
    import openmla.kernels as package

    names = (m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    found = (importlib.import_module(n) for n in names if n.endswith(".jobs"))
    return [job for module in found for job in jobs_of(getattr(module, "JOBS", None))]


def jobs_of(listed: Jobs | None) -> Iterator[CompileJob]:
    """One job per problem and kernel call."""
    if listed is None:
        return
    chip = TARGETS[listed.chip]
    family, *_ = families_of(chip)
    if all(kernel.why_not_run(TRITON) for kernel in family.kernels):
        return
    for name, problem in listed.problems.items():
        if isinstance(problem, IndexProblem):
            chosen: Any = cached_index_plan(problem, chip, family.name, TRITON)
            operands: Any = index_operands_of(problem)
        else:
            chosen = cached_plan(problem, chip, family.name, TRITON)
            operands = operands_of(problem, page_gap=listed.page_gaps.get(name, 0))
        chosen = replace(chosen, config=replace(chosen.config, **listed.configs.get(name, {})))
        for call in calls(chosen, *operands):
            full = f"{family.name} {_kind(chosen, call)} {name}"
            # The rows of an FP8 cache may have been dequantized by an earlier call.
            full += ", dequantizing" * bool(call.arguments.get("SCALED"))
            yield CompileJob(full, call, chip.arch.replace("_", ""), listed.predicted(chosen, call))


def _kind(chosen: Plan | IndexPlan, call: Call) -> str:
    """The kernel's name."""
    step = "indexer " if isinstance(chosen, IndexPlan) else ""
    return step + str(call.kernel.__name__).removesuffix("_kernel")


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
            job.name, job.target, _registers(report), _number(report.spills),
            _number(report.shared), _number(report.tmem), seconds, verdict,
        )  # fmt: skip
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
