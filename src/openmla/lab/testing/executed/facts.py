"""What compiled kernels show about speed: `openmla explain --compiled`.

A small case is compiled for the chip and executed here with every warp at the same rate
(gluon_sim.compiled.core.trace), and the assembler says what it made of registers.

>>> for line in facts(Case("dense", 1, 128, 64, 128, q_lens=(256,), k_lens=(1024,)), "b200"):
...     line.slack, line.loops, line.spills                                # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gluon_sim.compiled import EQUAL, LineSlack, Loop, execute, parse
from openmla.lab.compiling.jobs import figures
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed.prepare import prepare
from openmla.problem import CACHE_FORMATS, Problem

_QUERIES = {"dense": 256, "latent": 4, "sparse": 1}
_KEYS = 1024
"""Enough that a loop over tiles of 128 keys settles."""


@dataclass(frozen=True)
class Facts:
    """One compiled kernel."""

    kernel: str
    slack: tuple[LineSlack, ...]
    """Products of the block (on AMD, of the wave) between copies and their waits, by line."""
    loops: tuple[Loop, ...]
    """The busiest loop of each role: instructions, products, barriers and waits per iteration."""
    registers: int | None
    spills: int | None
    """Bytes (on AMD, registers) that the assembler moved to local memory; None: it does not say."""

    def lines(self) -> Iterator[str]:
        """The facts as text."""
        yield self.kernel
        yield f"  registers {self.registers}, moved to local memory {self.spills}"
        yield "  one iteration of a warp:"
        yield from (f"    {loop}" for loop in self.loops)
        yield "  products between a copy and its wait, line by line:"
        yield from (f"    {one}" for one in self.slack)


def facts(case: Case, target: str) -> list[Facts]:
    """Every kernel that a case launches on a target. Raises Unsupported where none serves it."""
    found = []
    prepared = prepare(case, target)
    for launch in prepared.launches:
        report = execute(
            launch.compiled,
            launch.programs,
            launch.arguments,
            outputs=launch.outputs,
            schedule=EQUAL,
            trace=True,
        )
        report.raise_if_bad()
        if report.trace is None:
            raise AssertionError("an execution with trace=True has one")
        read = figures(launch.compiled)
        loops = tuple(report.trace.loops(parse(launch.compiled)))
        slack = tuple(report.trace.slack_of_lines())
        name = launch.compiled.metadata.name
        found.append(Facts(name, slack, loops, read["registers"], read["spills"]))
    return found


def explained(problem: Problem, target: str) -> Iterator[str]:
    """What the kernels of a problem show, as text."""
    case = case_like(problem)
    yield f"compiled and executed on this CPU: {case}"
    for kernel in facts(case, target):
        yield from kernel.lines()


def case_like(problem: Problem) -> Case:
    """A case for the kernel of a problem, small enough to execute: few queries, 1024 keys."""
    dense = problem.form == "dense"
    cache = problem.rope_dtype if dense else problem.kv_dtype
    return Case(
        problem.form,
        1 if dense else problem.heads,
        problem.d_nope,
        problem.d_rope,
        problem.d_v,
        q_lens=(_QUERIES[problem.form],),
        k_lens=(_KEYS,),
        dtype=problem.q_dtype,
        side_dtype=problem.v_dtype if dense and problem.v_dtype != problem.q_dtype else "",
        causal=False,
        rope=problem.rope,
        kv=cache if cache in CACHE_FORMATS and problem.page_size else "plain",
        page_size=problem.page_size or 64,
        topk=_KEYS if problem.form == "sparse" else 0,
        scale=None if dense else problem.d_qk**-0.5,
    )
