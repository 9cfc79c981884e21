"""The indexer on a GPU: scores, selection, both, new keys; replays of a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import openmla
from gpu.on_device import on_gpu
from indexer import cases, on_device

pytestmark = on_gpu
FAMILIES = ["hopper", "portable"]


def available(backend: str) -> str:
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    return backend


@pytest.mark.parametrize("backend", FAMILIES)
@pytest.mark.parametrize("part", ["scores", "select", "topk", "kept", "mask"])
def test_right(part: str, backend: str) -> None:
    assert list(on_device.CHECKS[part](available(backend))) == []


def test_new_keys_have_the_bytes_of_the_cpu() -> None:
    assert list(on_device.append("")) == []


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_a_graph_replays_with_other_lengths(backend: str) -> None:
    """No host reads: what is captured follows the lengths of the replay."""
    case = cases.paged([20], [4000], heads=64, page_size=64)
    arguments = on_device.on_gpu((case.q, case.keys, case.weights))
    options = on_device.on_gpu(case.options) | {"backend": backend, "rows": "relative"}
    out = torch.zeros(20, 512, dtype=torch.int32, device="cuda")
    openmla.index_topk(*arguments, 512, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        openmla.index_topk(*arguments, 512, **options, out=out)
    for length in (4000, 1700, 300):
        options["cache_lengths"].fill_(length)
        graph.replay()
        replayed = out.clone()
        want = openmla.index_topk(*arguments, 512, **options)
        assert torch.equal(replayed, want)
