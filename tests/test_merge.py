"""merge_states and merge_many: parts over disjoint keys make the whole, empty parts leave no trace.

merge_many rounds once, however many parts there are; a chain of merge_states rounds at every link.
"""

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
            q,
            k[first:last],
            None,
            v[first:last],
            cu_seqlens_q=formula.cu_seqlens([6]),
            cu_seqlens_k=formula.cu_seqlens([last - first]),
            causal=False,
            return_lse=True,
        )
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
        q,
        k[:7],
        None,
        v[:7],
        causal=False,
        return_lse=True,
        cu_seqlens_q=formula.cu_seqlens([4]),
        cu_seqlens_k=formula.cu_seqlens([7]),
    )
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
    strided = {
        name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in call.items()
    }
    for got, want in zip(merged(strided), merged(call), strict=True):
        assert formula.same_bits(got, want)


@pytest.mark.parametrize("marker", [-INF, INF], ids=["-inf", "+inf"])
def test_the_reference_follows_the_same_rules(marker: float):
    call = calls.merge()
    call["lse_a"][0], call["out_a"][0] = marker, torch.nan
    call["lse_b"][:2] = marker
    want_out, want_lse = reference.merge(
        [call["out_a"], call["out_b"]], [call["lse_a"], call["lse_b"]]
    )
    out, lse = merged(call)
    formula.assert_close(out, want_out)
    formula.assert_close(lse, want_lse)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of a stored result, as a share of it.
HALF_UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8 / 2, torch.float16: 2**-11 / 2}


def parts(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """outs [count, 5, 2, 6] and lses [count, 5, 2]; some parts weigh far more than others."""
    return calls.numbers(count, 5, 2, 6, dtype=dtype), 3 * calls.numbers(count, 5, 2, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_many_parts_are_rounded_once(count: int, dtype: torch.dtype):
    outs, lses = parts(count, dtype)
    out, lse = openmla.merge_many(outs, lses)
    want_out, want_lse = reference.merge(list(outs), list(lses))
    assert out.dtype == dtype
    # A wider type than float32 adds float32 parts; float32 adds the others, each sum with its own
    # rounding, which may tip a result that lies between two stored numbers.
    sums = 0 if dtype == torch.float32 else count * 2**-24 * outs.double().abs().amax()
    error = (out.double() - want_out).abs()
    assert bool((error <= HALF_UNIT[dtype] * 2 * want_out.abs() + sums).all())
    formula.assert_close(lse, want_lse, bound=2**-23)


def test_a_chain_of_merges_rounds_at_every_link():
    outs, lses = parts(16, torch.bfloat16)
    lses.zero_()
    want, _ = reference.merge(list(outs), list(lses))
    chained = (outs[0], lses[0])
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        chained = openmla.merge_states(*chained, out, lse)
    errors = [
        float((x.double() - want).square().mean().sqrt())
        for x in (chained[0], openmla.merge_many(outs, lses)[0])
    ]
    assert errors[0] > 2 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_parts_are_merge_states(dtype: torch.dtype):
    outs, lses = parts(2, dtype)
    got = openmla.merge_many(outs, lses)
    want = openmla.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", [list, tuple])
def test_parts_need_not_lie_together(kind: type):
    outs, lses = parts(3)
    apart = kind(x.transpose(0, 1).contiguous().transpose(0, 1) for x in outs)
    want = openmla.merge_many(outs, lses)
    for got in (openmla.merge_many(apart, kind(lses)), openmla.merge_many(apart, lses)):
        assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_one_part_is_returned_as_it_is():
    outs, lses = parts(1)
    outs[0, 0, 0] = torch.tensor([-0.0, 0.0, 1e-45, -3e38, 1.1, -1.1])
    out, lse = openmla.merge_many(outs, lses)
    assert formula.same_bits(out, outs[0]) and formula.same_bits(lse, lses[0])
    assert out.data_ptr() != outs.data_ptr()


@pytest.mark.parametrize("marker", [-INF, INF], ids=["-inf", "+inf"])
@pytest.mark.parametrize("rubbish", [3.5, torch.nan, INF], ids=str)
def test_empty_parts_among_many_are_ignored_bit_for_bit(marker: float, rubbish: float):
    outs, lses = parts(5)
    want = openmla.merge_many(outs[[1, 4]], lses[[1, 4]])
    for empty in (0, 2, 3):
        outs[empty], lses[empty] = rubbish, marker
    got = openmla.merge_many(outs, lses)
    assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))
    outs[:, 2], lses[:, 2] = rubbish, marker
    out, lse = openmla.merge_many(outs, lses)
    assert formula.same_bits(out[2], torch.zeros(2, 6))
    assert formula.same_bits(lse[2], torch.full((2,), -INF))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_default_dtype_changes_nothing(dtype: torch.dtype):
    outs, lses = parts(4, dtype)
    lses[0, 0] = -INF
    want = openmla.merge_many(outs, lses)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = openmla.merge_many(outs, lses)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))
