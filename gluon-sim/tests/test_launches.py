"""Launches that overlap and programs that meet in global memory, simulated and executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import compiling
import gluon_sim as sim
from gluon_sim import compiled, simulate
from toys import dependent

BLOCK, PROGRAMS = 128, 2
SIZE = BLOCK * PROGRAMS


@dataclass
class Step:
    """One launch of a stream: kernel, arguments, constants, and whether it may begin early."""

    kernel: Any
    args: dict[str, torch.Tensor]
    constants: dict[str, Any]
    dependent: bool = False
    programs: int = PROGRAMS


def step(x: torch.Tensor, out: torch.Tensor, *flags: str) -> Step:
    """out = x + 1 after `flags`; the launch is a dependent one unless the first is "alone"."""
    constants = {"BLOCK": BLOCK, "FLAGS": tuple(flag for flag in flags if flag != "alone")}
    return Step(dependent.step, {"x_ptr": x, "out_ptr": out}, constants, "alone" not in flags)


def simulated(steps: Sequence[Step]) -> bool:
    """Whether the Gluon simulator finds a race, and nothing else."""
    with sim.intercept(seed=1, ignore=[sim.Kind.OUTPUT]) as reports:
        for one in steps:
            more = {"launch_pdl": True} if one.dependent else {}
            one.kernel[(one.programs,)](*one.args.values(), **one.constants, num_warps=4, **more)
    kinds = {kind for report in reports for kind in report.kinds()}
    assert kinds <= {sim.Kind.RACE}
    return bool(kinds)


def executed(steps: Sequence[Step]) -> bool:
    """The same of compiled code."""
    launches, found = compiled.Launches(), False
    names = {torch.float32: "*fp32", torch.int32: "*i32"}
    for one in steps:
        types = {name: names[x.dtype] for name, x in one.args.items()}
        code = compiling.compiled(one.kernel, types, one.constants, "sm90", num_warps=4)
        report = compiled.execute(
            code, one.programs, one.args, launches=launches, dependent=one.dependent
        )
        assert {finding.kind for finding in report.findings} <= {compiled.Kind.RACE}
        found |= not report.ok
    return found


MODELS = [
    pytest.param(simulated, id="simulated"),
    pytest.param(executed, id="executed", marks=pytest.mark.compile),
]
Model = Callable[[Sequence[Step]], bool]


def buffers(count: int) -> list[torch.Tensor]:
    return [torch.zeros(SIZE) for _ in range(count)]


@pytest.mark.parametrize("races", MODELS)
def test_a_dependent_launch_waits_before_it_reads(races: Model):
    a, b, c = buffers(3)
    assert not races([step(a, b, "alone", "release"), step(b, c, "wait")])
    assert c.eq(2).all()
    assert races([step(a, b, "alone", "release"), step(b, c)])
    assert races([step(a, b, "alone"), step(b, c)]), "its writes need not be visible at its end"
    assert not races([step(a, b, "alone", "release"), step(b, c, "alone")])


@pytest.mark.parametrize("races", MODELS)
def test_a_dependent_launch_waits_before_it_overwrites(races: Model):
    a, b, c = buffers(3)
    assert races([step(a, b, "alone"), step(c, a)]), "what the launch in front reads"
    assert races([step(a, b, "alone"), step(c, b)]), "what it writes"
    assert not races([step(a, b, "alone"), step(c, a, "wait")])
    assert not races([step(a, b, "alone"), step(a, c)]), "both only read a"


@pytest.mark.parametrize("races", MODELS)
def test_the_launch_before_the_one_in_front_may_run_too(races: Model):
    """B lets C begin before it has waited for A: only C's own wait, which is for B, covers A."""
    a, b, c, d = buffers(4)
    assert not races([step(a, b, "alone"), step(c, d, "wait"), step(b, c, "wait")])
    assert races([step(a, b, "alone"), step(c, d, "release", "wait"), step(b, a)])
    assert not races([step(a, b, "alone"), step(c, d, "wait", "release"), step(a, b)])
    assert races([step(a, b, "alone"), step(c, d), step(b, a, "wait")]), "B ends without waiting"


@pytest.mark.parametrize("races", MODELS)
def test_partitions_hear_of_a_wait_by_barriers(races: Model):
    a, b, c = buffers(3)
    first = step(a, b, "alone", "release")
    for told in (True, False):
        constants = {"BLOCK": BLOCK, "TOLD": told}
        args = {"x_ptr": b, "out_ptr": c}
        second = Step(dependent.step_of_partitions, args, constants, dependent=True)
        assert races([first, second]) is not told


@pytest.mark.parametrize("races", MODELS)
def test_programs_of_a_launch_write_apart(races: Model):
    out = torch.zeros(4, dtype=torch.int32)
    shared = Step(dependent.all_write_the_first, {"out_ptr": out}, {"ATOMIC": False})
    assert races([shared])
    shared.constants = {"ATOMIC": True}
    assert not races([shared])
    assert out[0] >= PROGRAMS


@pytest.mark.parametrize("writer", range(PROGRAMS))
@pytest.mark.parametrize("races", MODELS)
def test_no_program_writes_what_another_reads(races: Model, writer: int):
    x, out = torch.zeros(4), torch.zeros(4)
    args, constants = {"x_ptr": x, "out_ptr": out}, {"WRITER": writer}
    assert races([Step(dependent.all_read_one_writes, args, constants)])
    assert not races([Step(dependent.all_read_one_writes, args, {"WRITER": -1})])
    assert not races([Step(dependent.all_read_one_writes, args, {"WRITER": 0}, programs=1)])


def test_only_some_programs_of_a_long_grid_run():
    programs = 2**40
    out = torch.zeros(4 * 128, dtype=torch.int32)
    args = (torch.arange(4 * 128, dtype=torch.int32), out, 128)
    simulate(dependent.add_one, programs, args, only=(0, 3)).raise_if_bad()
    assert out.view(4, 128)[:, 0].tolist() == [1, 0, 0, 3 * 128 + 1]
    assert not simulate(dependent.add_one, programs, args, only=(4,)).ok
