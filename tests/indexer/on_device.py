"""What the indexer does on a GPU, compared with the definition or with the CPU: problems in words.

Used by tests/gpu and, before anything is timed, by benchmarks/device/indexer_h200.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import openmla
from indexer import cases
from openmla import IndexCache, cached
from openmla.indexer import reference
from openmla.indexer.cache import quantize
from openmla.indexer.operands import ScoresOperands, Windows
from openmla.indexer.windows import paged_windows
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.indexer import BOUND, score_problems, selection_fits
from openmla.lab.testing.memory.poison import differences

UNWRITTEN = 12345.0


def on_gpu(value: Any) -> Any:
    """Tensors and caches, in tuples and dicts too, on the GPU."""
    if isinstance(value, dict):
        return {name: on_gpu(x) for name, x in value.items()}
    if isinstance(value, tuple):
        return tuple(on_gpu(x) for x in value)
    if isinstance(value, IndexCache):
        return IndexCache(value.data.cuda(), value.page_size, value.scales)
    return value.cuda() if isinstance(value, torch.Tensor) else value


def scores(backend: str) -> Iterator[str]:
    """Pages and pairs, windows of every kind, several heads; twice the same bits."""
    lens = (([5, 0, 40, 1], [300, 9, 5000, 129]), ([33], [2100]), ([1, 1, 1], [4100, 33, 1]))
    for (q_lens, k_lens), heads, page in (
        (lens[0], 64, 64),
        (lens[1], 32, 64),
        (lens[2], 64, 32),
        (lens[0], 128, 96),
    ):
        case = cases.paged(q_lens, k_lens, heads=heads, page_size=page)
        o = case.options
        width = o["block_table"].shape[1] * page
        windows = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
        op = ScoresOperands(case.q, case.weights, case.keys, windows, o["block_table"])
        arguments = on_gpu((case.q, case.keys, case.weights))
        yield from _scored(op, arguments, on_gpu(o), width, backend)
    for heads in (64, 32):
        q, weights = cases.queries(70, heads)
        g = torch.Generator().manual_seed(heads)
        ends = torch.randint(0, 9002, (2, 70), generator=g, dtype=torch.int32)
        starts, ends = ends.amin(0), ends.amax(0)
        starts[::7], ends[::7] = 5, 3
        keys = quantize(cases.keys(9001), "fp32")
        op = ScoresOperands(q, weights, keys, Windows(starts, ends))
        given = on_gpu({"starts": starts, "ends": ends})
        yield from _scored(op, on_gpu((q, keys, weights)), given, 9001, backend)


def fp4(backend: str) -> Iterator[str]:
    """FP4 keys in pages, also such whose exponents lie far apart: scores, the same selection in
    chunks, new keys as on the CPU."""
    lens = (
        ([5, 0, 40, 1], [300, 9, 5000, 129], 64, 64),
        ([33], [2100], 32, 128),
        ([1, 1, 1], [4100, 33, 1], 32, 64),
        ([1, 2, 2], [4100, 33, 2000], 64, 32),
        ([1] * 40, list(range(1, 4001, 100)), 128, 64),
        ([3, 7], [50, 260], 128, 32),
    )
    for (q_lens, k_lens, heads, page), share in itertools.product(lens, (0.0, 0.02, 1.0)):
        case = cases.paged(q_lens, k_lens, heads=heads, page_size=page, scales="mxfp4")
        cases.spread(case.keys, share)
        o = case.options
        width = o["block_table"].shape[1] * page
        windows = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
        op = ScoresOperands(case.q, case.weights, case.keys, windows, o["block_table"])
        arguments, given = on_gpu((case.q, case.keys, case.weights)), on_gpu(o)
        yield from _scored(op, arguments, given, width, backend)
        limits = (496 << 20, 30 * 4 * width)
        whole, few = (
            openmla.index_topk(*arguments, 500, **given, scores_limit=limit, backend=backend)
            for limit in limits
        )
        if not torch.equal(whole, few):
            yield f"{backend}, FP4 keys, {heads} heads: chunks change the selection"
    k = torch.randn(100, 128) * torch.logspace(-12, 12, 100)[:, None]
    k[3, 5], k[4], k[5, 60], k[6, :64] = torch.nan, -0.0, torch.inf, torch.arange(64) * 0.25 - 8
    slots = torch.randperm(128)[:100]
    slots[7] = -1
    host, device = (
        IndexCache.allocate(num_pages=2, scales="mxfp4", device=where) for where in ("cpu", "cuda")
    )
    host.append(k, slots)
    device.append(k.cuda(), slots.cuda())
    if not torch.equal(host.data, device.data.cpu()):
        yield "append mxfp4 differs"


def _scored(
    op: ScoresOperands, arguments: tuple, options: dict[str, Any], width: int, backend: str
) -> Iterator[str]:
    padded = -(-width // 4) * 4
    outs = [torch.full((op.q.shape[0], padded), UNWRITTEN, device="cuda") for _ in range(2)]
    for out in outs:
        openmla.indexer_scores(*arguments, **options, out=out, backend=backend)
    name = f"{backend} scores, {op.q.shape[1]} heads, {op.q.shape[0]} x {width}"
    if not torch.equal(*outs):
        yield f"{name}: two runs differ"
    for problem in score_problems(op, outs[0].cpu(), UNWRITTEN):
        yield f"{name}: {problem}"


def select(backend: str) -> Iterator[str]:
    """Rows of every kind at real sizes, against the CPU."""
    for kind in cases.KINDS:
        for width, topk in ((8192, 2048), (40000, 500), (131072, 2048), (6000, 2048), (9000, 4096)):
            x = cases.scores_of(kind, 4, width)
            starts = torch.tensor([0, 3, 77, 9], dtype=torch.int32)
            ends = torch.tensor([width, width - 1, topk + 79, 5], dtype=torch.int32)
            wanted = {"return_counts": True, "return_mask": True}
            want = openmla.select_topk(x, topk, starts=starts, ends=ends, **wanted)
            got = openmla.select_topk(
                x.cuda(), topk, starts=starts.cuda(), ends=ends.cuda(), backend=backend, **wanted
            )
            for name, a, b in zip(("indices", "counts", "mask"), got, want, strict=True):
                if not torch.equal(a.cpu(), b):
                    rows = (a.cpu() != b).view(4, -1).any(1).nonzero().flatten().tolist()
                    yield f"{backend} select {kind} {width} top-{topk}: {name}, rows {rows}"


def topk(backend: str) -> Iterator[str]:
    """index_topk over pages, in chunks: right by its own scores' bound, and as physical rows."""
    case = cases.paged([40, 3, 60], [3000, 2, 5000], heads=64, page_size=64)
    o = case.options
    arguments, options = on_gpu((case.q, case.keys, case.weights)), on_gpu(o)
    options |= {"backend": backend, "return_counts": True}
    whole, counts = openmla.index_topk(*arguments, 500, **options, rows="relative")
    few, _ = openmla.index_topk(
        *arguments, 500, **options, rows="relative", scores_limit=30 * 4 * 5056
    )
    rows, _ = openmla.index_topk(*arguments, 500, **options)
    if not torch.equal(whole, few):
        yield f"{backend} index_topk: chunks change the selection"
    windows = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], 103)
    op = ScoresOperands(case.q, case.weights, case.keys, windows, o["block_table"])
    truth = reference.scores(op, torch.empty(103, o["block_table"].shape[1] * 64))
    for t in range(103):
        n = int(windows.ends[t])
        exact, bound = truth.scores[t, :n], BOUND * truth.magnitude[t, :n]
        if not selection_fits(whole[t].cpu(), exact, bound, 500) or int(counts[t]) != min(n, 500):
            yield f"{backend} index_topk: row {t} is not a selection of the best"
        p = whole[t, : min(n, 500)].cpu().long()
        pages = o["block_table"][int(windows.sequences[t])].long()
        if not torch.equal(pages[p // 64] * 64 + p % 64, rows[t, : p.shape[0]].cpu().long()):
            yield f"{backend} index_topk: physical rows of row {t}"


def kept(backend: str) -> Iterator[str]:
    """A launch that is kept gives other tensors the bits that the long way gives them."""
    lens = [40, 3], [3000, 2]
    made = [cases.paged(*lens, heads=64, page_size=64, seed=seed) for seed in range(2)]
    calls = {
        "indexer_scores": lambda x, o: openmla.indexer_scores(*x, **o, out=_unwritten(x[0], o)),
        "index_topk": lambda x, o: openmla.index_topk(*x, 500, **o),
        "select_topk": lambda x, o: openmla.select_topk(x[2], 16, backend=backend),
    }
    for name, call in calls.items():
        cached.forget()
        got, want = [], []
        for case in made:
            given = on_gpu((case.q, case.keys, case.weights))
            got.append(call(given, on_gpu(case.options) | {"backend": backend}))
        known = len(cached._launches)
        for case in made:
            cached.forget()
            given = on_gpu((case.q, case.keys, case.weights))
            want.append(call(given, on_gpu(case.options) | {"backend": backend}))
        if not known:
            yield f"{backend} {name}: no launch is kept"
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            yield f"{backend} {name}: a kept launch changes bits"


def _unwritten(q: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    width = options["block_table"].shape[1] * 64
    return torch.full((q.shape[0], width), UNWRITTEN, device=q.device)


def append(_: str) -> Iterator[str]:
    """New keys have the bytes they have on the CPU."""
    for scales in ("ue8m0", "fp32"):
        k = torch.randn(100, 128) * torch.logspace(-7, 6, 100)[:, None]
        k[3, 5], k[4] = torch.nan, 0
        slots = torch.randperm(128)[:100]
        slots[7] = -1
        host = IndexCache.allocate(num_pages=2, scales=scales)
        device = IndexCache.allocate(num_pages=2, scales=scales, device="cuda")
        host.append(k, slots)
        device.append(k.cuda(), slots.cuda())
        same = torch.equal(host.scales_view.nan_to_num(7), device.scales_view.cpu().nan_to_num(7))
        values = (c.values_view.float().cpu().nan_to_num(7) for c in (host, device))
        if not same or not torch.equal(*values):
            yield f"append {scales} differs"


V3 = Case("dense", 4, 128, 64, 128, q_lens=(200, 70), k_lens=(700, 300), spare=3)
MASKED = (
    replace(V3, key_mask="half"),
    replace(V3, key_mask="few", causal=False, sink="normal"),
    replace(V3, key_mask="half", rope="cache", kv="bf16", page_size=64),
    replace(V3, key_mask="half", heads=2, q_lens=(40,), k_lens=(9000,)),  # split
)
# Two stages of 128 such keys do not fit into Hopper's shared memory.
WIDE = replace(V3, key_mask="half", d_nope=192, d_v=256)


def mask(backend: str) -> Iterator[str]:
    """Dense prefill under a mask: the acceptance rule, and no mask where all bits are set."""
    for case in (*MASKED, WIDE) if backend == "portable" else MASKED:
        built = build(case, "cuda")
        first, again = built.run(backend), built.run(backend)
        yield from (f"{case}: {problem}" for problem in judge(build(case), first).problems)
        yield from (f"{case}, again: {problem}" for problem in differences(again, first))
    built = build(replace(V3, key_mask="all"), "cuda")
    plain = {name: x for name, x in built.arguments.items() if name != "key_mask"}
    everything = built.run(backend).out
    if not torch.equal(openmla.mla_prefill(**plain, backend=backend), everything):
        yield "a mask of all keys changes bits"


CHECKS = {
    "scores": scores,
    "fp4": fp4,
    "select": select,
    "topk": topk,
    "kept": kept,
    "append": append,
    "mask": mask,
}
