"""Check and time DSA's indexer on an H200: scores, selection, both, masked and whole steps.

PYTHONPATH=src python benchmarks/device/indexer_h200.py --out DIR [--section check|scores|fp4|…]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sections import Section, run

import openmla
from openmla import IndexCache, LatentCache
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.indexer.ops import windows_of, write
from openmla.lab.bench.gpu_timing import graph_of, race
from openmla.lab.testing.indexer import score_problems
from openmla.planning import plan
from openmla.planning.form import LayerDims, choose_form

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
E4M3 = torch.float8_e4m3fn
REPLAYS = 1000


def check(group: str, _: int) -> Iterator[dict[str, Any]]:
    """What tests/gpu/test_indexer.py checks."""
    from indexer import on_device

    part, backend = group.split("-")
    yield {"check": group, "problems": list(on_device.CHECKS[part](backend))}


def scaled_mm(n: int = 8192) -> Callable[[], object]:
    a = torch.randn(n, n, device="cuda").to(E4M3)
    b = torch.randn(n, n, device="cuda").to(E4M3).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


class Inputs:
    """Queries and keys, contiguous and in shuffled pages; the last query sees every key."""

    def __init__(self, total_q: int, keys: int, heads: int, page: int = 64) -> None:
        self.q = torch.randn(total_q, heads, 128, device="cuda").to(E4M3)
        self.weights = torch.randn(total_q, heads, device="cuda")
        self.k = torch.randn(keys, 128, device="cuda").to(E4M3)
        self.k_scale = torch.rand(keys, device="cuda") + 0.5
        self.starts = torch.zeros(total_q, dtype=torch.int32, device="cuda")
        self.ends = torch.arange(keys - total_q + 1, keys + 1, dtype=torch.int32, device="cuda")
        order = torch.randperm(keys // page, device="cuda")
        self.cache = IndexCache.allocate(num_pages=keys // page, page_size=page, device="cuda")
        values = self.k.view(torch.uint8).view(-1, page, 128)
        self.cache.values_view.view(torch.uint8)[order] = values
        self.cache.scales_view[order] = self.k_scale.view(-1, page)
        self.paging = {
            "cu_seqlens_q": torch.tensor([0, total_q], dtype=torch.int32, device="cuda"),
            "block_table": order[None].int().contiguous(),
            "cache_lengths": torch.tensor([keys], dtype=torch.int32, device="cuda"),
        }
        self.pairs = float(self.ends.double().sum())

    def operands(self) -> ScoresOperands:
        keys = self.k, self.k_scale
        return ScoresOperands(self.q, self.weights, keys, Windows(self.starts, self.ends))

    def contiguous(self, out: torch.Tensor) -> object:
        given = {"starts": self.starts, "ends": self.ends, "out": out}
        return openmla.indexer_scores(self.q, (self.k, self.k_scale), self.weights, **given)

    def paged(self, out: torch.Tensor) -> object:
        return openmla.indexer_scores(self.q, self.cache, self.weights, **self.paging, out=out)


def prepared(operands: Any, results: Any, **changes: int) -> Callable[[], object]:
    """The Hopper kernel with other numbers than planned, without the host's share."""
    from openmla.kernels.hopper.indexer.launch import calls

    chosen = plan(operands.problem(results), "h200", "hopper")
    config = replace(chosen.config, **changes)
    (call,) = calls(replace(chosen, config=config), operands, results)
    return call.run


SCORES = {
    "2048x8192 h64": (2048, 8192, 64),
    "4096x65536 h64": (4096, 65536, 64),
    "128x1048576 h32": (128, 1 << 20, 32),
}
SCORES_VARIANTS = {
    "3 consumers": {"consumers": 3},
    "chunk 1024": {"chunk": 1024},
    "chunk 4096": {"chunk": 4096},
}


