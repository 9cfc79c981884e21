"""Launches that are noted instead of made, for tests of calls that are made again."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from openmla import dispatch, fastpath
from openmla.kernels.call import Call
from openmla.kernels.hopper import repeat
from openmla.operands import DenseOperands, Results, SparseOperands
from openmla.planning import target_by_name

Launches = list[tuple[int, list[Any]]]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 1, 64]}
MOST_DESCRIPTORS = 7


def note_launches(monkeypatch: pytest.MonkeyPatch, replay: ModuleType) -> Launches:
    """CPU tensors are treated as if on an H200; the launcher that `replay` takes only notes."""
    made: Launches = []
    monkeypatch.setattr(dispatch, "device_target", lambda device: target_by_name("h200"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(repeat, "encoder", lambda: _encode)
    metadata = SimpleNamespace(tensordesc_meta=[META] * MOST_DESCRIPTORS)
    monkeypatch.setattr(Call, "compile", lambda self: SimpleNamespace(metadata=metadata))

    def noting(compiled: Any) -> Any:
        return lambda programs, stream, flat: made.append((programs, flat))

    monkeypatch.setattr(replay, "launcher", noting)
    monkeypatch.setattr(fastpath, "_known", {})
    return made


def learn(op: DenseOperands | SparseOperands, results: Results, backend: str) -> None:
    """As after a launch."""
    fastpath.learn(dispatch.plan_call(op, results, backend), op, results, backend)


def arguments_of(call: Call) -> list[Any]:
    """What Triton's launcher would get for a call."""
    flat: list[Any] = []
    for name in call.kernel.arg_names:
        value = call.arguments.get(name)
        if hasattr(value, "block_shape"):
            shape, strides = tuple(value.shape), tuple(value.strides)
            flat += [(value.base.data_ptr(), shape, strides), *shape, *strides]
        else:
            flat.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return flat


def _encode(address: int, *rest: Any) -> tuple[Any, ...]:
    *_format, shape, strides, _padding = rest
    return address, tuple(shape), tuple(strides)
