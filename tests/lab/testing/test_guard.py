"""Guard pages: one element too far is a fault, and a case that faults is named."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openmla.lab.testing.cases import Case, build, random_case
from openmla.lab.testing.isolate import run_guarded
from openmla.lab.testing.memory.guard import EDGES, GuardedMemory, guarded_bytes

CASE = Case("dense", 2, 8, 4, 8, (3,), (5,), layout="strided")


def reads_past_the_end(built):
    """An implementation that reads one element past v; a positive control for the guard."""
    v = built.operands.v
    last = sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True))
    ctypes.string_at(v.data_ptr() + v.element_size() * (last + 1), 2)
    return built.run()


def reads_before_the_start(built):
    """An implementation that reads one element before q."""
    ctypes.string_at(built.operands.q.data_ptr() - 2, 2)
    return built.run()


def read_beside(edge, elements_beyond):
    """Read one float32 at, or `elements_beyond` past, the guarded edge of a small tensor."""
    values = guarded_bytes(16, edge).view(torch.float32)
    offset = 3 + elements_beyond if edge == "end" else -elements_beyond
    return ctypes.c_float.from_address(values.data_ptr() + 4 * offset).value


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("edge", EDGES)
def test_guards_bite_on_this_machine(edge, beyond):
    """The last element is readable, one further is a fault, which ends the process that reads."""
    reading = f"import test_guard; test_guard.read_beside({edge!r}, {beyond})"
    command = [sys.executable, "-c", reading]
    code = subprocess.run(command, cwd=Path(__file__).parent, check=False).returncode
    assert code in (-signal.SIGSEGV, -signal.SIGBUS) if beyond else code == 0


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 70_000])
def test_guarded_bytes_are_ordinary_memory(edge, size):
    raw = guarded_bytes(size, edge)
    raw.fill_(7)
    assert raw.shape == (size,) and int(raw.sum()) == 7 * size


@pytest.mark.parametrize("edge", EDGES)
def test_tensors_touch_the_guard(edge):
    memory = GuardedMemory(edge)
    built = build(CASE, memory=memory)
    for buffer in memory.buffers:
        address = buffer.data_ptr() + (buffer.numel() if edge == "end" else 0)
        assert address % 4096 == 0
    assert torch.equal(built.run().out, build(CASE).run().out)


def test_the_public_calls_stay_inside_their_tensors():
    cases = [random_case(seed) for seed in range(20_000, 20_015)]
    assert [(c, p) for c, p in run_guarded(cases) if p] == []


@pytest.mark.parametrize(
    "function",
    ["reads_past_the_end", pytest.param("reads_before_the_start", marks=pytest.mark.long)],
)
def test_a_fault_is_blamed_on_its_case_and_the_rest_goes_on(function, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    problems = [p for _, p in run_guarded([CASE, CASE], f"test_guard:{function}")]
    assert len(problems) == 2
    assert all("SIGSEGV" in p or "SIGBUS" in p for p in problems)


def test_an_exception_in_the_child_is_reported():
    problems = [p for _, p in run_guarded([CASE], "openmla.lab.testing.simulate.draw:menu_of")]
    assert problems == ["TypeError: menu_of() missing 1 required positional argument: 'form'"]
