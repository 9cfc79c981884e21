"""torch.compile(mode="reduce-overhead") on a GPU: warmed up, recorded and replayed as CUDA graphs.

torch runs a function once in a memory pool of its own, and refuses one that leaves memory behind
there: kernels that draw their work from a counter must keep it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import openmla
from gpu.on_device import DEVICE, normal, offsets, on_gpu
from indexer import cases
from indexer.on_device import on_gpu as moved
from openmla import IndexCache, LatentCache, cached
from openmla.kernels import call

pytestmark = on_gpu
Results = tuple[Tensor, ...]
ROUNDS = 6  # one warms up, one records, the others replay


def whole_prompts(q: Tensor, k: Tensor, rope: Tensor, v: Tensor, cu: Tensor) -> Results:
    """Several dense calls, the last of which reads what the first computed."""
    first, lse = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, return_lse=True)
    full = openmla.mla_prefill(q * 0.5, k, rope, v, cu_seqlens_q=cu, causal=False)
    return first, lse, full, openmla.mla_prefill(q, k, rope, first, cu_seqlens_q=cu)


def prompts() -> tuple[Tensor, ...]:
    cut = int(torch.randint(1, 400, ()))
    widths = (192, 128, 128)
    q, k, v = (normal(400, 16, width) for width in widths)
    return q, k, normal(400, 64), v, offsets(cut, 400 - cut)


def fp8_prompts(q: Tensor, k: Tensor, rope: Tensor, v: Tensor, cu: Tensor) -> Results:
    """Queries and keys, then values too, of 8 bits."""
    q8, q_scale = openmla.quantize(q)
    k8, rope8, k_scale = openmla.quantize(k, rope)
    v8, _ = openmla.quantize(v)
    options: dict[str, Any] = {"cu_seqlens_q": cu, "q_scale": q_scale, "k_scale": k_scale}
    return (
        openmla.mla_prefill(q8, k8, rope8, v, **options),
        openmla.mla_prefill(q8, k8, rope8, v8, **options),
    )


def a_prefix(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Results:
    """Latent calls, over rows of a cache."""
    cache = LatentCache(pages, None, 512, 64, "bf16")
    options: dict[str, Any] = {"cu_seqlens_q": cu, "scale": 0.05}
    first = openmla.mla_prefill_latent(q, cache, table, lengths, **options)
    return first, openmla.mla_prefill_latent(q * 0.5, cache, table, lengths, **options)


def prefixes() -> tuple[Tensor, ...]:
    table = torch.randperm(20, dtype=torch.int32, device=DEVICE).view(2, 10)
    lengths = torch.randint(70, 640, (2,), dtype=torch.int32, device=DEVICE)
    return normal(60, 16, 576), normal(20, 64, 576), table, lengths, offsets(40, 20)


def lists(q: Tensor, rows: Tensor, indices: Tensor, lengths: Tensor) -> Results:
    """Sparse calls that draw their work: lists of any length."""
    options: dict[str, Any] = {"topk_lengths": lengths, "scale": 0.05}
    first = openmla.mla_prefill_sparse(q, rows, indices, **options)
    return first, openmla.mla_prefill_sparse(q * 0.5, rows, indices, **options)


def listed() -> tuple[Tensor, ...]:
    indices = torch.randint(0, 900, (300, 130), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(0, 131, (300,), dtype=torch.int32, device=DEVICE)
    return normal(300, 64, 576), normal(900, 576), indices, lengths


def indexed(
    q: Tensor, keys: IndexCache, weights: Tensor, table: Tensor, lengths: Tensor, cu: Tensor
) -> Results:
    """Scores and selection, twice."""
    options: dict[str, Any] = {"cu_seqlens_q": cu, "block_table": table, "cache_lengths": lengths}
    first = openmla.index_topk(q, keys, weights, 512, **options)
    return first, openmla.index_topk(q, keys, -weights, 300, **options)


def index_queries() -> tuple[Any, ...]:
    seed = int(torch.randint(0, 1000, ()))
    case = cases.paged([20, 9], [4000, 1700], heads=64, page_size=64, seed=seed)
    names = ("block_table", "cache_lengths", "cu_seqlens_q")
    q, weights = cases.queries(29, 64, seed)
    return moved((q, case.keys, weights, *(case.options[name] for name in names)))


STEPS: dict[str, tuple[Callable[..., Results], Callable[[], tuple[Any, ...]]]] = {
    "dense": (whole_prompts, prompts),
    "dense, fp8": (fp8_prompts, prompts),
    "latent": (a_prefix, prefixes),
    "sparse": (lists, listed),
    "indexer": (indexed, index_queries),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """As in a new process: no counter, no cached launch, no compiled function."""
    torch.cuda.synchronize()
    cached.forget()
    call._counters.clear()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", STEPS)
def test_graphs_give_what_plain_calls_give(name: str) -> None:
    step, inputs = STEPS[name]
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for _ in range(ROUNDS):
        given = inputs()
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in compiled(*given)]
        for mine, want in zip(got, step(*given), strict=True):
            assert torch.equal(mine, want)
    assert counters["inductor"]["cudagraph_skips"] == 0


def trained(q: Tensor, k: Tensor, rope: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """Two dense calls, the second of the first one's output."""
    first, lse = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, return_lse=True)
    second = openmla.mla_prefill(q, k, rope, first, cu_seqlens_q=cu)
    return second.float().square().sum() + lse.sum()


def test_graphs_have_the_gradients_of_plain_calls() -> None:
    """Forward and backward passes are recorded by themselves."""
    compiled: Any = torch.compile(trained, mode="reduce-overhead", fullgraph=True)
    for _ in range(ROUNDS):
        *rows, cu = prompts()
        found = []
        for step in (compiled, trained):
            torch.compiler.cudagraph_mark_step_begin()
            given = [x.detach().requires_grad_() for x in rows]
            found.append([g.clone() for g in torch.autograd.grad(step(*given, cu), given)])
        for mine, want in zip(*found, strict=True):
            # Between the calls, inductor's own kernels add in an order of theirs.
            assert (mine.float() - want.float()).norm() <= 1e-2 * want.float().norm()
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_counter_outlives_the_pool_it_was_first_wanted_in() -> None:
    """Neither is it in a pool that its owner gives back, nor does a second stream share it."""
    q, k, rope, v, cu = prompts()
    pool = torch.cuda.MemPool()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu)
    torch.cuda.synchronize()
    places = {counter.data_ptr() for counter in call._counters.values()}
    assert len(places) == 2
    for segment in pool.snapshot():
        first, size = segment["address"], segment["total_size"]
        assert not any(first <= place < first + size for place in places)
