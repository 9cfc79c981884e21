"""Kernels that this Triton cannot import or compile: "auto" runs the portable one, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from openmla import dispatch
from openmla.errors import Unsupported
from openmla.indexer.problem import IndexProblem
from openmla.kernels import fallback
from openmla.kernels.call import Call
from openmla.planning import TARGETS
from openmla.problem import Problem

HERE = Path(__file__).parent
DENSE = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
H200 = TARGETS["h200"]


@pytest.fixture(autouse=True)
def _nothing_failed_before() -> Any:
    fallback.forget()
    yield
    fallback.forget()


def refuse(plan: Any) -> str:
    """A launch in which Hopper's kernel is not compiled."""
    if plan.backend == "hopper":
        raise fallback.NotCompiled("dense_kernel: CompilationError: no such call")
    return str(plan.backend)


def test_auto_takes_the_portable_kernel_and_warns_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            plan, ran = fallback.run_plan(lambda: dispatch.plan_for(DENSE, H200), refuse)
            assert (plan.backend, ran) == ("portable", "portable")
    assert [one.category for one in seen] == [fallback.PortableFallback]
    said = str(seen[0].message)
    assert "openmla.kernels.hopper.dense" in said and "no such call" in said
    assert "triton 3." in said and "torch 2." in said and fallback.DOCS in said


def test_a_named_backend_is_refused_with_a_typed_error() -> None:
    with pytest.raises(Unsupported, match="no such call") as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fallback.run_plan(lambda: dispatch.plan_for(DENSE, H200, "hopper"), refuse)
    assert "auto" in error.value.nearest


def test_nothing_is_left_when_the_portable_kernel_fails_too() -> None:
    def refuse_all(plan: Any) -> None:
        raise fallback.NotCompiled(f"{plan.backend} fails")

    with pytest.raises(Unsupported, match="portable fails"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fallback.run_plan(lambda: dispatch.plan_for(DENSE, H200), refuse_all)


SELECTION = IndexProblem(form="select", topk=64, total_q=8, width=512)


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_plain_triton_is_behind_the_gluon_kernel_of_the_portable_family(backend: str) -> None:
    """Its selection on chips that have no family of their own."""

    def refuse_gluon(plan: Any) -> str:
        if plan.kernel_name == "select_gluon":
            raise fallback.NotCompiled("select_kernel: AttributeError: no such call")
        return str(plan.kernel_name)

    a100 = TARGETS["a100"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            plan, ran = fallback.run_plan(
                lambda: dispatch.plan_for(SELECTION, a100, backend), refuse_gluon
            )
            assert (plan.backend, ran) == ("portable", "select")
    assert [one.category for one in seen] == [fallback.PortableFallback]
    assert "no such call" in plan.passed_over[-1]


class Kernel:
    """A kernel as Triton has it: compiled by `warmup`, compiled and launched by a call."""

    __name__ = "toy_kernel"

    def __init__(self, compiles: bool, error: Exception) -> None:
        self.compiles, self.error = compiles, error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> None:
            raise self.error

        return launch

    def warmup(self, **arguments: Any) -> None:
        if not self.compiles:
            raise self.error


def test_an_error_of_the_compiler_is_told_from_one_of_the_launch() -> None:
    broken = Kernel(False, RuntimeError("PassManager::run failed"))
    with pytest.raises(fallback.NotCompiled, match="toy_kernel: RuntimeError: PassManager"):
        fallback.run_calls([Call(broken, 1, {})])
    crashed = Kernel(True, RuntimeError("Triton Error [CUDA]: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fallback.run_calls([Call(crashed, 1, {})])
    too_large = Kernel(True, OutOfResources(300000, 232448, "shared memory"))
    with pytest.raises(Unsupported, match="shared memory"):
        fallback.run_calls([Call(too_large, 1, {})])


def test_a_module_that_cannot_be_imported_serves_no_plan_any_more() -> None:
    gone = SimpleNamespace(launcher="openmla.kernels.no_such_kernel.launch")
    plan = SimpleNamespace(backend="hopper", kernel=gone, config="numbers")
    with pytest.raises(fallback.NotCompiled, match="ModuleNotFoundError"):
        fallback.launcher_of(plan)
    on_cpu = SimpleNamespace(backend="cpu", kernel=gone, config="numbers")
    with pytest.raises(ModuleNotFoundError):  # a CPU kernel needs no Triton: a bug, not a version
        fallback.launcher_of(on_cpu)


@pytest.mark.slow
@pytest.mark.tritons
def test_a_call_on_a_triton_whose_names_were_taken_away() -> None:
    """From the public call to a right result: planned for an H200, run by Triton's interpreter."""
    root = HERE.parents[1]
    path = [str(HERE.parent), os.environ.get("PYTHONPATH", ""), str(root / "src")]
    run = subprocess.run(
        [sys.executable, str(HERE / "without_names.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["warnings"] == 1 and found["names"] == ["barrier", "thread_barrier"]
    assert found["refused"].startswith("hopper: ") and "thread_barrier" in found["refused"]
    assert found["error"] < 1e-2
    assert "portable" in found["doctor"] and "thread_barrier" in found["doctor"]
