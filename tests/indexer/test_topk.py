"""index_topk: scores and selection in chunks, kept keys, operators under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import openmla
from indexer import cases
from openmla import InvalidArgument
from openmla.indexer import ops
from openmla.indexer.operands import ScoresOperands
from openmla.indexer.ops import given_windows, windows_of

BACKENDS = ("cpu", "reference")
LENS = ([5, 0, 9], [60, 3, 200])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [1, 4 * 200 * 6, 512 << 20])
def test_chunks_change_nothing(backend: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, three, all: the same selection as by hand, and no more held than asked."""
    case = cases.paged(*LENS)
    options = {**case.options, "backend": backend}
    scores = openmla.indexer_scores(case.q, case.keys, case.weights, **options)
    ends = torch.tensor([*range(56, 61), *range(192, 201)], dtype=torch.int32)
    want = openmla.select_topk(scores, 30, ends=ends)
    run, held = ops.run_scores, []

    def noted(op: ScoresOperands, out: torch.Tensor, *more: Any) -> Any:
        held.append(out.shape[0])
        return run(op, out, *more)

    monkeypatch.setattr(ops, "run_scores", noted)
    got, counts, mask = openmla.index_topk(
        case.q,
        case.keys,
        case.weights,
        30,
        **options,
        rows="relative",
        scores_limit=limit,
        return_counts=True,
        return_mask=True,
    )
    assert torch.equal(got, want) and counts.tolist() == [30] * 14
    assert sum(held) == 14 and max(held) == {1: 1, 4800: 3}.get(limit, 14)
    for t in range(14):
        bits = [s for s in range(200) if int(mask[t, s // 32]) >> (s % 32) & 1]
        assert bits == want[t].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_physical_rows_are_those_of_the_cache(backend: str) -> None:
    case = cases.paged(*LENS)
    options = {**case.options, "backend": backend}
    relative = openmla.index_topk(case.q, case.keys, case.weights, 70, **options, rows="relative")
    rows = openmla.index_topk(case.q, case.keys, case.weights, 70, **options)
    table = case.options["block_table"]
    for t in range(14):
        line = 0 if t < 5 else 2
        p = relative[t][relative[t] >= 0].long()
        want = table[line].long()[p // 4] * 4 + p % 4
        assert rows[t, : len(p)].tolist() == want.tolist() and (rows[t, len(p) :] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 3), (4, 6), (10, 0)])
def test_kept_keys_win_over_every_score(backend: str, first: int, last: int) -> None:
    """T4: they count inside topk."""
    case = cases.paged([6], [50])
    got = openmla.index_topk(
        case.q,
        case.keys,
        case.weights,
        10,
        **case.options,
        rows="relative",
        keep_first=first,
        keep_last=last,
        backend=backend,
    )
    scores = openmla.indexer_scores(case.q, case.keys, case.weights, **case.options)
    for t in range(6):
        n = 45 + t
        kept = {*range(first), *range(n - last, n)}
        scores[t, sorted(kept)] = torch.inf
        want = openmla.select_topk(scores[t : t + 1, :n].contiguous(), 10)
        assert kept <= set(got[t].tolist()) and torch.equal(got[t], want[0])


def test_kept_keys_clip_to_the_row() -> None:
    case = cases.paged([3], [3])
    got = openmla.index_topk(
        case.q,
        case.keys,
        case.weights,
        4,
        **case.options,
        rows="relative",
        keep_first=2,
        keep_last=2,
    )
    assert got.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_defaults_do_not_matter(backend: str, dtype: torch.dtype) -> None:
    case = cases.paged(*LENS)
    options = {**case.options, "return_counts": True, "return_mask": True, "backend": backend}
    want = openmla.index_topk(case.q, case.keys, case.weights, 30, **options)
    k, slots = torch.ones(1, 128), torch.tensor([3])
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        got = openmla.index_topk(case.q, case.keys, case.weights, 30, **options)
        case.keys.append(k, slots)
        values, scales = case.keys.gather(slots)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert float(values[0, 9].float() * scales[0]) == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp4_keys_are_scored(backend: str) -> None:
    """As exactly as what is stored; ends count keys."""
    case = cases.paged(*LENS)
    keys = openmla.IndexCache.allocate(num_pages=case.keys.num_pages, page_size=4, scales="mxfp4")
    keys.data.fill_(0xFF)  # NaN, wherever no key is
    ends = torch.tensor([*range(20, 25), *range(140, 149)], dtype=torch.int32)
    for line, length in ((0, 60), (2, 200)):
        key = torch.arange(length)
        slots = case.options["block_table"][line].long()[key // 4] * 4 + key % 4
        keys.append(cases.keys(length, seed=line), slots)
    options = {**case.options, "ends": ends, "backend": backend}
    scores = openmla.indexer_scores(case.q, keys, case.weights, **options)
    got = openmla.index_topk(case.q, keys, case.weights, 9, **options, rows="relative")
    for t, end in enumerate(ends.tolist()):
        key = torch.arange(end)
        pages = case.options["block_table"][0 if t < 5 else 2].long()
        values, _ = keys.gather(pages[key // 4] * 4 + key % 4)
        products = (case.q[t].double() @ values.double().T).relu()
        exact = (case.weights[t].double()[:, None] * products).sum(0)
        torch.testing.assert_close(scores[t, :end].double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(got, openmla.select_topk(scores, 9, ends=ends))


def test_ends_say_how_many_keys_a_query_sees() -> None:
    """Keys that stand for four tokens each: 240 and 800 tokens, and a query of nobody at last."""
    case = cases.paged(*LENS)
    positions = torch.tensor([*range(235, 240), *range(791, 800)])
    ends = (positions + 1).div(4, rounding_mode="floor").int()
    assert len(set(ends.tolist())) > 3
    options = {**case.options, "ends": ends}
    every = openmla.indexer_scores(case.q, case.keys, case.weights, **options)
    want = openmla.select_topk(every, 30, ends=ends)
    for backend in BACKENDS:
        given = (case.q, case.keys, case.weights)
        scores = openmla.indexer_scores(*given, **options, backend=backend)
        got = openmla.index_topk(*given, 30, **options, rows="relative", backend=backend)
        assert torch.equal(got, want)
        for t, end in enumerate(ends.tolist()):
            line = 0 if t < 5 else 2
            key = torch.arange(end)
            pages = case.options["block_table"][line].long()
            values, scales = case.keys.gather(pages[key // 4] * 4 + key % 4)
            products = (case.q[t].double() @ values.double().T).relu()
            exact = (case.weights[t].double()[:, None] * products).sum(0) * scales
            torch.testing.assert_close(scores[t, :end].double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", [openmla.indexer_scores, openmla.index_topk])
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([61] + [0] * 13, "at most the 60 keys of its sequence, got 61 for query 0"),
        ([0] * 13, "ends: expected"),
    ],
)
def test_ends_past_a_sequence_are_refused(call: Any, ends: list[int], message: str) -> None:
    case = cases.paged(*LENS)
    more = {"topk": 4} if call is openmla.index_topk else {}
    with pytest.raises(InvalidArgument, match=message):
        call(case.q, case.keys, case.weights, ends=torch.tensor(ends).int(), **case.options, **more)


def test_a_query_of_no_sequence_sees_nothing() -> None:
    case = cases.paged([2], [9])
    q, weights = (torch.cat([x.float(), x[:1].float()]).to(x.dtype) for x in (case.q, case.weights))
    options = {**case.options, "rows": "relative"}
    got = openmla.index_topk(
        q, case.keys, weights, 2, ends=torch.tensor([1, 9, 0]).int(), **options
    )
    assert got[0].tolist() == [0, -1] and got[2].tolist() == [-1, -1]
    with pytest.raises(InvalidArgument, match="at most the 0 keys of its sequence, got 1"):
        openmla.index_topk(q, case.keys, weights, 2, ends=torch.ones(3).int(), **options)


def test_kernels_that_find_windows_themselves_are_not_planned_for_given_ends() -> None:
    """On an H200, one query a request has a kernel that knows the causal rule alone."""
    case = cases.paged([1, 1], [60, 200], heads=64, page_size=64)
    out = torch.empty(2, 256)
    for windows, shared in (
        (windows_of(case.options["cu_seqlens_q"], case.options["cache_lengths"], 2), True),
        (given_windows(None, torch.ones(2).int(), 2, 256, torch.device("cpu")), False),
    ):
        table = case.options["block_table"]
        op = ScoresOperands(case.q, case.weights, case.keys, windows.seen, table)
        assert bool(openmla.plan(op.problem(out), "h200").config.shared_queries) == shared


def test_nothing_to_do() -> None:
    case = cases.paged([0], [3])
    got = openmla.index_topk(case.q, case.keys, case.weights, 4, **case.options)
    assert got.shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("topk", {"topk": 0}),
        ("rows", {"rows": "absolute"}),
        ("rows", {"rows": None}),
        ("keep_first", {"keep_first": -1}),
        ("keep_last", {"keep_first": 3, "keep_last": 2}),
        ("scores_limit", {"scores_limit": 0}),
        ("keys", {"keys": (torch.zeros(1), torch.zeros(1))}),
        ("out", {"out": torch.zeros(14, 3, dtype=torch.int32)}),
        ("cu_seqlens_q", {"cu_seqlens_q": None}),
        ("return_mask", {"return_mask": None}),
        ("backend", {"backend": ""}),
    ],
)
def test_malformed_calls_are_refused(name: str, change: dict) -> None:
    case = cases.paged(*LENS)
    call = {"q": case.q, "keys": case.keys, "weights": case.weights, "topk": 4, **case.options}
    openmla.index_topk(**call)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
        openmla.index_topk(**{**call, **change})


def test_operators_are_well_formed() -> None:
    case = cases.paged(*LENS)
    o = case.options
    paging = o["cu_seqlens_q"], o["block_table"], o["cache_lengths"]
    out, mask = torch.zeros(14, 9, dtype=torch.int32), torch.zeros(14, 7, dtype=torch.int32)
    scores = torch.zeros(14, 200)
    calls = {
        "index_scores": (
            case.q,
            case.keys.data,
            None,
            4,
            case.weights,
            *paging,
            None,
            None,
            "auto",
            scores,
        ),
        "select_topk": (scores, 9, None, None, None, None, 0, False, "auto", out, None, mask),
        "index_topk": (
            case.q,
            case.keys.data,
            4,
            case.weights,
            *paging,
            None,
            9,
            True,
            0,
            1,
            9999,
            "auto",
            out,
            None,
            None,
        ),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.openmla, name).default
        # The schema test compares inputs in ways that torch does not implement for e4m3.
        e4m3 = any(getattr(x, "dtype", None) == torch.float8_e4m3fn for x in arguments)
        tests = ("test_autograd_registration", "test_faketensor")
        found = torch.library.opcheck(operator, arguments, test_utils=tests if e4m3 else "ALL")
        assert set(found.values()) == {"SUCCESS"}


def test_compiles_to_one_graph() -> None:
    def step(q, keys, weights, **options):
        return openmla.index_topk(q, keys, weights, 12, **options, return_counts=True)

    case = cases.paged(*LENS)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    got = compiled(case.q, case.keys, case.weights, **case.options)
    want = step(case.q, case.keys, case.weights, **case.options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
