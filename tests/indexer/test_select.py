"""select_topk on the CPU and the reference: the tie rule, windows, how positions are written."""

from __future__ import annotations

import doctest

import pytest
import torch

import openmla
from indexer import cases
from openmla import InvalidArgument
from openmla.indexer import problem, reference, windows
from openmla.kernels.cpu.indexer import select as cpu_select

BACKENDS = ("cpu", "reference")
NAN, INF = float("nan"), float("inf")


def test_examples() -> None:
    for module in (problem, reference, windows, cpu_select):
        assert doctest.testmod(module).failed == 0


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("topk", [1, 7, 64, 99, 100, 130])
def test_selection_is_a_stable_sort(backend: str, kind: str, topk: int) -> None:
    scores = cases.scores_of(kind, 5, 100)
    starts, ends = int32(0, 10, 99, 50, -3), int32(100, 90, 100, 20, 400)
    got = openmla.select_topk(scores, topk, starts=starts, ends=ends, backend=backend)
    assert torch.equal(got, cases.sorted_topk(scores, topk, starts, ends))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_zeros_and_nan(backend: str) -> None:
    """T1, by hand."""
    row = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0, NAN, -INF]])
    for topk, want in (
        (2, [0, 1]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 3, 4, 6]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
    ):
        assert openmla.select_topk(row, topk, backend=backend).tolist() == [want]
    all_nan = torch.full((1, 4), NAN)
    assert openmla.select_topk(all_nan, 3, backend=backend).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_and_minus_one(backend: str) -> None:
    """T2: counts are min(topk, n); a window that ends before it starts is an empty row."""
    scores = torch.randn(4, 9)
    got, counts = openmla.select_topk(
        scores,
        5,
        starts=int32(0, 4, 8, 0),
        ends=int32(9, 6, 3, -2),
        return_counts=True,
        backend=backend,
    )
    assert counts.tolist() == [5, 2, 0, 0]
    assert got[1].tolist() == [0, 1, -1, -1, -1] and (got[2:] == -1).all()


def test_short_rows_are_not_read() -> None:
    got = openmla.select_topk(torch.full((2, 4), NAN), 4)
    assert got.tolist() == [[0, 1, 2, 3]] * 2


def test_a_selection_is_a_function_of_its_row_alone() -> None:
    """T3: the same in any batch."""
    scores = cases.scores_of("coarse", 6, 300)
    whole = openmla.select_topk(scores, 40)
    for row in range(6):
        assert torch.equal(openmla.select_topk(scores[row : row + 1], 40)[0], whole[row])


def test_topk_of_the_shards_topk_is_the_topk() -> None:
    """T3: context parallelism, each rank having every fourth key."""
    scores = cases.scores_of("coarse", 3, 256)
    whole = openmla.select_topk(scores, 32)
    for t in range(3):
        found = []
        for rank in range(4):
            columns = torch.arange(rank, 256, 4)
            part = openmla.select_topk(scores[t : t + 1, columns].contiguous(), 32)
            found += columns[part[0].long()].tolist()
        candidates = torch.tensor(sorted(found))
        pick = openmla.select_topk(scores[t : t + 1, candidates].contiguous(), 32)
        assert torch.equal(candidates[pick[0].long()].int(), whole[t])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_has_the_bits_of_the_positions(backend: str) -> None:
    scores, starts, ends = torch.randn(3, 70), int32(0, 5, 9), int32(70, 69, 9)
    got, mask = openmla.select_topk(
        scores, 40, starts=starts, ends=ends, return_mask=True, backend=backend
    )
    assert mask.shape == (3, 4) and mask.dtype == torch.int32
    for row in range(3):
        bits = [s for s in range(96) if int(mask[row, s // 32]) >> (s % 32) & 1]
        assert bits == [p for p in got[row].tolist() if p >= 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_physical_rows(backend: str) -> None:
    """T5: block_table[b, p // page] * page + p % page."""
    scores = torch.randn(3, 12)
    table = int32(7, 3, 9, 1, 0, 4).view(2, 3)
    options = {"block_table": table, "cu_seqlens_q": int32(0, 1, 3), "page_size": 4}
    ends = int32(12, 11, 12)
    plain = openmla.select_topk(scores, 6, ends=ends, backend=backend)
    rows = openmla.select_topk(scores, 6, ends=ends, backend=backend, **options)
    for t, line in enumerate((0, 1, 1)):
        want = [int(table[line, p // 4]) * 4 + p % 4 for p in plain[t].tolist()]
        assert rows[t].tolist() == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_starts_gives_columns(backend: str) -> None:
    scores, starts = torch.randn(2, 20), int32(3, 12)
    options = {"starts": starts, "backend": backend}
    relative = openmla.select_topk(scores, 10, **options)
    columns = openmla.select_topk(scores, 10, add_starts=True, **options)
    assert torch.equal(columns, torch.where(relative < 0, -1, relative + starts[:, None]))


def test_out_is_written_and_returned() -> None:
    scores = torch.randn(2, 9)
    wide = torch.full((2, 8), 55, dtype=torch.int32)
    got = openmla.select_topk(scores, 4, out=wide[:, :4])
    assert torch.equal(got, openmla.select_topk(scores, 4)) and (wide[:, 4:] == 55).all()


REFUSED = {
    "scores": [
        {"scores": torch.zeros(2, 9).double()},
        {"scores": torch.zeros(9)},
        {"scores": torch.zeros(9, 2).T},
    ],
    "topk": [{"topk": 0}, {"topk": 2.0}, {"topk": True}, {"topk": None}],
    "starts": [{"starts": torch.zeros(2)}, {"starts": int32(0)}],
    "ends": [{"ends": torch.zeros(2).long()}],
    "page_size": [
        {"page_size": 4},
        {"block_table": int32(0).view(1, 1), "cu_seqlens_q": int32(0, 2)},
    ],
    "cu_seqlens_q": [
        {"cu_seqlens_q": int32(0, 2)},
        {"block_table": int32(0).view(1, 1), "page_size": 64},
        {"block_table": int32(0).view(1, 1), "page_size": 64, "cu_seqlens_q": int32(0, 3)},
    ],
    "block_table": [
        {"block_table": int32(0), "page_size": 64, "cu_seqlens_q": int32(0, 2)},
        {"block_table": int32(0).view(1, 1), "page_size": 4, "cu_seqlens_q": int32(0, 2)},
    ],
    "add_starts": [
        {"add_starts": 1},
        {
            "add_starts": True,
            "block_table": int32(0).view(1, 1),
            "page_size": 64,
            "cu_seqlens_q": int32(0, 2),
        },
    ],
    "out": [{"out": torch.zeros(2, 3)}, {"out": torch.zeros(2, 4, dtype=torch.int32)}],
    "return_counts": [{"return_counts": 1}],
    "return_mask": [{"return_mask": "yes"}],
    "backend": [{"backend": "cuda"}],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, all_ in REFUSED.items() for change in all_]
)
def test_malformed_calls_are_refused(name: str, change) -> None:
    call = {"scores": torch.randn(2, 9), "topk": 3}
    openmla.select_topk(**call)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
        openmla.select_topk(**{**call, **change})
