"""NaN or Inf in a key reaches only the rows that see it, also within one tile."""

import pytest
import torch

import openmla
from openmla.kernels.cpu.online_softmax import is_finite

OFFSETS = torch.tensor([0, 6], dtype=torch.int32)
BROKEN_KEY = 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_dense_rows_before_a_broken_value_stay_clean(value):
    q, k_nope, v = (torch.randn(6, 2, width) for width in (24, 16, 8))
    k_rope = torch.randn(6, 8)
    clean = openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=OFFSETS)
    v[BROKEN_KEY, 1, 3] = value
    broken = openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=OFFSETS)
    torch.testing.assert_close(broken[:BROKEN_KEY], clean[:BROKEN_KEY])
    torch.testing.assert_close(broken[:, 0], clean[:, 0])
    assert not torch.isfinite(broken[BROKEN_KEY:, 1, 3]).any()
    assert torch.isfinite(broken[BROKEN_KEY:, 1, :3]).all()


def test_latent_rows_before_a_broken_row_stay_clean():
    cache = openmla.LatentCache.allocate(num_pages=1, page_size=8, latent=16, rope=8)
    cache.append(torch.randn(8, 16), torch.randn(8, 8), torch.arange(8))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([6], dtype=torch.int32)

    def call():
        return openmla.mla_prefill_latent(q, cache, table, lengths, cu_seqlens_q=OFFSETS, scale=0.2)

    q = torch.randn(6, 3, 24, dtype=torch.bfloat16)
    clean = call()
    cache.data[0, BROKEN_KEY] = torch.nan
    broken = call()
    assert torch.equal(broken[:BROKEN_KEY], clean[:BROKEN_KEY])
    assert broken[BROKEN_KEY:].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_finite_numbers_are_told_from_others_even_where_their_sum_is_neither(value):
    largest = torch.finfo(torch.float32).max
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.full((300,), largest))  # their sum overflows
    assert is_finite(torch.tensor([largest, -largest] * 50))
    for place in (0, 77, 299):
        x = torch.zeros(300)
        x[place] = value
        assert not is_finite(x)
        x[(place + 1) % 300] = -value
        assert not is_finite(x)
