"""indexer_scores on the CPU and the reference: the formula, windows, bits, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import openmla
from indexer import cases
from openmla import InvalidArgument
from openmla.indexer.cache import quantize
from openmla.kernels.cpu.indexer.plan import CpuIndexConfig

BACKENDS = ("cpu", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "least"), [(1, 0), (5, 600), (64, 0), (128, 0)])
def test_scores_of_a_pair_are_the_formula_inside_windows_only(
    backend: str, heads: int, least: int
) -> None:
    """least: the first key that any window has, inside a block of keys if it is not 0."""
    q, weights = cases.queries(6, heads)
    values, scales = quantize(cases.keys(1100), "fp32")
    starts = torch.tensor([0, 3, 1099, 700, 20, -5], dtype=torch.int32)
    starts = torch.where(starts < least, least + starts, starts)
    ends = torch.tensor([1100, 900, 1100, 700, 10, 5000], dtype=torch.int32)
    out = torch.full((6, 1100), 77.0)
    got = openmla.indexer_scores(
        q, (values, scales), weights, starts=starts, ends=ends, out=out, backend=backend
    )
    assert got is out
    column = torch.arange(1100)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    want = cases.formula(q, values, scales, weights)
    assert torch.allclose(got[inside].double(), want[inside], rtol=1e-4, atol=1e-5)
    assert (got[~inside] == 77.0).all()


def test_as_many_queries_as_are_taken_together_and_one_more() -> None:
    queries = CpuIndexConfig().batch_queries + 1
    q, weights = cases.queries(queries, 2)
    values, scales = quantize(cases.keys(9), "fp32")
    got = openmla.indexer_scores(q, (values, scales), weights, backend="cpu")
    assert torch.allclose(got.double(), cases.formula(q, values, scales, weights), rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_windows_every_key_is_scored(backend: str) -> None:
    q, weights = cases.queries(3, 4)
    values, scales = quantize(cases.keys(33), "ue8m0")
    got = openmla.indexer_scores(q, (values, scales), weights, backend=backend)
    want = cases.formula(q, values, scales, weights)
    assert got.shape == (3, 33) and got.stride(0) % 4 == 0
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_pages_hold_the_same_keys(backend: str, page_size: int) -> None:
    q_lens, k_lens = [3, 0, 5, 4], [20, 6, 130, 2]
    case = cases.paged(q_lens, k_lens, page_size=page_size)
    width = case.options["block_table"].shape[1] * page_size
    out = torch.full((12, width), 5e5)
    openmla.indexer_scores(
        case.q, case.keys, case.weights, **case.options, out=out, backend=backend
    )
    t = 0
    for b, (queries, length) in enumerate(zip(q_lens, k_lens, strict=True)):
        values, scales = quantize(cases.keys(length, b), "ue8m0")
        for i in range(queries):
            n = max(length - queries + i + 1, 0)
            row = slice(t, t + 1)
            want = cases.formula(case.q[row], values[:n], scales[:n], case.weights[row])
            assert torch.allclose(out[t, :n].double(), want[0], rtol=1e-4, atol=1e-5)
            assert (out[t, n:] == 5e5).all()
            t += 1


def test_bits_depend_neither_on_the_batch_nor_on_the_chunk() -> None:
    """S1: a query alone, with fewer keys after it, has the bits it has in the batch."""
    case = cases.paged([6, 7], [900, 1300], heads=64, page_size=16)
    whole = openmla.indexer_scores(case.q, case.keys, case.weights, **case.options)
    again = openmla.indexer_scores(case.q, case.keys, case.weights, **case.options)
    table = case.options["block_table"]
    for t, (line, length) in {2: (0, 897), 8: (1, 1296), 12: (1, 1300)}.items():
        alone = openmla.indexer_scores(
            case.q[t : t + 1],
            case.keys,
            case.weights[t : t + 1],
            cu_seqlens_q=torch.tensor([0, 1]).int(),
            block_table=table[line : line + 1],
            cache_lengths=torch.tensor([length]).int(),
        )
        assert torch.equal(alone[0, :length], whole[t, :length])
        assert torch.equal(again[t, :length], whole[t, :length])


def test_rows_past_the_last_sequence_are_not_written() -> None:
    case = cases.paged([3], [8])
    options = {**case.options, "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}
    out = torch.full((3, 8), 9.0)
    openmla.indexer_scores(case.q, case.keys, case.weights, **options, out=out)
    assert (out[2] == 9.0).all() and (out[1] != 9.0).all()


def test_empty_calls() -> None:
    case = cases.paged([0], [3])
    got = openmla.indexer_scores(case.q, case.keys, case.weights, **case.options)
    assert got.shape == (0, 4)
    q, weights = cases.queries(2, 4)
    nothing = quantize(torch.zeros(0, 128), "fp32")
    assert openmla.indexer_scores(q, nothing, weights).shape == (2, 0)


def valid() -> dict:
    case = cases.paged([2, 3], [9, 5])
    return {"q": case.q, "keys": case.keys, "weights": case.weights, **case.options}


def side_by_side(call: dict, *more: str) -> dict:
    """Keys without pages, beside some of the arguments that say where pages are."""
    paging = ("cu_seqlens_q", "block_table", "cache_lengths")
    pair = call["q"][:, 0].contiguous(), torch.zeros(5)
    return {"keys": pair} | {name: None for name in paging if name not in more}


REFUSED = {
    "q": [
        lambda c: {"q": c["q"].float()},
        lambda c: {"q": c["q"][:, :, :64]},
        lambda c: {"q": c["q"][:, :0]},
        lambda c: {"q": None},
    ],
    "weights": [
        lambda c: {"weights": c["weights"].double()},
        lambda c: {"weights": c["weights"][:, :3]},
    ],
    "keys": [lambda c: {"keys": c["keys"].data}, lambda c: {"keys": (1, 2, 3)}],
    r"keys\[0\]": [lambda c: {"keys": (torch.zeros(4, 128), torch.zeros(4))}],
    r"keys\[1\]": [lambda c: {"keys": (c["q"][:, 0].contiguous(), torch.zeros(4))}],
    "cu_seqlens_q": [
        lambda c: {"cu_seqlens_q": None},
        lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].long()},
        lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][:0]},
        lambda c: {"cu_seqlens_q": torch.tensor([0, 4, 2], dtype=torch.int32)},
        lambda c: side_by_side(c, "cu_seqlens_q"),
    ],
    "block_table": [
        lambda c: side_by_side(c, "block_table"),
        lambda c: {"block_table": torch.where(torch.arange(3) == 2, 99, c["block_table"])},
        lambda c: {"block_table": None},
        lambda c: {"block_table": c["block_table"] * 0 - 1},
        lambda c: {"block_table": c["block_table"] * 0 + 99},
    ],
    "cache_lengths": [
        lambda c: side_by_side(c, "cache_lengths"),
        lambda c: {"cache_lengths": c["cache_lengths"] + 100},
        lambda c: {"cache_lengths": c["cache_lengths"] - 100},
        lambda c: {"cache_lengths": None},
    ],
    "starts": [lambda c: {"starts": torch.zeros(5, dtype=torch.int32)}],
    "ends": [
        lambda c: {"ends": torch.zeros(5)},
        lambda c: {"ends": torch.zeros(4, dtype=torch.int32)},
        lambda c: {"ends": torch.full((5,), 100, dtype=torch.int32)},
    ],
    "out": [
        lambda c: {"out": torch.zeros(5, 12).double()},
        lambda c: {"out": torch.zeros(4, 12)},
        lambda c: {"out": torch.zeros(5, 8)},
        lambda c: {"out": torch.zeros(1, 12).expand(5, 12)},
        lambda c: {"out": torch.zeros(12, 5).T},
    ],
    "backend": [lambda c: {"backend": "gpu"}],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, all_ in REFUSED.items() for change in all_]
)
def test_malformed_calls_are_refused(name: str, change) -> None:
    call = valid()
    openmla.indexer_scores(**call)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
        openmla.indexer_scores(**{**call, **change(call)})


def test_out_in_the_memory_of_an_input_is_refused() -> None:
    call = valid()
    pool = torch.zeros(5, 12)
    call["weights"] = pool[:, :8].copy_(call["weights"])
    with pytest.raises(InvalidArgument, match=r"^out: expected memory of its own"):
        openmla.indexer_scores(**call, out=pool)


def test_gradients_are_refused() -> None:
    call = valid()
    call["weights"] = call["weights"].requires_grad_()
    with pytest.raises(openmla.Unsupported, match="weights requires a gradient"):
        openmla.indexer_scores(**call)


def test_a_family_of_another_chip_is_unsupported() -> None:
    with pytest.raises(openmla.Unsupported, match="hopper"):
        openmla.indexer_scores(**valid(), backend="hopper")


def test_fp32_scales_are_read_like_powers_of_two() -> None:
    case = cases.paged([2], [7])
    fp32 = replace(case.keys, scales="fp32")
    fp32.append(
        cases.keys(7),
        case.options["block_table"][0].long().repeat_interleave(4)[:7] * 4 + torch.arange(7) % 4,
    )
    got = openmla.indexer_scores(case.q, fp32, case.weights, **case.options)
    want = cases.formula(case.q, *quantize(cases.keys(7), "fp32"), case.weights)
    assert torch.allclose(got[1, :7].double(), want[1], rtol=1e-4, atol=1e-5)
