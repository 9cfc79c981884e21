"""The FlashMLA shim against the formula, in FlashMLA's own conventions."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import calls
import formula
from openmla.compat.flash_mla import flash_mla_sparse_fwd


def test_signature_is_flash_mlas_plus_out():
    names = list(inspect.signature(flash_mla_sparse_fwd).parameters)
    expected = ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]
    assert names == [*expected, "use_legacy", "return_log2_lse", "out"]
    assert inspect.signature(flash_mla_sparse_fwd).parameters["d_v"].default == 512


@pytest.mark.parametrize("heads", [1, 5, 64], ids="heads={}".format)
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_values_match_the_formula(heads: int, with_sink: bool):
    q = calls.numbers(4, heads, 12)
    kv = calls.numbers(9, 1, 12, seed=1)
    indices = torch.tensor([[0, 3, 8], [4, -1, 4], [9, 100, 2], [7, 6, 5]], dtype=torch.int32)[
        :, None
    ]
    topk_length = torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    sink = calls.numbers(heads, seed=2) if with_sink else None
    out, max_logits, lse = flash_mla_sparse_fwd(
        q, kv, indices, 0.4, d_v=8, attn_sink=sink, topk_length=topk_length
    )
    want = formula.listed(q, kv[:, 0], [[0, 3, 8], [4, 4], [2], [7]], 8, 0.4, sink)
    formula.assert_close(out, want.out)
    formula.assert_close(max_logits, want.max_logits)
    formula.assert_close(lse, want.lse)  # natural log, without the sink


def test_row_without_a_key_is_zero_minus_infinity_plus_infinity():
    call = calls.flash_mla()
    call["indices"][1] = torch.tensor([-1, 7, 2**31 - 1])
    out, max_logits, lse = flash_mla_sparse_fwd(**call, attn_sink=torch.tensor([3.0, torch.inf]))
    assert formula.same_bits(out[1], torch.zeros(2, 8))
    assert formula.same_bits(max_logits[1], torch.full((2,), -torch.inf))
    assert formula.same_bits(lse[1], torch.full((2,), torch.inf))
    assert lse[0].isfinite().all() and lse[2:].isfinite().all()


def test_default_widths_are_576_and_512_in_bf16():
    q = calls.numbers(2, 3, 576, dtype=torch.bfloat16)
    kv = calls.numbers(5, 1, 576, seed=1, dtype=torch.bfloat16)
    indices = torch.tensor([[[0, 1]], [[4, 4]]], dtype=torch.int32)
    out, _, lse = flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    want = formula.listed(q, kv[:, 0], [[0, 1], [4, 4]], 512, 576**-0.5)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 3, 512)
    formula.assert_close(out, want.out, bound=2**-8)
    formula.assert_close(lse, want.lse)


def test_out_is_written_in_place_and_returned():
    call = calls.flash_mla()
    out = torch.full((5, 2, 8), torch.nan)
    result, _, _ = flash_mla_sparse_fwd(**call, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert formula.same_bits(out, flash_mla_sparse_fwd(**call)[0])


def test_lse_to_base_2():
    call = calls.flash_mla()
    call["indices"][1] = -1
    out, most, natural = flash_mla_sparse_fwd(**call, use_legacy=True, return_log2_lse=False)
    same, again, in_bits = flash_mla_sparse_fwd(**call, return_log2_lse=True)
    assert formula.same_bits(out, same) and formula.same_bits(most, again)
    formula.assert_close(in_bits, natural.double() / math.log(2))
    assert in_bits[1].isposinf().all()
