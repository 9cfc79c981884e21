"""Compile every registered kernel configuration and print a table: what `openmla compile` runs.

The configurations are the problems that the kernels list in their modules `jobs`: each is planned
for its chip, and every call of the plan is compiled.

It compiles with the Triton of the interpreter that runs it, so a second environment with another
Triton checks the same kernels against that version.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from openmla.aot.operands import operands_of
from openmla.backward.problem import BackwardProblem
from openmla.errors import Unsupported
from openmla.indexer.loss_problem import LossProblem
from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs
from openmla.kernels.launch import calls
from openmla.kernels.triton_version import TRITON
from openmla.lab.compiling.jobs import CompileJob, CompileReport, compile_job
from openmla.planning import Plan, Target, cached_plan, target_by_name
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import families_of, family_named

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[CompileJob, CompileReport]
TARGET_NAMES = ("sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950")


def discover() -> list[CompileJob]:
    """The jobs of every kernel of the package that compiles with this Triton."""
    import openmla.kernels as package

    names = (m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    found = (importlib.import_module(n) for n in names if n.endswith(".jobs"))
    listed = (getattr(module, "JOBS", ()) for module in found)
    kernels = [jobs for one in listed for jobs in (one if isinstance(one, tuple) else (one,))]
    return [job for jobs in kernels for job in jobs_of(jobs)]


def jobs_of(listed: Jobs) -> Iterator[CompileJob]:
    """One job per problem and kernel call."""
    chip = target_by_name(listed.chip)
    family = family_named(listed.backend) if listed.backend else families_of(chip)[0]
    for name, problem in listed.problems.items():
        best = cached_plan(problem, chip, family.name, None).kernel
        if best.why_not_run(problem, TRITON) and _none_runs(problem, chip, family.name):
            continue
        chosen = cached_plan(problem, chip, family.name, TRITON)
        operands = operands_of(problem, page_gap=listed.page_gaps.get(name, 0))
        chosen = replace(chosen, config=replace(chosen.config, **listed.configs.get(name, {})))
        names: Counter[str] = Counter()
        for call in calls(chosen, *operands):
            full = f"{family.name} {_kind(chosen, call)} {name}"
            names[full] += 1
            full += f", launch {names[full]}" * (names[full] > 1)
            # The rows of an FP8 cache may have been dequantized by an earlier call.
            full += ", dequantizing" * bool(call.arguments.get("SCALED"))
            yield CompileJob(full, call, chip.arch.replace("_", ""), listed.predicted(chosen, call))


def _none_runs(problem: AnyProblem, chip: Target, backend: str) -> bool:
    """Whether no kernel of the family serves the problem with this Triton."""
    try:
        cached_plan(problem, chip, backend, TRITON)
    except Unsupported:
        return True
    return False


def _kind(chosen: Plan, call: Call) -> str:
    """The kernel's name."""
    steps = {IndexProblem: "indexer ", BackwardProblem: "backward ", LossProblem: "indexer "}
    step = steps.get(type(chosen.problem), "")
    return step + str(call.kernel.__name__).removesuffix("_kernel")


def compile_all(
    jobs: Sequence[CompileJob] | None = None,
    *,
    targets: Iterable[str] = (),
    use_cache: bool = True,
    processes: int = 1,
    console: Console | None = None,
) -> list[Row]:
    """Compile jobs with a progress bar, print the table, and return jobs with their reports.

    Several processes compile registered jobs only: each finds them for itself, by their labels.
    """
    from rich.console import Console

    out = console or Console()
    chosen = discover() if jobs is None else list(jobs)
    wanted = set(targets)
    if wanted:
        chosen = [j for j in chosen if j.target in wanted]
    if processes > 1 and jobs is None:
        spawned = get_context("spawn")  # a forked child would share the compiler's threads
        with ProcessPoolExecutor(processes, spawned) as pool:
            reports = pool.map(partial(_compile_labeled, use_cache), [job.label for job in chosen])
            rows = list(zip(chosen, _tracked(reports, len(chosen), out), strict=True))
    else:
        reports = (compile_job(job, use_cache=use_cache) for job in chosen)
        rows = list(zip(chosen, _tracked(reports, len(chosen), out), strict=True))
    _print(rows, out)
    return rows


def _tracked(
    reports: Iterable[CompileReport], number: int, console: Console
) -> Iterable[CompileReport]:
    from openmla.lab.progress import tracked

    return tracked(reports, console, "compiling", number)


@lru_cache(maxsize=1)
def _by_label() -> dict[str, CompileJob]:
    return {job.label: job for job in discover()}


def _compile_labeled(use_cache: bool, label: str) -> CompileReport:
    """Compile a registered job, in a process of its own."""
    return compile_job(_by_label()[label], use_cache=use_cache)


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
