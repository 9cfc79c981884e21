"""Runs the portable indexer in Triton's interpreter: `python interpreted_indexer.py PART`.

A process of its own with TRITON_INTERPRET=1, as interpreted.py. Prints a JSON line per problem, and
a last line with the counts.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import openmla.kernels.portable as package
from gluon_sim import unreserved
from indexer import cases
from kernels import index_boundaries
from kernels.boundaries import UnevenMemory
from kernels.far_memory import FarMemory
from kernels.mutants import load_mutant, once
from kernels.portable import interpreter
from kernels.wild_values import KINDS, make_wild
from openmla import IndexCache
from openmla.indexer import reference
from openmla.indexer.cache import MXFP4_BYTES, ROW_BYTES, quantize
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.indexer.windows import paged_windows
from openmla.kernels.portable.indexer import launch, windows
from openmla.lab.testing.indexer import score_problems
from openmla.lab.testing.memory.guard import EDGES, GuardedMemory
from openmla.planning import Plan, plan

UNWRITTEN = 12345.0


def plan_of(operands, results, target: str, **changes: int) -> Plan:
    chosen = plan(operands.problem(results), target, "portable")
    return replace(chosen, config=replace(chosen.config, **changes))


def run(
    operands, results, target: str = "h200", launch: ModuleType = launch, **changes: int
) -> None:
    for call in launch.calls(plan_of(operands, results, target, **changes), operands, results):
        call.run()


def scores() -> Iterator[list[str]]:
    """Pages in place, queries of several sequences, windows, odd head counts and strides."""
    lens = (([3, 0, 5, 1], [20, 6, 130, 2]), ([9], [70]), ([1, 1, 1], [40, 33, 1]))
    for (q_lens, k_lens), heads, page in product(lens, (3, 32, 64), (1, 16, 24)):
        case = cases.paged(q_lens, k_lens, heads=heads, page_size=page)
        o = case.options
        where = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
        op = ScoresOperands(case.q, case.weights, case.keys, where, o["block_table"])
        out = torch.full((case.q.shape[0], o["block_table"].shape[1] * page), UNWRITTEN)
        run(op, out, "a100" if page == 16 else "h200", chunk=64, BN=32)
        yield [
            f"{q_lens}, {heads} heads, page {page}: {p}" for p in score_problems(op, out, UNWRITTEN)
        ]
    for heads, target in product((1, 16, 128), ("a100", "h200")):
        q, weights = cases.queries(5, heads)
        if heads == 16:  # the weights of a head side by side
            weights = weights.T.contiguous().T
        starts = torch.tensor([0, 70, 3, 50, -4], dtype=torch.int32)
        ends = torch.tensor([150, 75, 149, 50, 999], dtype=torch.int32)
        op = ScoresOperands(q, weights, quantize(cases.keys(150), "fp32"), Windows(starts, ends))
        out = torch.full((5, 152), UNWRITTEN)
        run(op, out, target, chunk=64, BN=32)
        yield [f"{heads} heads on {target}: {p}" for p in score_problems(op, out, UNWRITTEN)]


FEW_KEYS = {"chunk": 64, "BN": 32}
"""A program has two blocks of keys."""
SOME_SCORERS = ((64, 16, "ue8m0"), (3, 1, "mxfp4"))
MORE_SCORERS = (
    *((32, 48, "ue8m0"), (128, 1, "ue8m0"), (3, 16, "ue8m0"), (5, 1024, "ue8m0")),
    *((64, 48, "mxfp4"), (128, 16, "mxfp4"), (32, 1, "mxfp4")),
)


def edges() -> Iterator[list[str]]:
    """Requests, windows and rows of scores at the edges of plans, in uneven memory."""
    yield from _score_edges(SOME_SCORERS)
    yield from _selection_edges((("coarse", 16), ("half zeros", 1)))
    yield from _append_edges()


def more_edges() -> Iterator[list[str]]:
    """The same of other heads, pages and scores."""
    yield from _score_edges(MORE_SCORERS)
    yield from _selection_edges(product(cases.KINDS, (1, 16, 48)))


def _score_edges(scorers: tuple[tuple[int, int, str], ...]) -> Iterator[list[str]]:
    for heads, page, scales in scorers:
        small = index_boundaries.single(heads, 2, scales)
        found = index_boundaries.edges_of(plan_of(small, torch.empty(1, 4), "h200", **FEW_KEYS))
        op = index_boundaries.at_edges(found, heads, page, scales)
        alone = index_boundaries.lone_query(op, found)
        single = index_boundaries.single(heads, max(page, 2), scales)
        calls = {"edges": op, "one query alone": alone, "one page": single}
        if scales != "mxfp4":
            calls["windows"] = index_boundaries.windows_at_edges(found, heads)
        for name, call in calls.items():
            problems = _uneven_problems(call)
            yield [f"{name}, {heads} heads, page {page}, {scales}: {p}" for p in problems]


def _uneven_problems(op: ScoresOperands) -> list[str]:
    """What is wrong with scores in uneven memory."""
    of_pages = op.block_table is not None and isinstance(op.keys, IndexCache)
    width = op.block_table.shape[1] * op.keys.page_size if of_pages else op.keys[0].shape[0]
    shape = op.q.shape[0], -(-width // 4) * 4
    out = index_boundaries.uneven_rows(shape, torch.float32, UNWRITTEN)
    run(index_boundaries.uneven(op), out, **FEW_KEYS)
    problems = score_problems(op, out, UNWRITTEN)
    return problems + ["between rows"] * index_boundaries.gaps_of(out, UNWRITTEN)


KEPT = (
    *((64, 0, 0), (64, 1, 0), (65, 0, 1), (70, 40, 24)),
    *((64, 64, 0), (64, 0, 64), (63, 32, 31), (1, 0, 1)),
)
"""How many are selected, and how many of the first and the last in any case: up to all of them."""


def _selection_edges(kinds: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    for number, (kind, page) in enumerate(kinds):
        edges = index_boundaries.SelectEdges(64, 128, 3)  # of `_selection_problems`
        pages = -(-max(edges.widths) // page)
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(number))
        how = {"block_table": order.int().view(2, -1), "page_size": page}
        for topk, first, last in KEPT:
            op = index_boundaries.rows_at_edges(edges, kind, topk, **how)
            kept = replace(op, keep_first=first, keep_last=last)
            said = f"{kind}, top-{topk}, pages of {page}, {first} and {last} kept"
            yield [f"{said}: {p}" for p in _selection_problems(kept)]
        tied = index_boundaries.ties_at(op, 64)
        yield [f"ties, {page}: {p}" for p in _selection_problems(replace(tied, topk=64))]


def _append_edges() -> Iterator[list[str]]:
    """New keys in the first and last rows of pages and of a pool whose pages lie apart; what is
    before and behind the pool is skipped. Keys lie apart too, and one is as loud as can be."""
    for page, scales in product((1, 16, 48), ("ue8m0", "fp32", "mxfp4")):
        row_bytes = MXFP4_BYTES if scales == "mxfp4" else ROW_BYTES
        pools = []
        for _ in range(2):
            data = UnevenMemory().new((3, page * row_bytes), torch.uint8)
            pools.append(IndexCache(data, page, scales))
        rows = 3 * page
        slots = torch.tensor(sorted({0, page - 1, page, 2 * page - 1, rows - 1}))
        k = UnevenMemory().new((len(slots) + 2, 128), torch.float32).normal_()
        k[1], k[2, 7] = 0.0, torch.finfo(torch.float32).max
        pools[0].append(k[: len(slots)], slots)
        windows.append(pools[1], k, torch.cat([slots, torch.tensor([-1, rows])]))
        every = [torch.empty(0, dtype=torch.uint8).set_(p.data.untyped_storage()) for p in pools]
        yield [] if torch.equal(*every) else [f"append, pages of {page}, {scales}"]


def fp4_scores() -> Iterator[list[str]]:
    """FP4 keys in pages that are NaN wherever no key is; one key has a block that is not finite."""
    lens = (([3, 0, 5, 1], [20, 6, 130, 2]), ([9], [70]), ([1, 1, 1], [40, 33, 1]))
    for (q_lens, k_lens), heads, page in product(lens, (3, 32, 64), (1, 16, 24)):
        op, out = _fp4(q_lens, k_lens, heads, page)
        run(op, out, "a100" if page == 16 else "h200", chunk=64, BN=32)
        yield [
            f"{q_lens}, {heads} heads, page {page}: {p}" for p in score_problems(op, out, UNWRITTEN)
        ]


def _fp4(
    q_lens: list[int], k_lens: list[int], heads: int, page: int
) -> tuple[ScoresOperands, torch.Tensor]:
    case = cases.paged(q_lens, k_lens, heads=heads, page_size=page, scales="mxfp4")
    o = case.options
    first = o["block_table"][0, 0].long() * page
    broken = cases.keys(1)
    broken[0, 40] = torch.nan
    case.keys.append(broken, first[None])
    where = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
    op = ScoresOperands(case.q, case.weights, case.keys, where, o["block_table"])
    return op, torch.full((case.q.shape[0], o["block_table"].shape[1] * page), UNWRITTEN)


FP4_DEFECTS = {
    "columns are exchanged": ("packed & 15", "packed >> 4"),
    "the sign is lost": ("e2m1(packed & 15)", "e2m1(packed & 7)"),
    "odd columns of queries are even ones": ("line_ok, 1, 2, TYPE", "line_ok, 0, 2, TYPE"),
    "even products are left out": ("q_odd, tl.dot(even, q))", "q_odd)"),
    "exponents of another row": ("place * FP4_BLOCKS", "(place ^ 1) * FP4_BLOCKS"),
    "one exponent for all columns": ("at[:, None] + block", "at[:, None] + 0 * block"),
    "codes of rows overlap": ("place * codes_stride", "place"),
}


APPEND_DEFECTS = {
    "a broken block is quantized": ("tl.where(broken[:, None], 0.0, x)", "x"),
    "a broken block has a number": ("tl.where(broken, 255, power >> 23)", "(power >> 23)"),
    "scales are rounded down": (
        "power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF)",
        "power = scale.to(tl.int32, bitcast=True)",
    ),
    "halves of bytes are exchanged": ("low | high << 4", "high | low << 4"),
    "the least scale is another": ("_LEAST_AMAX_FP4)", "1e-4)"),
    "exponents of the first row": ("place * _BLOCKS + block", "block"),
}


def append_defects() -> Iterator[list[str]]:
    """Every seeded defect of writing FP4 keys changes a byte; without one, none is changed."""
    yield from fp4_keys()
    for name, change in APPEND_DEFECTS.items():
        folder = Path(tempfile.mkdtemp())
        mutant = load_mutant(package, "indexer.windows", once(*change), "indexer.windows", folder)
        yield [] if any(fp4_keys(mutant)) else [f"{name}: not found"]


def fp4_defects() -> Iterator[list[str]]:
    """Every seeded defect of FP4 keys is found; without one, nothing is."""

    def problems(launch: ModuleType = launch) -> list[str]:
        op, out = _fp4([3, 2], [70, 40], 32, 16)
        run(op, out, chunk=64, BN=32, launch=launch)
        return score_problems(op, out, UNWRITTEN)

    yield problems()
    for name, change in FP4_DEFECTS.items():
        folder = Path(tempfile.mkdtemp())
        mutant = load_mutant(package, "indexer.scores", once(*change), "indexer.launch", folder)
        yield [] if problems(mutant) else [f"{name}: not found"]


def ways_to_select(page: int) -> tuple[dict[str, Any], ...]:
    """What a selection can be asked for; rows of a cache with pages of so many."""
    table = torch.randperm(600 // page).int().view(2, -1)
    return (
        {},
        {"add_starts": True},
        {"keep_first": 1},
        {"block_table": table, "page_size": page},
        {"keep_last": 1},
        {"keep_first": 2, "keep_last": 5},
    )


def select() -> Iterator[list[str]]:
    """Every kind of row, windows at odd places, rows shorter than topk, all outputs."""
    starts = torch.tensor([0, 10, 99, 50, -3, 0], dtype=torch.int32)
    ends = torch.tensor([300, 290, 300, 20, 400, 64], dtype=torch.int32)
    lines = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.int32)
    ways = (*ways_to_select(10), *ways_to_select(1))
    for number, (kind, topk) in enumerate(product(cases.KINDS, (1, 7, 64, 200, 301))):
        how = {"keep_first": 0, **ways[number % len(ways)]}
        scores = cases.scores_of(kind, 6, 300)
        op = SelectOperands(scores, topk, Windows(starts, ends, lines), **how)
        yield [f"{kind}, top-{topk}, {list(how)}: {p}" for p in _selection_problems(op)]


SELECT_DEFECTS = {
    "one of the last is not kept": ("position >= n - keep_last", "position > n - keep_last"),
    "one more of the last is kept": ("position >= n - keep_last", "position >= n - keep_last - 1"),
    "the last are not kept": ("n - keep_last", "n"),
    "as many of the first are kept as of the last": (
        "position < keep_first",
        "position < keep_last",
    ),
    "one more of the first is kept": ("position < keep_first", "position <= keep_first"),
}


def defects() -> Iterator[list[str]]:
    """Every seeded defect of what is kept is found, on a row whose first and last score least."""
    scores = cases.scores_of("random", 6, 300)
    scores[:, :9], scores[:, -9:] = -100.0, -100.0
    where = Windows(torch.zeros(6, dtype=torch.int32), torch.full((6,), 300, dtype=torch.int32))
    op = SelectOperands(scores, 64, where, keep_first=2, keep_last=5)
    yield _selection_problems(op)
    for name, change in SELECT_DEFECTS.items():
        folder = Path(tempfile.mkdtemp())
        mutant = load_mutant(package, "indexer.select", once(*change), "indexer.launch", folder)
        yield [] if _selection_problems(op, mutant) else [f"{name}: not found"]


def _selection_problems(op: SelectOperands, launch: ModuleType = launch) -> list[str]:
    rows, words = op.scores.shape[0], -(-op.scores.shape[1] // 32)

    def empty() -> SelectResults:
        sizes = ((rows, op.topk), (rows,), (rows, words))
        return SelectResults(*(torch.full(size, 99, dtype=torch.int32) for size in sizes))

    got, want = empty(), empty()
    run(op, got, launch=launch, block=64)
    reference.write_selection(op, want, reference.select(op))
    return [
        f"{name} differ in rows {(a != b).view(rows, -1).any(1).nonzero().flatten().tolist()}"
        for name in ("out", "counts", "mask")
        if not torch.equal(a := getattr(got, name), b := getattr(want, name))
    ]


def paging() -> Iterator[list[str]]:
    """Windows and new keys are those of the CPU."""
    for q_lens, k_lens, spare in (
        ([3, 0, 5], [9, 2, 4], 2),
        ([0], [1], 0),
        ([70], [3], 1),
        ([], [], 3),
    ):
        cu = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        total, lengths = sum(q_lens) + spare, torch.tensor(k_lens, dtype=torch.int32)
        found = windows.paged_windows(cu, lengths, total, least=3)
        found.write()
        want = paged_windows(cu, lengths, total)
        names = ("starts", "ends", "sequences", "longest")
        yield [
            f"{q_lens}: {name}"
            for name in names
            if not torch.equal(getattr(found.seen, name), getattr(want, name))
        ]
        scored = want.longer_than(3).ends
        yield [] if torch.equal(found.scored.ends, scored) else [f"{q_lens}: scored"]
        starts = torch.arange(total, dtype=torch.int32)
        for given, offsets in product((None, starts), (None, cu)):
            made = windows.given_windows(given, None, total, 77, cu.device, offsets)
            made.write()
            got = made.seen
            lines = (
                got.sequences is None
                if offsets is None
                else torch.equal(got.sequences, want.sequences)
            )
            begin = torch.zeros_like(starts) if given is None else given
            right = torch.equal(got.starts, begin) and bool((got.ends == 77).all()) and lines
            yield [] if right else [f"{q_lens}: given windows"]
        whole = windows.given_windows(starts, starts, total, 77, cu.device)
        yield [] if whole.call is None and whole.seen.ends is starts else [f"{q_lens}: launched"]
    for scales, dtype in product(("ue8m0", "fp32"), (torch.float32, torch.bfloat16)):
        k = torch.randn(9, 128) * torch.logspace(-7, 6, 9)[:, None]
        k[2], k[3, 5], k[4, 6], k[5] = 0, torch.nan, torch.inf, 448.0
        k = k.to(dtype)
        slots = torch.tensor([5, 0, 11, -1, 3, 7, 2, 8, 1])
        pools = [IndexCache.allocate(num_pages=3, page_size=4, scales=scales) for _ in range(2)]
        pools[0].append(k, slots)
        windows.append(pools[1], torch.cat([k, k[:1]]), torch.cat([slots, torch.tensor([12])]))
        same = torch.equal(*(p.scales_view.nan_to_num(7) for p in pools))
        values = [p.values_view.float().nan_to_num(7) for p in pools]
        yield [] if same and torch.equal(*values) else [f"append {scales} {dtype}"]
    yield from fp4_keys()


def fp4_keys(windows: ModuleType = windows) -> Iterator[list[str]]:
    """New FP4 keys have the bytes of the CPU: ties, signs of zero, blocks that are not finite."""
    for dtype in (torch.float32, torch.bfloat16):
        k = torch.randn(9, 128) * torch.logspace(-12, 12, 9)[:, None]
        k[0, :64] = torch.arange(64) * 0.25 - 8.0
        k[2], k[3, 5], k[4, 6], k[4, 99] = -0.0, torch.nan, torch.inf, -torch.inf
        k[5, :32], k[6, 32:64], k[7, 3] = 1e-45, 3e-39, torch.finfo(torch.float32).max
        k = k.to(dtype)
        slots = torch.tensor([5, 0, 11, -1, 3, 7, 2, 8, 1])
        pools = [IndexCache.allocate(num_pages=3, page_size=4, scales="mxfp4") for _ in range(2)]
        pools[0].append(k, slots)
        windows.append(pools[1], torch.cat([k, k[:1]]), torch.cat([slots, torch.tensor([12])]))
        different = (pools[0].data != pools[1].data).nonzero()
        yield [f"append mxfp4 {dtype}: byte {at}" for at in different[:1].tolist()]


def wild() -> Iterator[list[str]]:
    """Offsets, lengths, tables and windows that hold anything, between inaccessible pages: whoever
    leaves a tensor ends the process."""
    for seed, (kind, edge) in enumerate(product(KINDS, EDGES)):
        rng, memory = random.Random(f"{kind} {seed}"), GuardedMemory(edge)
        scales = "mxfp4" if seed % 2 else "ue8m0"
        case = cases.paged([3, 0, 5, 1], [20, 6, 130, 2], heads=3, page_size=16, scales=scales)
        pool = IndexCache(memory.of(case.keys.data), 16, scales)
        table, cu, lengths = (
            memory.of(case.options[name])
            for name in ("block_table", "cu_seqlens_q", "cache_lengths")
        )
        for x in (table, cu, lengths):
            make_wild(x, kind, rng)
        made = windows.paged_windows(cu, lengths, 9)
        made.write()
        where = made.seen
        for x in (where.starts, where.ends) if seed % 2 else ():
            make_wild(x, kind, rng)
        scores = memory.new((9, table.shape[1] * 16), torch.float32)
        run(ScoresOperands(case.q, case.weights, pool, where, table), scores, chunk=64, BN=32)
        how = {"block_table": table, "page_size": 16} if seed % 3 else {"add_starts": True}
        mask = memory.new((9, -(-scores.shape[1] // 32)), torch.int32)
        out, counts = memory.new((9, 30), torch.int32), memory.new((9,), torch.int32)
        run(SelectOperands(scores, 30, where, **how), SelectResults(out, counts, mask), block=64)
        yield []
    # The last line of a table, and of scores, that ends where its memory does.
    memory = GuardedMemory("end")
    table = memory.of(torch.randperm(14).int().view(2, 7))
    found = memory.of(cases.scores_of("random", 2, 70))
    starts, ends, lines = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [70, 70], [0, 1]))
    op = SelectOperands(found, 70, Windows(starts, ends, lines), block_table=table, page_size=10)
    yield [*_selection_problems(op), *_selection_problems(replace(op, topk=30))]


def far() -> Iterator[list[str]]:
    """Rows of scores, and lines of a block table, past element 2^31."""
    starts, ends = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 3, 0, 5], [70, 30, 3, 1, 66])
    )
    where = Windows(starts, ends, torch.arange(5, dtype=torch.int32))
    op = ScoresOperands(*cases.queries(5, 3), quantize(cases.keys(70), "fp32"), where)
    out = FarMemory(0).new((5, 72), torch.float32).fill_(UNWRITTEN)
    run(op, out, chunk=64, BN=32)
    yield score_problems(op, out, UNWRITTEN)
    table = torch.frombuffer(unreserved(3 * 2**30 * 4), dtype=torch.int32).view(3, 2**30)
    table[:, :7] = torch.randperm(21).view(3, 7)
    where = Windows(starts[:3], ends[:3], torch.tensor([2, 1, 0], dtype=torch.int32))
    scores = cases.scores_of("random", 3, 70)
    yield _selection_problems(SelectOperands(scores, 20, where, block_table=table, page_size=10))


PARTS: dict[str, Callable[[], Iterator[list[str]]]] = {
    "far": far,
    "scores": scores,
    "edges": edges,
    "more_edges": more_edges,
    "fp4_scores": fp4_scores,
    "fp4_defects": fp4_defects,
    "append_defects": append_defects,
    "select": select,
    "defects": defects,
    "paging": paging,
    "wild": wild,
}


def main(part: str) -> None:
    """Run one part and print what it found."""
    interpreter.repair()
    torch.set_num_threads(1)
    done = rejected = 0
    for problems in PARTS[part]():
        done += 1
        rejected += bool(problems)
        for problem in problems:
            print(json.dumps({"problem": problem}), flush=True)
    print(json.dumps({"done": done, "rejected": rejected}))


if __name__ == "__main__":
    main(sys.argv[1])
