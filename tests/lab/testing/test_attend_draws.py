"""Random calls of `mla_attend`: what is drawn, what a case holds, and which mistakes draws show."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import reference
from openmla.errors import InvalidArgument
from openmla.lab.testing import case as case_module
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case, CaseSource
from openmla.lab.testing.checker import Checker
from openmla.lab.testing.compare import judge
from openmla.lab.testing.draw import ATTENDS, random_case, varied
from openmla.lab.testing.fuzz import run_fuzz
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.neighbors import neighbor_problems, turned_round
from openmla.lab.testing.memory.poison import poison_problems
from openmla.lab.testing.shrink import shrink
from openmla.lab.testing.simulate.draw import simulated_case
from openmla.operands import AttendOperands
from openmla.problem import CACHE_FORMATS
from openmla.sources import Listed, Span, TurnBack

DRAWN = [case for case in map(random_case, range(4000)) if case.sources]
SPAN = CaseSource("span", "bf16", page_size=4, topk=9, rows=13)
LIST = CaseSource("list", "fp8_584", page_size=3, topk=6, rows=20, topk_lengths="ragged")
CASE = Case(
    "sparse", 3, 512, 0, 512, (7,), (0,), sources=(SPAN, LIST), turned=64, scale=0.05, seed=4
)


def operands(case: Case, background: str = "zero") -> AttendOperands:
    op = build(case, memory=Memory("cpu", background)).operands
    assert isinstance(op, AttendOperands)
    return op


# What is drawn.


def test_the_share_and_the_kinds_of_sources() -> None:
    assert 0.8 * ATTENDS < len(DRAWN) / 4000 < 1.2 * ATTENDS
    sources = [source for case in DRAWN for source in case.sources]
    for kind, formats in (("list", {"plain", *CACHE_FORMATS}), ("span", set(CACHE_FORMATS))):
        mine = [source for source in sources if source.kind == kind]
        assert {source.kv for source in mine} == formats
        assert {1, 16, 48, 64, 1024} <= {source.page_size for source in mine}
        kinds = {source.index_kind for source in mine}
        assert kinds == {"distinct", "duplicates", "mixed", "invalid"}
    assert {s.topk_lengths for s in sources} == {"none", "full", "ragged", "wild"}
    pairs = {tuple(source.kind for source in case.sources) for case in DRAWN}
    assert pairs == {("list",), ("span",)} | {(a, b) for a in KINDS for b in KINDS}
    mixed = {tuple(source.kv for source in case.sources) for case in DRAWN}
    assert ("bf16", "fp8_584") in mixed or ("fp8_584", "bf16") in mixed
    assert sum(len(set(pair)) == 2 for pair in mixed) > 40
    assert {case.dtype for case in DRAWN} == {"bf16", "fp16", "fp32", "e4m3"}
    assert {0, 2, 64} <= {case.turned for case in DRAWN}
    assert {case.sink for case in DRAWN} == {"none", "normal", "low", "high", "mixed"}
    assert any(case.values == "broken" for case in DRAWN)
    assert any(case.fp32_out for case in DRAWN) and not all(case.return_lse for case in DRAWN)
    assert max(case.heads for case in DRAWN) == 128 and {0, 1} <= {c.total_q for c in DRAWN}


KINDS = ("list", "span")


@pytest.mark.parametrize("target", ["h200", "b200", "mi355x"])
def test_the_simulator_draws_them_too(target: str) -> None:
    drawn = [case for case in (simulated_case(target, s) for s in range(500)) if case.sources]
    assert len(drawn) > 50
    assert {source.kind for case in drawn for source in case.sources} == set(KINDS)
    most = {source.topk for case in drawn for source in case.sources}
    assert {63, 64, 65, 127, 128, 129} <= most
    assert {0, 64} <= {case.turned for case in drawn}


def test_spans_name_what_is_not_there() -> None:
    """Each of these many times: they are what kernels must ignore."""
    met: dict[str, int] = dict.fromkeys(("before", "past", "backwards", "request", "page"), 0)
    for case in DRAWN:
        for span in operands(case).sources:
            if isinstance(span, Span):
                met["before"] += bool(((span.begin < 0) & (span.end > 0)).any())
                met["past"] += bool((span.end > span.table_keys).any())
                met["backwards"] += bool((span.end < span.begin).any())
                lines = span.block_table.shape[0]
                met["request"] += bool(((span.request < 0) | (span.request >= lines)).any())
                pages = span.block_table
                met["page"] += bool(((pages < 0) | (pages >= span.cache.num_pages)).any())
    assert min(met.values()) > 20, met


def test_positions_of_turns_lie_outside_of_tables() -> None:
    turns = [op.turn_back for op in map(operands, DRAWN[:150]) if op.turn_back is not None]
    outside = [bool(((t.positions < 0) | (t.positions >= t.table.shape[0])).any()) for t in turns]
    assert 10 < sum(outside) < len(turns)
    assert {t.positions.dtype for t in turns} == {torch.int32, torch.int64}


@pytest.mark.parametrize("background", ["nan", "inf", "ff"])
def test_only_what_a_query_sees_is_written(background: str) -> None:
    clean, poisoned = operands(CASE), operands(CASE, background)
    for a, b in zip(clean.sources, poisoned.sources, strict=True):
        for token in range(CASE.total_q):
            assert torch.equal(a.seen(token), b.seen(token))
        seen = torch.unique(torch.cat([a.seen(token) for token in range(CASE.total_q)]))
        assert 0 < len(seen) < a.count
        assert torch.equal(a.read(seen), b.read(seen))
        assert not torch.equal(_bytes(a.rows), _bytes(b.rows))


def _bytes(rows: Any) -> torch.Tensor:
    stored: torch.Tensor = rows.data.contiguous().view(torch.uint8)
    return stored


def test_scales_lie_behind_the_rows_of_a_page_as_engines_keep_them() -> None:
    (cache,) = (source.rows for source in operands(CASE).sources if isinstance(source, Listed))
    assert not isinstance(cache, torch.Tensor) and cache.scales is not None
    assert cache.data.untyped_storage().data_ptr() == cache.scales.untyped_storage().data_ptr()


def test_a_case_survives_json_and_its_impossible_fields_are_named() -> None:
    for case in DRAWN[:100]:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    written = CASE.to_json()
    with pytest.raises(InvalidArgument, match=r"kv: expected one of 'bf16'.* got 'plain'"):
        CaseSource("span", "plain")
    with pytest.raises(InvalidArgument, match=r"case.sources\[0\].topk: expected an integer"):
        Case.from_json({**written, "sources": [{"topk": "many"}]})
    with pytest.raises(InvalidArgument, match=r"case.sources: expected a list of objects with"):
        Case.from_json({**written, "sources": 3})
    with pytest.raises(InvalidArgument, match="sources: expected more than one list"):
        replace(CASE, sources=(LIST,), turned=0)
    with pytest.raises(InvalidArgument, match="turned: expected pairs of at most 512 columns"):
        replace(CASE, turned=63)
    with pytest.raises(InvalidArgument, match="sources: expected none unless the form is sparse"):
        replace(CASE, q_scale=True)
    assert str(CASE) == (
        "attend bf16 3 heads 512+0->512 7 queries span of 9 of 13 bf16 rows distinct pages of 4 "
        "list of 6 of 20 fp8_584 rows distinct lengths ragged pages of 3 64 columns turned back "
        "normal seed 4"
    )
    assert doctest.testmod(case_module).failed == 0


@pytest.mark.parametrize("case", DRAWN[:20], ids=lambda case: str(case.seed))
def test_variants_share_what_a_kernel_is_compiled_for(case: Case) -> None:
    other = varied(case, 1)
    fixed = ("heads", "d_nope", "d_rope", "d_v", "dtype", "turned", "layout", "out", "return_lse")
    if case.heads <= 8:
        assert [getattr(other, name) for name in fixed] == [getattr(case, name) for name in fixed]
    for a, b in zip(case.sources, other.sources, strict=True):
        assert (a.kind, a.kv, a.page_size) == (b.kind, b.kv, b.page_size)
        assert (a.topk_lengths == "none") == (b.topk_lengths == "none")
    assert other != case


def test_shrinking_takes_sources_apart() -> None:
    small = shrink(CASE, lambda c: any(s.kind == "span" and s.topk > 2 for s in c.sources))
    assert [(s.kind, s.topk, s.rows, s.page_size) for s in small.sources] == [("span", 3, 0, 1)]
    assert (small.heads, small.total_q, small.turned, small.d_nope) == (1, 0, 0, 1)


# What is checked.


def test_drawn_calls_are_right() -> None:
    found = [Checker().result(case, deep=case.seed % 5 == 0) for case in DRAWN[:40]]
    assert {result.status for result in found} == {"right"}
    first = next(c.seed for c in DRAWN if c.total_q and c.seed % 10 == 1)  # none of them is deep
    report = run_fuzz(cases=8, seed=first)
    assert report.ok and report.served["attend", "cpu"] >= 1


def test_unused_memory_does_not_matter() -> None:
    assert poison_problems(CASE) == []


def test_a_query_that_depends_on_its_neighbors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, out="fresh")
    outcome = build(case).run()
    assert neighbor_problems(turned_round(build(case)).run(), outcome) == []

    def leaky(self: Checker, built: BuiltCase) -> Outcome:
        right = built.run()
        right.out[1:] += right.out[:-1] * 2.0**-9
        return right

    monkeypatch.setattr(Checker, "run", leaky)
    monkeypatch.setattr(
        "openmla.lab.testing.checker.judge", lambda built, outcome, **_: judge(build(case), right)
    )
    right = outcome
    assert Checker().result(case, deep=True).kind == "neighbors"


def without_lengths(op: AttendOperands) -> AttendOperands:
    """Entries past a list's length count."""
    cut = (replace(s, lengths=None) if isinstance(s, Listed) else s for s in op.sources)
    return replace(op, sources=tuple(cut))


