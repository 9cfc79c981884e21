"""Timing on a GPU, as far as a processor can tell."""

import contextlib
import gc
import weakref

import pytest
import torch

from openmla.lab.bench.gpu_timing import graph_of


class Graph:
    """Stands for a CUDA graph: counts its replays."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def test_a_graph_keeps_the_memory_that_its_function_uses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.zeros(4)
    held = weakref.ref(x)

    def function(x: torch.Tensor = x) -> None:
        x.add_(1)

    replay = graph_of(function)
    del function, x
    gc.collect()
    replay()
    found = held()
    assert found is not None
    assert found.tolist() == [2.0] * 4  # once before the capture, once in it
    assert Graph.replays == 1
