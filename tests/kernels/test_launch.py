"""Every launch is made with the GPU of its tensors as the current one: Triton looks nowhere else.

No GPU is needed: tensors of the second GPU are stand-ins, and so is `torch.cuda.device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import openmla.kernels.portable.cache_ops as cache_ops
import openmla.kernels.portable.indexer.windows as index_windows
import openmla.kernels.portable.quantize as quantize
from openmla import dispatch
from openmla.aot import warmup
from openmla.aot.operands import operands_of
from openmla.indexer import ops
from openmla.indexer.operands import FoundWindows
from openmla.kernels import fallback, launch
from openmla.planning.models import problem_for_model

SECOND_GPU = torch.device("cuda", 1)
HERE: Any = SimpleNamespace(device=SECOND_GPU)
"""Stands for a tensor, a cache or operands there."""


class Current:
    """Stands for `torch.cuda.device`, and knows which GPU is the current one."""

    device = torch.device("cuda", 0)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before, Current.device = Current.device, self._device

    def __exit__(self, *raised: object) -> None:
        Current.device = self._before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPU that was the current one, for each launch."""
    devices: list[torch.device] = []

    def note(*args: Any, **kwargs: Any) -> None:
        devices.append(Current.device)

    call = SimpleNamespace(run=note, compile=note, kernel=note)
    plan = SimpleNamespace(
        kernel=SimpleNamespace(launcher="the launcher"),
        backend="hopper",
        target="h200",
        config=None,
        passed_over=(),
    )
    module = SimpleNamespace(calls=lambda *args: iter([call, call]))
    monkeypatch.setattr(torch.cuda, "device", Current)
    for place, name in (
        (cache_ops, "append"),
        (cache_ops, "gather"),
        (quantize, "quantize"),
        (index_windows, "append"),
    ):
        monkeypatch.setattr(place, name, note)
    monkeypatch.setattr(fallback, "import_module", lambda name: module)
    monkeypatch.setattr(dispatch, "plan_call", lambda *args: plan)
    monkeypatch.setattr(warmup, "plan_for", lambda *args: plan)
    monkeypatch.setattr(warmup, "device_target", lambda device: None)
    monkeypatch.setattr(warmup, "operands_of", lambda problem, device: (HERE, HERE))
    return devices


def attention_there() -> Any:
    operands, _ = operands_of(problem_for_model("deepseek-v3", tokens=2))
    return replace(operands, q=HERE)


NOTED: Any = SimpleNamespace(run=lambda: index_windows.append())
PLAN: Any = SimpleNamespace(kernel=SimpleNamespace(launcher="the launcher"))
LAUNCHES: dict[str, tuple[Callable[[], Any], int]] = {
    # name: what is called, how often it launches
    "a plan": (lambda: launch.launch(PLAN, HERE, HERE), 2),
    "attention": (lambda: dispatch.run_call(attention_there(), HERE), 2),
    "LatentCache.append": (lambda: launch.append_rows(HERE, HERE, HERE, HERE), 1),
    "LatentCache.gather": (lambda: launch.gather_rows(HERE, HERE, HERE), 1),
    "quantize": (lambda: launch.quantize_rows([HERE], [HERE], HERE), 1),
    "a step of the indexer": (lambda: dispatch.run_call(HERE, HERE), 2),
    "windows": (lambda: ops.write(FoundWindows(HERE, HERE, NOTED), SECOND_GPU), 1),
    "IndexCache.append": (lambda: launch.append_keys(HERE, HERE, HERE), 1),
    "compiling ahead": (lambda: next(warmup.compile_model("deepseek-v3", SECOND_GPU)), 2),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_made_on_the_gpu_of_the_tensors(
    name: str, launched: list[torch.device]
) -> None:
    call, number = LAUNCHES[name]
    call()
    assert launched == [SECOND_GPU] * number
    assert Current.device.index == 0