def one_position_more(op: AttendOperands) -> AttendOperands:
    """Spans end one position later."""
    longer = (
        replace(s, end=s.end + (s.end > s.begin)) if isinstance(s, Span) else s for s in op.sources
    )
    return replace(op, sources=tuple(longer))


def clamped(op: AttendOperands) -> AttendOperands:
    """Pages that are not there are taken for the last one."""
    found = []
    for source in op.sources:
        if isinstance(source, Span) and source.cache.num_pages:
            table = source.block_table.clamp(0, source.cache.num_pages - 1)
            source = replace(source, block_table=table)
        found.append(source)
    return replace(op, sources=tuple(found))


def first_line(op: AttendOperands) -> AttendOperands:
    """Requests that are not there are taken for the first."""
    found = []
    for source in op.sources:
        if isinstance(source, Span):
            lines = source.block_table.shape[0]
            there = (source.request >= 0) & (source.request < lines)
            source = replace(source, request=torch.where(there, source.request, 0))
        found.append(source)
    return replace(op, sources=tuple(found))


def one_source(op: AttendOperands) -> AttendOperands:
    """The second source is forgotten."""
    return replace(op, sources=op.sources[:1])


def forward(op: AttendOperands) -> AttendOperands:
    """Results turn by plus their angle."""
    if op.turn_back is None:
        return op
    half = op.turn_back.columns // 2
    table = op.turn_back.table.clone()
    table[:, half:] *= -1
    return replace(op, turn_back=TurnBack(table, op.turn_back.positions))