def scores(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    total_q, keys, heads = SCORES[group]
    x = Inputs(total_q, keys, heads)
    out, other = (torch.empty(total_q, keys, device="cuda") for _ in range(2))
    contestants = {
        "scaled_mm": scaled_mm(),
        "contiguous": lambda: x.contiguous(out),
        "paged": lambda: x.paged(other),
    }
    spare = torch.empty_like(out)
    contestants |= {n: prepared(x.operands(), spare, **c) for n, c in SCORES_VARIANTS.items()}
    timings = race(contestants, rounds)
    flops = dict.fromkeys(contestants, 2 * heads * 128 * x.pairs) | {"scaled_mm": 2 * 8192**3}
    tflops = {n: flops[n] / t.median / 1e9 for n, t in timings.items()}
    inside = torch.arange(keys, device="cuda")[None] < x.ends[:64, None]
    yield {
        "shape": group,
        "ms": {n: t.median for n, t in timings.items()},
        "back_to_back_ms": {n: t.back_to_back for n, t in timings.items()},
        "tflops": tflops,
        "of_scaled_mm": {n: v / tflops["scaled_mm"] for n, v in tflops.items()},
        "pages_equal_contiguous": bool(torch.equal(out[:64][inside], other[:64][inside])),
    }


FP4 = {
    "2048 of 8192, h64": (1, 2048, 8192, 64),
    "2048 of 8192, h32": (1, 2048, 8192, 32),
    "4096 of 65536, h64": (1, 4096, 65536, 64),
    "b128x1 of 32768, h64": (128, 1, 32768, 64),
    "b128x1 of 32768, h32": (128, 1, 32768, 32),
    "b128x1 of 8192, h64": (128, 1, 8192, 64),
    "b64x2 of 8192, h64": (64, 2, 8192, 64),
    "b16x1 of 32768, h64": (16, 1, 32768, 64),
}
"""Requests, queries of each, keys of each, heads."""


def fp4(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Scores over FP4 keys beside those over e4m3 ones, in graphs; of the rows that match."""
    rows = {name: row for name, row in FP4.items() if re.search(group, name)}
    for name, (requests, each, keys, heads) in rows.items():
        pages = requests * keys // 64
        table = torch.randperm(pages, device="cuda").int().view(requests, -1)
        lengths = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
        cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * each
        q = torch.randn(requests * each, heads, 128, device="cuda").to(E4M3)
        weights = torch.randn(requests * each, heads, device="cuda")
        paging = {"cu_seqlens_q": cu, "block_table": table, "cache_lengths": lengths}
        calls, outs = {}, {}
        for scales in ("ue8m0", "mxfp4"):
            cache = IndexCache.allocate(num_pages=pages, scales=scales, device="cuda")
            for first in range(0, pages * 64, 1 << 19):
                slots = torch.arange(first, min(first + (1 << 19), pages * 64), device="cuda")
                k = torch.randn(len(slots), 128, device="cuda")
                cache.append(k, slots)
            outs[scales] = torch.zeros(requests * each, keys, device="cuda")
            given = {**paging, "out": outs[scales]}
            calls[scales] = graph_of(partial(openmla.indexer_scores, q, cache, weights, **given))
        found = windows_of(cu, lengths, requests * each)
        write(found, q.device)
        op = ScoresOperands(q, weights, cache, found.seen, table)
        problems = []
        for row in (0, requests * each - 1):
            part = found.seen.part(row, row + 1)
            one = ScoresOperands(q[row : row + 1], weights[row : row + 1], cache, part, table)
            values = replace(one, windows=replace(part, requests=None))
            problems += score_problems(values, outs["mxfp4"][row : row + 1], 0.0)
        timings = race(calls, rounds)
        us = {n: round(1e3 * t.median, 1) for n, t in timings.items()}
        yield {
            "fp4": name,
            "us": us,
            "in_a_row_us": {n: round(1e3 * t.back_to_back, 1) for n, t in timings.items()},
            "fp8_over_fp4": round(us["ue8m0"] / us["mxfp4"], 3),
            "problems": problems,
        }
        del calls, outs, op, cache
        torch.cuda.empty_cache()


SELECT = {
    "131072": ("random", "equal", "zeros", "narrow", "coarse", "ascending", "descending"),
    "32768": ("random", "zeros"),
    "8192": ("random", "equal", "zeros", "coarse", "ascending"),
}
SELECT_VARIANTS = {
    False: {"80 registers": {"max_registers": 80}, "128 registers": {"max_registers": 128}},
    True: {"8 warps": {"warps": 8}, "2 stages": {"stages": 2}, "4 stages": {"stages": 4}},
}
"""By whether rows are long."""


def rows_of(kind: str, rows: int, width: int) -> torch.Tensor:
    """Rows like those of tests/indexer/cases.py, made on the GPU."""
    x = torch.randn(rows, width, device="cuda")
    if kind == "equal":
        x.fill_(1.5)
    elif kind == "zeros":
        x = torch.where(x > 2.6, x, 0.0 * x)
    elif kind == "narrow":
        x.mul_(1e-3).add_(100)
    elif kind == "coarse":
        x.mul_(4).round_().div_(4)
    elif kind in ("ascending", "descending"):
        x = x.sort(-1, descending=kind == "descending").values
    return x


def select(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    width, rows, topk = int(group), 4096, 2048
    randomly = 0.0
    for kind in SELECT[group]:
        x = rows_of(kind, rows, width)
        out = torch.empty(rows, topk, dtype=torch.int32, device="cuda")
        contestants: dict[str, Callable[[], object]] = {
            "select_topk": lambda x=x, out=out: openmla.select_topk(x, topk, out=out)
        }
        if kind == "random":
            full = torch.full((rows,), width, dtype=torch.int32, device="cuda")
            op = SelectOperands(x, topk, Windows(torch.zeros_like(full), full))
            spare = SelectResults(torch.empty_like(out))
            contestants |= {
                "torch.topk": lambda x=x: torch.topk(x, topk, -1, sorted=False),
                "one read": lambda x=x: x.amax(-1),
                "portable": lambda x=x: openmla.select_topk(x, topk, backend="portable"),
                "with mask": lambda x=x, out=out: openmla.select_topk(
                    x, topk, out=out, return_mask=True
                ),
            }
            variants = SELECT_VARIANTS[width > 8192]
            contestants |= {n: prepared(op, spare, **c) for n, c in variants.items()}
        timings = race(contestants, rounds if kind == "random" else 5)
        ms = {n: t.median for n, t in timings.items()}
        randomly = ms["select_topk"] if kind == "random" else randomly
        result = {
            "rows": f"{rows} x {width} {kind}",
            "ms": ms,
            "of_random": ms["select_topk"] / randomly,
        }
        if kind == "random":
            openmla.select_topk(x, topk, out=out)
            want = torch.topk(x[:64], topk, -1).indices.sort(-1).values.int()
            result["times_torch_topk"] = ms["torch.topk"] / randomly
            result["equals_torch_topk"] = bool(torch.equal(out[:64], want))
            result["replays_equal"] = replays_equal(x, topk)
        yield result
        del x


def replays_equal(x: torch.Tensor, topk: int) -> bool:
    """1,000 replays of a selection with many ties, bit for bit."""
    few = x[:264].clone()
    few[::2] = few[::2].mul_(4).round_().div_(4)
    out = torch.empty(few.shape[0], topk, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    openmla.select_topk(few, topk, out=out)
    with torch.cuda.graph(graph):
        openmla.select_topk(few, topk, out=out)
    graph.replay()
    first, different = out.clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        out.zero_()
        graph.replay()
        different += (out != first).sum()
    return int(different) == 0


def both(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """index_topk against its scores alone, and the memory it takes beside the result."""
    total_q, keys, heads = (int(n) for n in group.split("x"))
    x = Inputs(total_q, keys, heads)
    out = torch.empty(total_q, 2048, dtype=torch.int32, device="cuda")
    step = max((512 << 20) // (4 * keys), 1)
    buffers = [torch.empty(min(step, total_q), keys, device="cuda")]

    def whole() -> object:
        return openmla.index_topk(x.q, x.cache, x.weights, 2048, **x.paging, out=out)

    def alone() -> None:
        """Scores of these chunks, without selecting."""
        for first in range(0, total_q, step):
            rows = slice(first, first + step)
            openmla.indexer_scores(
                x.q[rows],
                (x.k, x.k_scale),
                x.weights[rows],
                starts=x.starts[rows],
                ends=x.ends[rows],
                out=buffers[0][: x.q[rows].shape[0]],
            )

    timings = race({"index_topk": whole, "scores": alone}, rounds)
    buffers.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    whole()
    torch.cuda.synchronize()
    ms = {n: t.median for n, t in timings.items()}
    yield {
        "index_topk": group,
        "ms": ms,
        "of_scores": ms["index_topk"] / ms["scores"],
        "extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }


def masked(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Dense prefill under a mask: against none, and against sparse prefill of the selection."""
    heads, tokens = int(group), 8192
    scores = torch.randn(tokens, tokens, device="cuda")
    ends = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
    rows, mask = openmla.select_topk(scores, 2048, ends=ends, return_mask=True)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = torch.randn(tokens, heads, 192, **make), torch.randn(tokens, heads, 128, **make)
    rope, v = torch.randn(tokens, 64, **make), torch.randn(tokens, heads, 128, **make)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    wide, kv = torch.randn(tokens, heads, 576, **make), torch.randn(tokens, 576, **make)
    contestants = {
        "plain": lambda: openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu),
        "sparse": lambda: openmla.mla_prefill_sparse(wide, kv, rows, scale=0.07),
    }
    try:
        openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, key_mask=mask)
        contestants["masked"] = lambda: openmla.mla_prefill(
            q, k, rope, v, cu_seqlens_q=cu, key_mask=mask
        )
    except openmla.Unsupported as error:
        yield {"masked": group, "refused": str(error)}
    ms = {n: t.median for n, t in race(contestants, rounds).items()}
    result: dict[str, Any] = {"key_mask": f"{heads} heads, causal 1x{tokens}", "ms": ms}
    if "masked" in ms:
        result["of_plain"] = ms["plain"] / ms["masked"]
        result["times_sparse"] = ms["sparse"] / ms["masked"]
    yield result


