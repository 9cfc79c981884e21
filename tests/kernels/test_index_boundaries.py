"""Every kernel of the indexer at the edges of its own plan, in uneven memory, and one row alone.

What `make test` runs of each kernel is one plan; `make test-all` has other heads, pages and keys.
The portable kernels have theirs in portable/interpreted_indexer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gluon_sim import Limits, intercept
from indexer import cases
from indexer.score_cases import UNWRITTEN, width_of
from kernels.hopper.indexer import test_select as selection
from kernels.index_boundaries import (
    ScoreEdges,
    at_edges,
    at_some_edges,
    edges_of,
    gaps_of,
    lone_query,
    rows_at_edges,
    select_edges,
    single,
    ties_at,
    uneven,
    uneven_rows,
    windows_at_edges,
)
from kernels.test_indexer_scores import BLACKWELL, CDNA4, HOPPER, Chip
from openmla.indexer import reference
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults
from openmla.kernels.gluon.select.launch import calls as select_calls
from openmla.lab.testing.indexer import score_problems
from openmla.planning import Plan

LIMITS = Limits(steps=400_000)


@dataclass(frozen=True)
class Scorer:
    """A plan of scores: its chip, heads, pages, and how many queries a request has at most."""

    chip: Chip
    heads: int = 64
    page_size: int = 64
    scales: str = "ue8m0"
    few: int = 0

    def plan_of(self, op: ScoresOperands, out: torch.Tensor) -> Plan:
        chosen = self.chip.plan_of(op, out)
        assert bool(getattr(chosen.config, "shared_queries", 0)) == bool(self.few)
        return chosen

    @property
    def stored(self) -> tuple[int, int, str, int]:
        """What cases at edges are made of besides the edges."""
        return self.heads, self.page_size, self.scales, self.few

    @property
    def edges(self) -> ScoreEdges:
        """Those of its plan for a call of any lengths."""
        op = at_edges(ScoreEdges(self.few or 9, 32, 1, 0), *self.stored)
        return edges_of(self.plan_of(op, torch.empty(op.q.shape[0], width_of(op))))

    def paged(self) -> ScoresOperands:
        """One request for each length around an edge."""
        return at_edges(self.edges, *self.stored)


MINE = {
    "hopper": Scorer(HOPPER),
    "hopper, one query": Scorer(HOPPER, few=1),
    "hopper, FP4": Scorer(HOPPER, scales="mxfp4"),
    "blackwell": Scorer(BLACKWELL),
    "cdna4": Scorer(CDNA4),
}
OTHERS = {
    "hopper, 32 heads, pages of 32": Scorer(HOPPER, 32, 32),
    "hopper, 128 heads, pages of 96": Scorer(HOPPER, 128, 96),
    "hopper, two queries, 32 heads": Scorer(HOPPER, 32, 32, few=2),
    "hopper, two queries": Scorer(HOPPER, few=2),
    "hopper, one query, 128 heads": Scorer(HOPPER, 128, few=1),
    "hopper, FP4, one query": Scorer(HOPPER, scales="mxfp4", few=1),
    "hopper, FP4, two queries, 32 heads": Scorer(HOPPER, 32, 32, "mxfp4", few=2),
    "hopper, FP4, 128 heads, pages of 96": Scorer(HOPPER, 128, 96, "mxfp4"),
    "blackwell, 32 heads, pages of 32": Scorer(BLACKWELL, 32, 32),
    "blackwell, 128 heads, pages of 96": Scorer(BLACKWELL, 128, 96),
    "cdna4, 32 heads, pages of 4": Scorer(CDNA4, 32, 4),
    "cdna4, pages of 16": Scorer(CDNA4, 64, 16),
    "cdna4, 128 heads, pages of 48": Scorer(CDNA4, 128, 48),
}
SCORERS = {**MINE, **OTHERS}
long_ones = [
    *MINE,
    *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS),
]
CONTIGUOUS = ["hopper", "blackwell", "cdna4"]


def problems_of(scorer: Scorer, op: ScoresOperands, width: int, **options: Any) -> list[str]:
    """What is wrong with the scores of a call in uneven memory, and with how they were computed."""
    laid = uneven(op)
    out = uneven_rows((op.q.shape[0], width), torch.float32, UNWRITTEN)
    with intercept(limits=LIMITS, **options) as reports:
        for call in scorer.chip.part("launch").calls(scorer.plan_of(laid, out), laid, out):
            call.run()
    found = [str(report) for report in reports if not report.ok]
    found += score_problems(op, out, UNWRITTEN)
    return found + ["memory between rows was written"] * gaps_of(out, UNWRITTEN)


@pytest.mark.parametrize("name", MINE)
def test_some_lengths_at_the_edges_of_the_plan(name: str) -> None:
    scorer = SCORERS[name]
    op = at_some_edges(scorer.edges, *scorer.stored)
    assert problems_of(scorer, op, width_of(op), schedule="late", seed=1) == []


@pytest.mark.long
@pytest.mark.parametrize("name", SCORERS)
def test_all_lengths_at_the_edges_of_the_plan(name: str) -> None:
    scorer = SCORERS[name]
    op = scorer.paged()
    assert problems_of(scorer, op, width_of(op), schedule="unfair", seed=2) == []


@pytest.mark.parametrize(
    "name", ["hopper", *(pytest.param(n, marks=pytest.mark.long) for n in CONTIGUOUS[1:])]
)
def test_windows_at_the_edges_of_the_plan(name: str) -> None:
    scorer = SCORERS[name]
    op = windows_at_edges(scorer.edges, scorer.heads)
    assert problems_of(scorer, op, op.keys[0].shape[0], schedule="late") == []  # type: ignore[index]


@pytest.mark.parametrize("name", long_ones)
def test_one_query_alone(name: str) -> None:
    scorer = SCORERS[name]
    small = replace(scorer.edges, ring=1, piece=0)
    op = lone_query(at_edges(small, *scorer.stored), small)
    assert problems_of(scorer, op, width_of(op), schedule="random", seed=3) == []


@pytest.mark.parametrize("name", long_ones)
def test_one_query_and_one_page_whose_strides_are_never_used(name: str) -> None:
    """What lies between two of them may be any number, also one that no descriptor can have."""
    scorer = SCORERS[name]
    op = single(scorer.heads, scorer.page_size, scorer.scales)
    laid = uneven(op)
    assert isinstance(laid.keys, IndexCache)
    assert laid.q.stride(0) > 2**39 and laid.keys.data.stride(0) > 2**39
    one = replace(scorer, few=1 if scorer.chip is HOPPER else 0)
    assert problems_of(one, op, width_of(op)) == []


@pytest.mark.parametrize("name", SCORERS)
def test_the_edges_are_met(name: str) -> None:
    scorer = SCORERS[name]
    edges, op = scorer.edges, scorer.paged()
    requests = op.windows.requests
    assert requests is not None and edges.keys >= 64
    lengths = set(requests.cache_lengths.tolist())
    for end in (edges.keys, edges.keys * edges.ring, edges.piece or edges.keys):
        assert {end - 1, end, end + 1} <= lengths
    counts = set(requests.cu_seqlens_q.diff().tolist())
    assert {scorer.few} <= counts if scorer.few else {edges.queries, edges.queries + 1} <= counts


# The selection.


@dataclass(frozen=True)
class Selector:
    """A plan of a selection: its chip, and what is changed so that rows of hundreds are long."""

    chip: str
    changes: tuple[tuple[str, Any], ...] = ()

    def plan_of(self, op: SelectOperands, results: SelectResults) -> Plan:
        return selection.plan_of(op, results, self.chip, **dict(self.changes))


SELECTORS = {
    "h200": Selector("h200"),
    "mi355x": Selector("mi355x"),
    "h200, two warps": Selector("h200", (("warps", 2), ("chunk_vectors", 1), ("list_vectors", 2))),
    "mi355x, two warps": Selector("mi355x", (("warps", 2), ("list_vectors", 4))),
}
WAYS: dict[str, dict[str, Any]] = {
    "positions": {},
    "columns": {"add_starts": True},
    **{f"pages of {size}": {"page_size": size} for size in (1, 16, 48)},
}


def selected_of(op: SelectOperands, memory_rows: int, **wanted: bool) -> SelectResults:
    """Where results go: rows that lie apart; counts and bits if they are wanted."""
    words = -(-op.scores.shape[1] // 128) * 4  # as select_topk makes them: rows of 16 bytes
    out = uneven_rows((memory_rows, op.topk), torch.int32, 99)
    counts = torch.full((memory_rows,), 99, dtype=torch.int32) if wanted.get("counts") else None
    every = torch.full((memory_rows * words + 64,), 99, dtype=torch.int32)
    mask = every[32:-32].view(memory_rows, words) if wanted.get("mask") else None
    return SelectResults(out, counts, mask)


def selection_problems(selector: Selector, op: SelectOperands, **wanted: bool) -> list[str]:
    """What a selection writes besides what the definition writes, scores in uneven memory."""
    rows = op.scores.shape[0]
    got, want = (selected_of(op, rows, **wanted) for _ in range(2))
    laid = replace(op, scores=_laid(op.scores), block_table=op.block_table)
    with intercept(limits=Limits(load_alignment=16), schedule="unfair", seed=4) as reports:
        for call in select_calls(selector.plan_of(laid, got), laid, got):
            call.run()
    reference.write_selection(op, want, reference.select(op))
    found = [str(report) for report in reports if not report.ok]
    for name in ("out", "counts", "mask"):
        a, b = getattr(got, name), getattr(want, name)
        if a is not None and not torch.equal(a, b):
            wrong = (a != b).view(rows, -1).any(1).nonzero().flatten().tolist()
            found.append(f"{name} differ in rows {wrong}")
        if name != "counts" and a is not None and gaps_of(a, 99):
            found.append(f"memory between rows of {name} was written")
    return found


def _laid(scores: torch.Tensor) -> torch.Tensor:
    """A copy whose rows lie apart, with Inf between them: it would be selected first."""
    rows = uneven_rows(tuple(scores.shape), torch.float32, torch.inf)
    return rows.copy_(scores)


def edges_of_selection(selector: Selector) -> Any:
    op = selection.operands("random", 512, 100)
    return select_edges(selector.plan_of(op, selection.results_of(op)))


def rows_of(selector: Selector, kind: str, topk: int, way: str) -> SelectOperands:
    """Rows around every edge of a plan; physical rows by a table whose pages lie in any order."""
    edges = edges_of_selection(selector)
    how = dict(WAYS[way])
    if size := how.get("page_size"):
        pages = -(-max(edges.widths) // size)
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(3))
        how["block_table"] = order.int().view(2, -1)
    return rows_at_edges(edges, kind, topk, **how)


SOME = [("h200", "coarse", "pages of 48"), ("mi355x", "half zeros", "pages of 1")]
EVERY = [
    (name, kind, way)
    for i, name in enumerate(SELECTORS)
    for j, kind in enumerate(cases.KINDS)
    for way in [list(WAYS)[(i + j) % len(WAYS)]]
    if (name, kind, way) not in SOME
]


@pytest.mark.parametrize(
    ("name", "kind", "way"), [*SOME, *(pytest.param(*x, marks=pytest.mark.long) for x in EVERY)]
)
def test_rows_at_the_edges_of_a_selection(name: str, kind: str, way: str) -> None:
    """A row ends with a chunk, a list or a ring, one score before or behind; as many are selected
    as a list has room for beside a chunk, the most there can be, one less and one."""
    edges = edges_of_selection(SELECTORS[name])
    most = edges.list_size - edges.chunk
    for topk in (most, most - 1, 1):
        op = rows_of(SELECTORS[name], kind, topk, way)
        assert selection_problems(SELECTORS[name], op, counts=True, mask=True) == []


@pytest.mark.parametrize("wanted", [{"counts": True}, {"mask": True}, {}], ids=str)
def test_bits_or_counts_alone(wanted: dict[str, bool]) -> None:
    op = rows_of(SELECTORS["h200"], "coarse", 65, "pages of 16")
    assert selection_problems(SELECTORS["h200"], op, **wanted) == []


@pytest.mark.parametrize(
    "name", ["h200", *(pytest.param(n, marks=pytest.mark.long) for n in list(SELECTORS)[1:])]
)
def test_scores_that_are_equal_on_both_sides_of_an_edge(name: str) -> None:
    edges = edges_of_selection(SELECTORS[name])
    most = edges.list_size - edges.chunk
    for edge in (edges.chunk, edges.list_size):
        op = ties_at(rows_of(SELECTORS[name], "random", most, "positions"), edge)
        assert selection_problems(SELECTORS[name], op, counts=True, mask=True) == []


@pytest.mark.parametrize("name", SELECTORS)
def test_the_edges_of_selections_are_met(name: str) -> None:
    edges = edges_of_selection(SELECTORS[name])
    op = rows_of(SELECTORS[name], "random", 5, "positions")
    widths = set((op.windows.ends - op.windows.starts).tolist())
    assert edges.chunk < edges.list_size and edges.ring > 1
    for end in (edges.chunk, edges.list_size, edges.list_size + edges.chunk):
        assert {end - 1, end, end + 1} <= widths
    assert {start % 4 for start in op.windows.starts.tolist()} == {0, 1, 2, 3}
