"""merge_states: parts over disjoint keys make the whole; empty parts leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla import reference

INF = torch.inf


def merged(call: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return openmla.merge_states(**call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_keys_merge_to_the_whole(dtype: torch.dtype):
    q, k = calls.numbers(6, 2, 12, dtype=dtype), calls.numbers(40, 2, 12, seed=1, dtype=dtype)
    v = calls.numbers(40, 2, 6, seed=2, dtype=dtype)
    out, lse = None, None
    for first, last in ((0, 13), (13, 14), (14, 40)):
        part = openmla.mla_prefill(
            q, k[first:last], None, v[first:last],
            cu_seqlens_q=formula.cu_seqlens([6]), cu_seqlens_k=formula.cu_seqlens([last - first]),
            causal=False, return_lse=True,
        )  # fmt: skip
        out, lse = part if out is None else openmla.merge_states(out, lse, *part)
    want = formula.ragged(q, k, v, [6], [40], 12**-0.5, causal=False)
    # Every stored part is rounded once to dtype: half a unit each, three parts and two merges.
    unit = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    formula.assert_close(out, want.out, bound=3 * unit)
    formula.assert_close(lse, want.lse, bound=4e-6)


def test_chunked_prefill_with_a_causal_last_chunk():
    q, k, v = calls.numbers(4, 2, 12), calls.numbers(11, 2, 12, seed=1), calls.numbers(11, 2, 6)
    new = openmla.mla_prefill(
        q, k[7:], None, v[7:], cu_seqlens_q=formula.cu_seqlens([4]), return_lse=True
    )
    context = openmla.mla_prefill(
        q, k[:7], None, v[:7], causal=False, return_lse=True,
        cu_seqlens_q=formula.cu_seqlens([4]), cu_seqlens_k=formula.cu_seqlens([7]),
    )  # fmt: skip
    want = formula.ragged(q, k, v, [4], [11], 12**-0.5)
    for got in (openmla.merge_states(*context, *new), openmla.merge_states(*new, *context)):
        formula.assert_close(got[0], want.out)
        formula.assert_close(got[1], want.lse)


@pytest.mark.parametrize("marker", [-INF, INF], ids=["-inf", "+inf"])
@pytest.mark.parametrize("rubbish", [0.0, 3.5, torch.nan, INF], ids=str)
@pytest.mark.parametrize("empty", ["a", "b"])
def test_an_empty_part_is_ignored_bit_for_bit(marker: float, rubbish: float, empty: str):
    call = calls.merge()
    full = "b" if empty == "a" else "a"
    call[f"out_{full}"][0, 0] = torch.tensor([-0.0, 0.0, 1e-45, -3e38, 1.1, -1.1])
    call[f"out_{empty}"].fill_(rubbish)
    call[f"lse_{empty}"].fill_(marker)
    out, lse = merged(call)
    assert formula.same_bits(out, call[f"out_{full}"])
    assert formula.same_bits(lse, call[f"lse_{full}"])


@pytest.mark.parametrize("markers", [(-INF, -INF), (INF, INF), (-INF, INF)], ids=str)
def test_two_empty_parts_are_plus_zero_and_minus_infinity(markers: tuple[float, float]):
    call = calls.merge()
    call["out_a"].fill_(torch.nan)
    call["out_b"].fill_(-1.0)
    call["lse_a"].fill_(markers[0])
    call["lse_b"].fill_(markers[1])
    out, lse = merged(call)
    assert formula.same_bits(out, torch.zeros(5, 2, 6))
    assert formula.same_bits(lse, torch.full((5, 2), -INF))


def test_equal_parts_average_and_add_log_two():
    call = calls.merge()
    call["lse_b"] = call["lse_a"].clone()
    out, lse = merged(call)
    formula.assert_close(out, (call["out_a"].double() + call["out_b"].double()) / 2)
    formula.assert_close(lse, call["lse_a"].double() + torch.log(torch.tensor(2.0).double()))


@pytest.mark.parametrize("gap", [1e3, 1e30, 3e38], ids=str)
def test_parts_far_apart_do_not_overflow(gap: float):
    call = calls.merge()
    call["lse_a"].fill_(gap)
    call["lse_b"].fill_(-gap)
    out, lse = merged(call)
    assert formula.same_bits(out, call["out_a"])
    assert formula.same_bits(lse, call["lse_a"])


def test_strided_parts_as_head_major_libraries_return_them():
    call = calls.merge()
    strided = {name: value.transpose(0, 1).contiguous().transpose(0, 1)
               for name, value in call.items()}  # fmt: skip
    for got, want in zip(merged(strided), merged(call), strict=True):
        assert formula.same_bits(got, want)


@pytest.mark.parametrize("marker", [-INF, INF], ids=["-inf", "+inf"])
def test_the_reference_follows_the_same_rules(marker: float):
    call = calls.merge()
    call["lse_a"][0], call["out_a"][0] = marker, torch.nan
    call["lse_b"][:2] = marker
    want_out, want_lse = reference.merge(**call)
    out, lse = merged(call)
    formula.assert_close(out, want_out)
    formula.assert_close(lse, want_lse)
