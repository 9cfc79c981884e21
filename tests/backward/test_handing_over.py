"""Which kernels compute gradients on a Hopper: its own, or portable ones where those lack it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from openmla import Unsupported
from openmla.aot.operands import operands_of
from openmla.backward import ops
from openmla.backward.problem import BackwardProblem
from openmla.planning import NEWEST_TRITON, cached_plan, target_by_name
from openmla.problem import Problem

pytest.importorskip("triton")

from openmla.kernels.launch import calls

V3 = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
V32 = replace(V3, form="sparse", heads=64, d_nope=512, d_v=512, topk=64, causal=False)
TRITONS = [(3, 6), (3, 7), (3, 8), NEWEST_TRITON]
H200 = target_by_name("h200")


def backward_of(form: Problem, has_d_lse: bool = False, **more: bool) -> BackwardProblem:
    """Gradients of a call with these options."""
    return BackwardProblem.of(replace(form, **more), has_d_lse)


def served(form: Problem, triton: tuple[int, int], **more: bool) -> str:
    """The family that "auto" takes for gradients of a call."""
    return cached_plan(backward_of(form, **more), H200, "auto", triton).backend


@pytest.mark.parametrize("triton", TRITONS, ids=str)
@pytest.mark.parametrize("more", [{}, {"has_sink": True}, {"has_d_lse": True}], ids=str)
def test_hopper_keeps_what_it_serves(triton: tuple[int, int], more: dict[str, bool]) -> None:
    assert served(V3, triton, **more) == served(V32, triton, **more) == "hopper"


@pytest.mark.parametrize("triton", TRITONS, ids=str)
@pytest.mark.parametrize("more", [{}, {"has_sink": True}, {"has_d_lse": True}], ids=str)
def test_gradients_under_a_key_mask_are_hoppers_too(
    triton: tuple[int, int], more: dict[str, bool]
) -> None:
    assert served(V3, triton, has_key_mask=True, **more) == "hopper"
    masked = replace(V3, has_key_mask=True)
    assert cached_plan(masked, H200, "auto", triton).backend == "hopper"  # their forward pass


@pytest.mark.parametrize("triton", TRITONS, ids=str)
@pytest.mark.parametrize("form", [V3, V32], ids=["dense", "sparse"])
def test_a_sink_beside_a_gradient_of_lse_is_portable(
    form: Problem, triton: tuple[int, int]
) -> None:
    assert served(form, triton, has_sink=True, has_d_lse=True) == "portable"


def test_plans_say_why() -> None:
    windowed = openmla.plan(BackwardProblem.of(replace(V3, window=100)), "h200")
    assert windowed.passed_over == ("hopper: window 100: not served",)
    both = openmla.plan(BackwardProblem.of(replace(V3, has_sink=True), True), "h200")
    assert "a sink beside a gradient of lse" in both.passed_over[0]


@pytest.mark.parametrize(
    "more",
    [{"has_key_mask": True, "window": 30}, {"has_sink": True, "has_d_lse": True}],
    ids=str,
)
def test_what_is_launched_reads_what_the_call_has(more: dict[str, Any]) -> None:
    problem = backward_of(V3, **more)
    operands, gradients = operands_of(problem)
    launched = list(calls(openmla.plan(problem, "h200"), operands, gradients))
    names = [call.kernel.__name__ for call in launched]
    assert names[0] == "query_pass_kernel" and "key_pass_kernel" in names
    for call in launched:
        assert call.kernel.__module__.startswith("openmla.kernels.portable.backward.")
        if "pass" in call.kernel.__name__:
            present = {n: call.arguments[f"{n}_ptr"] is not None for n in ("mask", "sink", "d_lse")}
            wanted = {
                "mask": problem.has_key_mask,
                "sink": problem.has_sink,
                "d_lse": problem.has_d_lse,
            }
            assert present == wanted


def test_hopper_writes_the_bits_of_a_mask_first() -> None:
    problem = backward_of(V3, has_key_mask=True)
    operands, gradients = operands_of(problem)
    launched = list(calls(openmla.plan(problem, "h200"), operands, gradients))
    names = [call.kernel.__name__ for call in launched]
    assert names[:3] == ["seen_bits_kernel", "query_pass_kernel", "key_pass_kernel"]
    assert all(call.arguments["bits_desc"] is not None for call in launched[1:3])


def test_a_named_hopper_refuses_a_window_before_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "device_target", lambda device: H200)
    here = torch.device("cpu")
    windowed = BackwardProblem.of(replace(V3, window=100))
    assert ops.backend_of(windowed, here, "auto") == "auto"
    with pytest.raises(Unsupported, match="window 100: not served"):
        ops.backend_of(windowed, here, "hopper")
