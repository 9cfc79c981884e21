"""Time `mla_attend` on a CPU: the last 512 tokens of a prompt of 8192, one request, one thread.

PYTHONPATH=src python benchmarks/attend_cpu.py --out FILE.json

Layers of DeepSeek-V4 and V4.1: a window of 128 rows, alone or beside 512 of the prompt's compressed
rows, chosen at random. Peers: the same rows named by lists, and the formula in plain torch, over
rows that are dequantized before its time begins. Contestants take turns, and seconds are those that
the thread computes, so that other processes of a shared machine are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

import openmla
from openmla import LatentCache, Listed, Span
from openmla.formats import FormatName
from openmla.lab.bench.provenance import provenance
from openmla.lab.bench.timing import Contestant

PROMPT, QUERIES, WINDOW, RATIO, CHOSEN, WIDTH = 8192, 512, 128, 4, 512, 512
AT_ONCE = 64  # queries of the plain formula: their rows are 80 MiB in fp32
CASES: tuple[tuple[FormatName, FormatName | None], ...] = (
    ("bf16", None),
    ("fp8_584", None),
    ("fp8_584", "fp8_584"),
    ("fp8_528_v41", "fp4_288"),
)
"""Formats of the window's rows and of the compressed ones."""


def a_cache(format: FormatName, rows: int, page_size: int) -> LatentCache:
    pages = rows // page_size
    cache = LatentCache.allocate(
        num_pages=pages, page_size=page_size, latent=WIDTH, rope=0, format=format
    )
    cache.append(torch.randn(rows, WIDTH), None, torch.arange(rows))
    return cache


def plain(q: Tensor, tables: list[Tensor], lists: list[Tensor], scale: float) -> Tensor:
    """Attention over rows that each query names in several tables."""
    out = torch.empty_like(q)
    for at in range(0, q.shape[0], AT_ONCE):
        some = slice(at, at + AT_ONCE)
        pairs = zip(tables, lists, strict=True)
        rows = torch.cat([table[listed[some]] for table, listed in pairs], 1)
        scores = torch.einsum("thd,tnd->thn", q[some].float(), rows) * scale
        out[some] = torch.einsum("thn,tnd->thd", scores.softmax(-1), rows).to(q.dtype)
    return out


def contestants(
    heads: int, window_format: FormatName, row_format: FormatName | None
) -> list[Contestant]:
    scale = WIDTH**-0.5
    q = torch.randn(QUERIES, heads, WIDTH).bfloat16()
    tokens = torch.arange(PROMPT - QUERIES, PROMPT, dtype=torch.int32)
    window = a_cache(window_format, PROMPT, 64)
    table = torch.randperm(window.num_pages).int()[None]
    span = Span(window, table, torch.zeros_like(tokens), tokens - WINDOW + 1, tokens + 1)
    positions = tokens[:, None] - WINDOW + 1 + torch.arange(WINDOW, dtype=torch.int32)
    physical = table[0][(positions // 64).long()] * 64 + positions % 64
    sources: list[Listed | Span] = [span]
    by_lists = [Listed(window, physical)]
    if row_format:
        rows = PROMPT // RATIO
        chosen = torch.stack([torch.randperm(rows)[:CHOSEN] for _ in range(QUERIES)]).int()
        by_lists.append(Listed(a_cache(row_format, rows, 64 // RATIO), chosen))
        sources.append(by_lists[1])
    tables = [listed.read(torch.arange(listed.count)).float() for listed in by_lists]
    numbers = [listed.indices.long() for listed in by_lists]
    ours = openmla.mla_attend(q, sources, scale=scale)
    assert torch.equal(ours, openmla.mla_attend(q, by_lists, scale=scale))
    torch.testing.assert_close(ours, plain(q, tables, numbers, scale), atol=2e-3, rtol=2e-2)
    return [
        Contestant("openmla", lambda: openmla.mla_attend(q, sources, scale=scale)),
        Contestant("the same rows by lists", lambda: openmla.mla_attend(q, by_lists, scale=scale)),
        Contestant("torch gather + einsum, fp32 rows", lambda: plain(q, tables, numbers, scale)),
    ]


def measured(
    heads: int, window_format: FormatName, row_format: FormatName | None, rounds: int
) -> dict[str, object]:
    running = contestants(heads, window_format, row_format)
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in running}
    for _ in range(rounds):
        for contestant in running:
            before = time.thread_time()
            contestant.run()
            samples[contestant.name].append(time.thread_time() - before)
    seconds = {name: statistics.median(found) for name, found in samples.items()}
    ours = seconds.pop("openmla")
    more = f" and {CHOSEN} of {PROMPT // RATIO} rows" if row_format else ""
    return {
        "case": f"{heads} heads, window of {WINDOW}{more}",
        "dtype": " + ".join(name for name in (window_format, row_format) if name),
        "seconds": ours,
        "peers": [
            {"name": name, "seconds": peer, "times_faster": peer / ours}
            for name, peer in seconds.items()
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for formats in CASES:
        for heads in (8, 64):
            rows.append(measured(heads, *formats, options.rounds))
            print(rows[-1], flush=True)
    if options.out:
        record = {
            **provenance("python benchmarks/attend_cpu.py", gpu=False),
            "shape": f"{QUERIES} queries; seconds of the one thread, other processes not counted",
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
