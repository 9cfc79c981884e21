"""The counter that launches of a stream draw their work from: kept, and in nobody's memory pool."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.kernels import call

CPU = torch.device("cpu")


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """(thread, stream) of every allocation. CPU tensors stand for those of a GPU."""
    places: list[tuple[int, Any]] = []
    here = threading.local()
    zeros = torch.zeros

    @contextmanager
    def on_stream(stream: Any) -> Any:
        here.stream = stream.name
        yield
        del here.stream

    def allocate(*shape: int, **options: Any) -> Tensor:
        places.append((threading.get_ident(), getattr(here, "stream", None)))
        return zeros(*shape, **options)

    monkeypatch.setattr(call, "_counters", {})
    monkeypatch.setattr(call, "_counters_of_graphs", {})
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(name="mine", device=device, synchronize=lambda: None),
    )
    return places


def test_a_kept_counter_is_in_no_pool_of_the_calling_thread(
    allocated: list[tuple[int, Any]],
) -> None:
    """A pool takes what its thread allocates, and torch's CUDA graph trees count what is left in
    theirs; work of the current stream comes after the zero that it finds."""
    counter = call.counter_of_stream(CPU, 7)
    assert len(allocated) == 2  # its own, and those of graphs
    for thread, stream in allocated:
        assert thread != threading.get_ident() and stream == "mine"
    assert counter.tolist() == [0] and counter.dtype == torch.int32


def test_each_stream_has_one_counter(allocated: list[tuple[int, Any]]) -> None:
    first, other = call.counter_of_stream(CPU, 7), call.counter_of_stream(CPU, 8)
    assert call.counter_of_stream(CPU, 7) is first and other is not first
    assert len(allocated) == 3  # those of graphs once


GPU = torch.device("cuda", 0)


def test_launches_of_graphs_have_counters_that_nothing_clears(
    allocated: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there are some; each is another one, and none is that of a stream."""
    monkeypatch.setattr(call, "GRAPH_LAUNCHES", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stream = call.counter_of_stream(CPU, 7)
    monkeypatch.setitem(call._counters_of_graphs, GPU, call._counters_of_graphs[CPU])
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: "zeroed by the graph")
    made = [call.launch_counter(GPU) for _ in range(4)]
    assert made[3] == "zeroed by the graph"
    addresses = {x.data_ptr() for x in (stream, *made[:3])}
    assert len(addresses) == 4 and all(x.tolist() == [0] for x in made[:3])


def test_a_graph_that_is_captured_before_any_call_clears_its_counter(
    allocated: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: "zeroed by the graph")
    assert call.launch_counter(GPU) == "zeroed by the graph"


def test_what_cannot_be_allocated_is_said(
    allocated: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*shape: int, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        call.counter_of_stream(CPU, 7)
    assert not call._counters
