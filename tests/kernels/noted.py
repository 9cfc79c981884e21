"""Launches that are noted instead of made, the long way and cached, and their comparison.

CPU tensors stand for those of an H200. The long way notes calls with their tensors, a cached launch
the flat list that Triton's launcher would get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import cached, dispatch
from openmla.indexer import ops as index_ops
from openmla.kernels import prepared
from openmla.kernels.call import COUNTER, Call
from openmla.kernels.gluon import indexer_operands
from openmla.kernels.hopper.dense import launch as dense_launch
from openmla.kernels.hopper.latent import launch as latent_launch
from openmla.kernels.hopper.latent_fp8 import launch as latent_fp8_launch
from openmla.kernels.portable.indexer import windows
from openmla.planning import target_by_name

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 1, 64]}
Result = Callable[[], Any]


@dataclass
class Noted:
    """What was launched since `take`: (programs, flat arguments), and memory that was allocated."""

    long: list[tuple[int, list[Any]]] = field(default_factory=list)
    cached: list[tuple[int, list[Any]]] = field(default_factory=list)
    blocks: list[tuple[str, Tensor]] = field(default_factory=list)
    counter: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))

    def take(self, call: Result) -> tuple[tuple[Tensor, ...], Noted]:
        """The results of a call, and what it launched."""
        self.long, self.cached, self.blocks = [], [], []
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        return results, Noted(self.long, self.cached, self.blocks, self.counter)

    def run(self, call: Call) -> Any:
        """Instead of Call.run."""
        self.long.append((call.programs, flattened(call)))
        count = sum(hasattr(x, "block_shape") for x in call.arguments.values())
        return SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[META] * count))

    def allocate(self, kind: str, size: int, device: torch.device, stream: int) -> Tensor:
        """Instead of prepared._allocate."""
        made = self.counter if kind == COUNTER else torch.empty(size, dtype=torch.uint8)
        self.blocks.append((kind, made))
        return made


def flattened(call: Call) -> list[Any]:
    """What Triton's launcher would get, with tensors instead of addresses."""
    flat: list[Any] = []
    for name in call.kernel.arg_names:
        value = call.arguments.get(name)
        if hasattr(value, "block_shape"):
            shape, strides = list(value.shape), list(value.strides)
            flat += [("descriptor", value.base, shape, strides), *shape, *strides]
        else:
            flat.append(value)
    return flat


def _encode(address: int, *rest: Any) -> tuple[Any, ...]:
    *_format, shape, strides, _padding = rest
    return "descriptor", address, shape, strides


def note_launches(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Nothing is known, and nothing is launched from now on."""
    noted = Noted()
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    for place, name, value in (
        (dispatch, "device_target", lambda device: target_by_name("h200")),
        (torch.cuda, "current_device", lambda: None),  # the index of a CPU
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (cached, "_on_this_gpu", lambda q: True),
        (cached, "_launches", {}),
        (cached, "_templates", {}),
        (prepared, "encoder", lambda: _encode),
        (prepared, "driver", stream),
        (prepared, "_allocate", noted.allocate),
        (prepared, "launcher", lambda _: lambda n, stream, flat: noted.cached.append((n, flat))),
        (dense_launch, "launch_counter", lambda device: noted.counter),
        (latent_launch, "launch_counter", lambda device: noted.counter),
        (latent_fp8_launch, "launch_counter", lambda device: noted.counter),
        (indexer_operands, "launch_counter", lambda device: noted.counter),
        (index_ops, "windows_of", windows.paged_windows),  # as on a GPU
        (index_ops, "given_windows", windows.given_windows),
        (Call, "run", lambda call: noted.run(call)),
    ):
        monkeypatch.setattr(place, name, value)
    return noted


def difference(
    want: tuple[tuple[Tensor, ...], Noted], got: tuple[tuple[Tensor, ...], Noted]
) -> str:
    """Where a cached launch differs from the long way with the same inputs; empty if nowhere.

    Outputs and workspaces lie elsewhere: parts of a workspace must be apart, of their full sizes.
    """
    (outputs, long), (made, short) = want, got
    if [n for n, _ in long.long] != [n for n, _ in short.cached]:
        return "numbers of programs"
    moved = {x.untyped_storage().data_ptr(): y for x, y in zip(outputs, made, strict=True)}
    blocks = [(x.data_ptr(), x.data_ptr() + x.nbytes) for _, x in short.blocks]
    parts: dict[int, tuple[int, int]] = {}

    def wrong(x: Any, y: Any) -> bool:
        if isinstance(x, tuple) and x and x[0] == "descriptor":
            return wrong(x[1], y[1]) or x[2:] != y[2:]
        if not isinstance(x, Tensor):
            return bool(x is not y and x != y)
        storage = x.untyped_storage()
        offset = x.data_ptr() - storage.data_ptr()
        if storage.data_ptr() in moved:
            return bool(y != moved[storage.data_ptr()].data_ptr() + offset)
        if y == x.data_ptr():
            return False
        part = parts.setdefault(storage.data_ptr(), (y - offset, y - offset + storage.nbytes()))
        inside = any(first <= part[0] and part[1] <= last for first, last in blocks)
        return part[0] != y - offset or not inside

    for i, ((_, wanted), (_, flat)) in enumerate(zip(long.long, short.cached, strict=True)):
        if len(wanted) != len(flat):
            return f"kernel {i}: {len(flat)} arguments instead of {len(wanted)}"
        for j, (x, y) in enumerate(zip(wanted, flat, strict=True)):
            if wrong(x, y):
                return f"kernel {i}, argument {j}: {y} instead of {x}"
    ranges = sorted(parts.values())
    apart = all(a[1] <= b[0] for a, b in pairwise(ranges))
    return "" if apart else "parts of a workspace overlap"