def last_angle(op: AttendOperands) -> AttendOperands:
    """A position past the table means its last line."""
    if op.turn_back is None:
        return op
    table, positions = op.turn_back.table, op.turn_back.positions
    return replace(op, turn_back=TurnBack(table, positions.clamp(0, table.shape[0] - 1)))


MISTAKES: tuple[Callable[[AttendOperands], AttendOperands], ...] = (
    *(without_lengths, one_position_more, clamped, first_line),
    *(one_source, forward, last_angle),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_shows_in_the_first_hundred_calls(
    mistake: Callable[[AttendOperands], AttendOperands],
) -> None:
    """In memory full of NaN, as deep cases have it, or by the rule."""
    for case in DRAWN[:100]:
        built = build(case, memory=Memory("cpu", "nan"))
        assert isinstance(built.operands, AttendOperands)
        truth = reference.of(mistake(built.operands))
        out = built.new_out().copy_(truth.out) if case.out != "fresh" else truth.out.bfloat16()
        if case.out == "fresh" and case.dtype in ("fp16", "fp32"):
            continue  # another type of output
        if not judge(built, Outcome(out, truth.lse.float())).ok:
            return
    pytest.fail("no case shows it")


def test_a_row_whose_scores_are_all_minus_infinity_may_be_empty_or_nan() -> None:
    """Kernels hide keys by such scores: whether the row counts as one without keys is open, and
    every other row is as strict as ever."""
    case = replace(CASE, sources=(replace(SPAN, topk=3, rows=3), LIST), turned=0, sink="normal")
    built = build(case)
    assert isinstance(built.operands, AttendOperands)
    seen = [sum(len(s.seen(t)) for s in built.operands.sources) for t in range(case.total_q)]
    token = next(t for t, n in enumerate(seen) if n)
    q = built.operands.q
    q[token, 0] = 0
    q[token, 0, 0] = torch.inf
    for source in built.operands.sources:
        rows = source.seen(token)
        kept = source.read(rows)
        kept[:, 0] = -1.0
        assert not isinstance(source.rows, torch.Tensor)
        source.rows.append(kept, None, rows)
    truth = built.truth()
    assert truth.lse[token, 0] == -torch.inf and bool(truth.unsettled[token, 0].all())
    right = Outcome(truth.out.bfloat16(), truth.lse.float())
    as_nan, as_empty = (Outcome(right.out.clone(), right.lse.clone()) for _ in range(2))  # type: ignore[union-attr]
    as_empty.out[token, 0] = 0
    assert as_nan.lse is not None
    as_nan.lse[token, 0] = torch.nan
    assert judge(built, as_nan).ok and judge(built, as_empty).ok
    as_nan.lse[token, 0] = 1.0
    assert any("though scores are not" in p for p in judge(built, as_nan).problems)
    as_empty.out[token, 1] = torch.nan
    assert not judge(built, as_empty).ok


def test_at_a_scale_of_zero_scores_of_nan_may_be_zero() -> None:
    case = replace(CASE, sources=(replace(SPAN, topk=3, rows=3), LIST), turned=0, scale=0.0)
    built = build(case)
    assert isinstance(built.operands, AttendOperands)
    clean = reference.of(built.operands)
    token = next(t for t in range(case.total_q) if int(clean.keys[t]))
    built.operands.q[token, 0, 7] = torch.nan
    truth = built.truth()
    assert bool(truth.out[token, 0].isnan().all()) and bool(truth.lse[token, 0].isnan())
    for shown in (truth, clean):
        right = Outcome(shown.out.bfloat16(), shown.lse.float())
        assert judge(built, right).ok
    assert not judge(build(case), Outcome(truth.out.bfloat16(), truth.lse.float())).ok