def step(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One layer's DSA step of DeepSeek-V3.2, in both forms: selected rows, or all keys masked."""
    heads, total_q, keys = (int(n) for n in group.split("x"))
    topk, x = 2048, Inputs(total_q, keys, 64)
    cache = LatentCache.allocate(num_pages=keys // 64, page_size=64, device="cuda")
    cache.data.normal_()
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q, narrow = torch.randn(total_q, heads, 576, **make), torch.randn(total_q, heads, 192, **make)
    rows = torch.empty(total_q, topk, dtype=torch.int32, device="cuda")
    buffer = torch.empty(total_q, keys, device="cuda")
    latent, rope = cache.data.view(keys, 576).split([512, 64], dim=1)
    expand = torch.randn(512, heads * 256, **make)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (total_q, keys))
    kv = (latent @ expand).view(keys, heads, 256)
    _, mask = openmla.index_topk(x.q, x.cache, x.weights, topk, **x.paging, return_mask=True)
    contestants = {
        "scores": lambda: x.paged(buffer),
        "selection": lambda: openmla.select_topk(buffer, topk, ends=x.ends, out=rows),
        "index_topk": lambda: openmla.index_topk(
            x.q, x.cache, x.weights, topk, **x.paging, out=rows
        ),
        "index_topk with mask": lambda: openmla.index_topk(
            x.q, x.cache, x.weights, topk, **x.paging, out=rows, return_mask=True
        ),
        "sparse attention": lambda: openmla.mla_prefill_sparse(q, cache, rows, scale=0.07),
        "expansion": lambda: latent @ expand,
        "masked attention": lambda: openmla.mla_prefill(
            narrow,
            kv[..., :128],
            rope.contiguous(),
            kv[..., 128:],
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            key_mask=mask,
        ),
    }
    ms = {n: t.median for n, t in race(contestants, rounds).items()}
    forms = {
        "sparse": ("index_topk", "sparse attention"),
        "masked": ("index_topk with mask", "expansion", "masked attention"),
    }
    totals = {form: sum(ms[n] for n in parts) for form, parts in forms.items()}
    shares = {form: {n: ms[n] / totals[form] for n in parts} for form, parts in forms.items()}
    dims = LayerDims(512, 128, 64, 128)
    planned = choose_form(dims, [total_q], [keys], topk, heads).reason
    name = f"V3.2, {total_q} of {keys}, {heads} heads"
    yield {"step": name, "ms": ms, "totals": totals, "shares": shares, "planned": planned}


def line(r: dict[str, Any]) -> str:
    return json.dumps(r, default=str)


CHECKS = (
    "scores-hopper",
    "scores-portable",
    "select-hopper",
    "select-portable",
    "topk-hopper",
    "topk-portable",
    "append-portable",
    "fp4-hopper",
    "fp4-portable",
    "mask-hopper",
    "mask-portable",
)
STEPS = ("128x4096x32768", "16x4096x32768", "128x8192x8192", "16x8192x8192")

if __name__ == "__main__":
    run(
        __file__,
        {
            "check": Section(check, 60, CHECKS, side_by_side=True),
            "scores": Section(scores, 25, tuple(SCORES)),
            "fp4": Section(fp4, 60),
            "select": Section(select, 30, tuple(SELECT)),
            "both": Section(both, 30, ("4096x131072x64",)),
            "masked": Section(masked, 30, ("128", "16")),
            "step": Section(step, 60, STEPS),
        },
        line,
    )
