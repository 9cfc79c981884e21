"""Runs the portable kernel of two sources in Triton's interpreter, as a process of its own.

`TRITON_INTERPRET=1 python interpreted_attend.py` prints one line per case, "ok" or what is wrong.
Unused memory is NaN: rows that nobody names, entries past lengths, columns past V.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import product

import torch
from torch import Tensor

from kernels.portable import interpreter
from openmla import LatentCache, Listed, Span, reference
from openmla.kernels.portable import launch
from openmla.lab.testing.sources import SourcesCase, turn_back_of
from openmla.operands import AttendOperands, Results, Weights
from openmla.planning import plan

TOKENS = 7


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(format: str, page_size: int, generator: torch.Generator, used: Tensor) -> LatentCache:
    """Rows of 512 columns, those that are used written, all others NaN; pages with gaps."""
    made = LatentCache.allocate(num_pages=6, page_size=page_size + 1, rope=0, format=format)
    scales = None if made.scales is None else made.scales[:, :page_size]
    made = LatentCache(made.data[:, :page_size], scales, 512, 0, format)
    made.data.view(torch.uint8).fill_(0xFF)
    if scales is not None:
        scales.view(torch.uint8).fill_(0xFF)
    made.append(torch.randn(len(used), 512, generator=generator), None, used)
    return made


def listed(format: str, page_size: int, generator: torch.Generator) -> Listed:
    rows = 6 * page_size
    lists = torch.randint(0, rows, (TOKENS, 21), generator=generator).int()
    lists[torch.rand(TOKENS, 21, generator=generator) < 0.3] = -1
    lists[1] = i32(rows)
    lengths = i32(21, 21, 0, 17, -3, 40, 1)
    seen = [lists[t, : max(int(n), 0)] for t, n in enumerate(lengths)]
    used = torch.cat(seen).unique()
    used = used[(used >= 0) & (used < rows)].long()
    return Listed(cache(format, page_size, generator, used), lists, lengths)


def span(format: str, page_size: int, generator: torch.Generator) -> Span:
    table = torch.tensor([[5, 0, 2], [1, -1, 3], [7, 1, 0]], dtype=torch.int32)
    size = page_size
    request = i32(0, 0, 1, 2, -1, 3, 0)
    begin = i32(0, size - 1, -4, 0, 0, 0, -(2**31))
    end = i32(2, 2 * size + 1, 20 * size, 3 * size, 9, 9, 2**31 - 1)
    every = torch.arange(6 * size)
    made = Span(cache(format, size, generator, every), table, request, begin, end)
    used = torch.cat([made.seen(token) for token in range(TOKENS)]).unique()
    return Span(cache(format, size, generator, used), table, request, begin, end)


KINDS = {"list": listed, "span": span}
PAIRS = [("span", "list"), ("list", "span"), ("list", "list"), ("span", "span"), ("span", "")]
FORMATS = [("fp8_584", "fp8_584", 2), ("bf16", "fp8_584", 5), ("fp8_block64", "bf16", 8)]
CASES = [
    *((*pair, 0) for pair in product(PAIRS, FORMATS)),
    (("span", "list"), ("fp8_528_v41_split", "fp4_288_split", 4), 0),
    (("list", "span"), ("fp4_288", "fp8_528_v32", 2), 0),
    (("list", "list"), ("fp8_528_v41", "fp4_288", 5), 0),
    (("span", "list"), ("fp8_584", "fp8_584", 2), 64),
    (("list", ""), ("bf16", "", 5), 30),
    (("list", ""), ("fp8_584", "", 2), 512),
]


def check(kinds: tuple[str, str], formats: tuple[str, str, int], turned: int, seed: int) -> str:
    """What is wrong; empty if nothing is. turned: columns of results that are turned back."""
    generator = torch.Generator().manual_seed(seed)
    sizes = formats[2], 3
    pairs = zip(kinds, formats[:2], sizes, strict=True)
    sources = tuple(KINDS[k](f, size, generator) for k, f, size in pairs if k)
    q = torch.randn(TOKENS, 5, 512, generator=generator).bfloat16()
    sink = torch.tensor([0.5, -torch.inf, torch.inf, 3.0, 0.0])
    turn = None
    if turned:
        turn = turn_back_of(SourcesCase(first=(1,) * TOKENS, turned=turned, seed=seed), True)
    op = AttendOperands(q, sources, 512, Weights(0.05, sink), turn)
    out = torch.full((TOKENS, 5, 512), torch.nan, dtype=torch.bfloat16)
    results = Results(out, torch.full((TOKENS, 5), torch.nan))
    chosen = plan(op.problem(results), "h200", backend="portable")
    for call in launch.calls(chosen, op, results):
        call.run()
    truth = reference.of(op)
    error = (results.out.double() - truth.out).abs() - 0.02 * truth.magnitude
    assert results.lse is not None
    same = (results.lse == truth.lse) | ((results.lse - truth.lse).abs() < 2e-3)
    if not bool((error <= 1e-6).all()):
        return f"out is off by {float(error.max())}"
    if not bool(same.all()):
        return f"lse is off: {results.lse} {truth.lse}"
    empty = truth.keys == 0
    if not bool(empty.any()) or bool(results.out[empty].view(torch.int16).any()):
        return "rows without keys are not +0, or there are none"
    return ""


def main() -> int:
    interpreter.repair()
    if len(sys.argv) > 1:  # the kernel of another file
        spec = importlib.util.spec_from_file_location("changed_attend", sys.argv[1])
        assert spec is not None and spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed)
        launch.attend_kernel = changed.attend_kernel
    failed = 0
    for seed, (kinds, formats, turned) in enumerate(CASES):
        wrong = check(kinds, formats, turned, seed)
        failed += bool(wrong)
        print(*kinds, *formats, turned, wrong or "ok", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
