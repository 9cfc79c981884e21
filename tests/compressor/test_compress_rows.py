"""`compress_rows` against its definition, and what it refuses."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.compressor import api, compress_rows
from openmla.compressor.reference import reference
from openmla.errors import InvalidArgument

KINDS = [(128, False, True), (4, True, True), (4, False, True), (2, False, False), (3, True, False)]


def drawn(tokens: int, ratio: int, overlap: bool, biased: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(ratio)
    columns = 5 * (2 if overlap else 1)
    bias = torch.randn(ratio, columns) if biased else None
    return torch.randn(tokens, columns), 3 * torch.randn(tokens, columns), bias  # type: ignore[return-value]


def test_examples() -> None:
    assert doctest.testmod(api).failed == 0


@pytest.mark.parametrize(("ratio", "overlap", "biased"), KINDS)
def test_equals_the_definition(ratio: int, overlap: bool, biased: bool) -> None:
    kv, gate, bias = drawn(3 * ratio, ratio, overlap, biased)
    expected = reference(kv, gate, bias, ratio=ratio, overlap=overlap)
    got = compress_rows(kv, gate, bias, ratio=ratio, overlap=overlap)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    exact = compress_rows(kv.double(), gate, bias, ratio=ratio, overlap=overlap)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("ratio", "overlap", "biased"), KINDS)
def test_chunks_have_the_bits_of_the_whole(ratio: int, overlap: bool, biased: bool) -> None:
    """`previous` may be whole tokens, or those columns of them that are read."""
    kv, gate, bias = drawn(6 * ratio, ratio, overlap, biased)
    given: dict[str, Any] = {"bias": bias, "ratio": ratio, "overlap": overlap}
    whole = compress_rows(kv, gate, **given)
    for columns in (5, kv.shape[1]) if overlap else (0,):
        parts = []
        for start in range(0, 6 * ratio, 2 * ratio):
            part, last = slice(start, start + 2 * ratio), slice(start - ratio, start)
            previous = (kv[last, :columns], gate[last, :columns]) if overlap and start else None
            parts.append(compress_rows(kv[part], gate[part], previous=previous, **given))
        assert torch.equal(torch.cat(parts), whole)


def test_sequences_of_a_batch_do_not_mix() -> None:
    kv, gate, bias = drawn(24, 4, True, True)
    batch = [x.view(2, 12, -1) for x in (kv, gate)]
    got = compress_rows(*batch, bias, ratio=4, overlap=True)
    alone = [compress_rows(*(x[i] for x in batch), bias, ratio=4, overlap=True) for i in (0, 1)]
    assert torch.equal(got, torch.stack(alone))


def test_sixteen_bits_are_rounded_once() -> None:
    kv, gate, bias = (x.bfloat16() for x in drawn(16, 4, True, True))
    got = compress_rows(kv, gate, bias, ratio=4, overlap=True)
    expected = reference(kv, gate, bias, ratio=4, overlap=True)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())


def test_one_token_is_its_row_and_none_has_no_row() -> None:
    kv = torch.randn(3, 5)
    assert compress_rows(kv, ratio=1) is kv
    assert compress_rows(kv[:0], kv[:0], ratio=4).shape == (0, 5)
    assert compress_rows(kv[:0, :4], kv[:0, :4], ratio=4, overlap=True).shape == (0, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ratio": 0}, "ratio: expected an int of at least 1"),
        ({"ratio": 3}, "kv: expected a multiple of 3 tokens, got 8"),
        ({"kv": torch.ones(8, 6, dtype=torch.int32)}, "kv: expected floats"),
        ({"gate": None}, "gate: expected floats as kv has them, at ratio 4, got None"),
        ({"gate": torch.ones(8, 5)}, r"gate: expected \[8, 6\] on cpu, as kv"),
        ({"bias": torch.ones(4, 3)}, r"bias: expected \[4, 6\]"),
        ({"previous": (torch.ones(4, 6),) * 2}, "previous: expected None without overlap"),
        (
            {"overlap": True, "previous": (torch.ones(4, 6), torch.ones(3, 6))},
            r"previous\[1\]: expected \[4, 3\]",
        ),
        (
            {"overlap": True, "kv": torch.ones(8, 5), "gate": torch.ones(8, 5)},
            "kv: expected an even number of columns, with overlap, got 5",
        ),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"kv": torch.ones(8, 6), "gate": torch.ones(8, 6), "ratio": 4}
    with pytest.raises(InvalidArgument, match=message):
        compress_rows(**{**given, **changed})
