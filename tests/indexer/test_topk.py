"""index_topk: scores and selection in chunks, kept keys, operators under torch.compile."""

from __future__ import annotations

import pytest
import torch

import openmla
from indexer import cases
from openmla import InvalidArgument

BACKENDS = ("cpu", "reference")
LENS = ([5, 0, 9], [60, 3, 200])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [1, 4 * 200 * 3, 512 << 20])
def test_chunks_change_nothing(backend: str, limit: int) -> None:
    """One row at a time, three, all: the same selection as by hand."""
    case = cases.paged(*LENS)
    options = {**case.options, "backend": backend}
    scores = openmla.indexer_scores(case.q, case.keys, case.weights, **options)
    ends = torch.tensor([*range(56, 61), *range(192, 201)], dtype=torch.int32)
    want = openmla.select_topk(scores, 30, ends=ends)
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
