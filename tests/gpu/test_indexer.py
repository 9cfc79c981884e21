"""The indexer on a GPU: scores, selection, both, new keys; replays of a CUDA graph."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import openmla
from gpu.on_device import on_gpu
from indexer import cases, on_device
from openmla.dispatch import plan_call
from openmla.indexer.groups import expand_pools, select_blocks, select_in_blocks
from openmla.indexer.operands import ScoresOperands
from openmla.indexer.ops import windows_of, write
from openmla.indexer.windows import paged_windows
from openmla.kernels.launch import launch
from openmla.lab.testing.indexer import score_problems

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


def test_pools_and_blocks_are_those_of_the_cpu() -> None:
    scores, others = (cases.scores_of(kind, 40, 700) for kind in ("random", "coarse"))
    ends = torch.arange(661, 701, dtype=torch.int32)
    found = []
    for device in ("cpu", "cuda"):
        x, y, seen = scores.to(device), others.to(device), ends.to(device)
        blocks = select_blocks(x, 20, ends=seen)
        pools = openmla.select_topk(x, 30, ends=seen // 4)
        lists = blocks, select_in_blocks(y, blocks, 50, ends=seen), expand_pools(pools, seen, 4)
        found.append([rows.cpu() for rows in lists])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", FAMILIES)
def test_fp4_keys(backend: str) -> None:
    assert list(on_device.fp4(available(backend))) == []


@pytest.mark.parametrize("scales", ["ue8m0", "mxfp4"])
@pytest.mark.parametrize(("requests", "queries"), [(7, 1), (128, 1), (300, 1), (33, 2)])
def test_scores_of_few_queries_have_the_bits_of_many(
    requests: int, queries: int, scales: str
) -> None:
    """The kernel that finds its windows itself, against the one that shares keys among queries."""
    available("hopper")
    rng = random.Random(requests)
    lengths = [rng.randint(queries, 3000) for _ in range(requests)]
    case = cases.paged([queries] * requests, lengths, heads=64, page_size=64, scales=scales)
    if scales == "mxfp4":
        cases.spread(case.keys)
    q, keys, weights = on_device.on_gpu((case.q, case.keys, case.weights))
    o = on_device.on_gpu(case.options)
    found = windows_of(o["cu_seqlens_q"], o["cache_lengths"], q.shape[0])
    op = ScoresOperands(q, weights, keys, found.seen, o["block_table"])
    width = o["block_table"].shape[1] * 64
    few, many = (torch.full((q.shape[0], width), on_device.UNWRITTEN, device="cuda") for _ in "ab")
    chosen = plan_call(op, few, "hopper")
    assert chosen.config.shared_queries == queries
    launch(chosen, op, few)
    write(found, q.device)
    sharing = {"shared_queries": 0, "consumers": 3 if scales == "mxfp4" else 4, "stages": 4}
    launch(replace(chosen, config=replace(chosen.config, **sharing)), op, many)
    assert torch.equal(few, many)
    assert score_problems(case_on_cpu(case), few.cpu(), on_device.UNWRITTEN) == []


def case_on_cpu(case: cases.Paged) -> ScoresOperands:
    o = case.options
    windows = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
    return ScoresOperands(case.q, case.weights, case.keys, windows, o["block_table"])


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
