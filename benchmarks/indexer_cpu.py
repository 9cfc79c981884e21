"""Time DSA's four calls on a CPU against the formula in plain torch, 1024 queries of 4096 keys.

OMP_WAIT_POLICY=PASSIVE PYTHONPATH=src python benchmarks/indexer_cpu.py --out FILE.json

PASSIVE, because on a busy machine threads that spin for one another cost more than what they do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import openmla
from openmla.indexer.cache import quantize
from openmla.lab.bench.provenance import provenance
from openmla.lab.bench.timing import Contestant, race

QUERIES, KEYS, HEADS, TOPK = 1024, 4096, 64, 2048
AT_ONCE = 64  # queries of the plain formula: [64, 64 heads, 4096 keys] fp32 are 64 MiB
Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def plain_scores(q: Tensor, k: Tensor, scale: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    out = torch.full((q.shape[0], k.shape[0]), -torch.inf)
    for at in range(0, q.shape[0], AT_ONCE):
        rows = slice(at, at + AT_ONCE)
        dots = torch.einsum("thd,sd->ths", q[rows].float(), k.float()).relu_()
        out[rows] = torch.einsum("ths,th->ts", dots, w[rows]) * scale
    return out.masked_fill_(torch.arange(k.shape[0]) >= ends[:, None], -torch.inf)


def plain_select(scores: Tensor, ends: Tensor) -> Tensor:
    """Positions in order, -1 where a row has fewer; ties are torch's."""
    values, positions = torch.topk(scores, TOPK, -1)
    positions = torch.where(values == -torch.inf, scores.shape[1], positions).sort(-1).values
    return torch.where(positions == scores.shape[1], -1, positions)


def plain_masked(q: Tensor, k: Tensor, rope: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    whole = torch.cat([k, rope[:, None].expand(-1, k.shape[1], -1)], -1)
    dots = torch.einsum("thd,shd->hts", q, whole) * q.shape[-1] ** -0.5
    weights = dots.masked_fill_(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def calls() -> Calls:
    q = torch.randn(QUERIES, HEADS, 128).to(torch.float8_e4m3fn)
    w = torch.randn(QUERIES, HEADS)
    cache = openmla.IndexCache.allocate(num_pages=KEYS // 64)
    k, scale = quantize(torch.randn(KEYS, 128), "ue8m0")
    cache.values_view.view(torch.uint8).copy_(k.view(torch.uint8).view(-1, 64, 128))
    cache.scales_view.copy_(scale.view(-1, 64))
    starts = torch.zeros(QUERIES, dtype=torch.int32)
    ends = torch.arange(KEYS - QUERIES + 1, KEYS + 1, dtype=torch.int32)
    paging = {
        "cu_seqlens_q": torch.tensor([0, QUERIES], dtype=torch.int32),
        "block_table": torch.arange(KEYS // 64, dtype=torch.int32)[None],
        "cache_lengths": torch.tensor([KEYS], dtype=torch.int32),
    }
    scores = plain_scores(q, k, scale, w, ends)
    _, mask = openmla.select_topk(scores, TOPK, ends=ends, return_mask=True)
    seen = (mask[:, :, None] >> torch.arange(32)).bitwise_and_(1).view(QUERIES, -1)[:, :KEYS] > 0
    heads = 16  # of the attention
    dense = (
        torch.randn(QUERIES, heads, 192),
        torch.randn(KEYS, heads, 128),
        torch.randn(KEYS, 64),
        torch.randn(KEYS, heads, 128),
    )
    lens = {
        "cu_seqlens_q": paging["cu_seqlens_q"],
        "cu_seqlens_k": torch.tensor([0, KEYS], dtype=torch.int32),
    }
    return {
        "indexer_scores": (
            lambda: openmla.indexer_scores(q, (k, scale), w, starts=starts, ends=ends),
            lambda: plain_scores(q, k, scale, w, ends),
        ),
        "select_topk": (
            lambda: openmla.select_topk(scores, TOPK, ends=ends),
            lambda: plain_select(scores, ends),
        ),
        "index_topk": (
            lambda: openmla.index_topk(q, cache, w, TOPK, **paging, rows="relative"),
            lambda: plain_select(plain_scores(q, *cache_keys(cache), w, ends), ends),
        ),
        "mla_prefill(key_mask=)": (
            lambda: openmla.mla_prefill(*dense, **lens, key_mask=mask),
            lambda: plain_masked(*dense, seen),
        ),
    }


def cache_keys(cache: openmla.IndexCache) -> tuple[Tensor, Tensor]:
    return cache.gather(torch.arange(KEYS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = {}
    for name, (ours, plain) in calls().items():
        found = race([Contestant("openmla", ours), Contestant("plain", plain)], options.rounds)
        seconds = {n: t.seconds for n, t in found.items()}
        rows[name] = {"seconds": seconds, "times_plain": seconds["plain"] / seconds["openmla"]}
        print(name, rows[name], flush=True)
    if options.out:
        shape = f"{QUERIES} queries of {KEYS} keys, {HEADS} index heads, {options.threads} threads"
        record = {
            **provenance("python benchmarks/indexer_cpu.py", gpu=False),
            "shape": shape,
            "calls": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
