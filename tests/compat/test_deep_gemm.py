"""DeepGEMM's calls: its shapes and conventions, openmla's scores."""

from __future__ import annotations

import pytest
import torch

from indexer import cases
from openmla.compat import deep_gemm
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import IndexCache, quantize


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_scores_inside_windows_and_minus_infinity_outside() -> None:
    q, weights = cases.queries(3, 4)
    values, scales = quantize(cases.keys(40), "fp32")
    starts, ends = int32(0, 5, 9), int32(40, 12, 9)
    got = deep_gemm.fp8_mqa_logits(q, (values, scales), weights, starts, ends)
    column = torch.arange(40)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    want = cases.formula(q, values, scales, weights)
    assert torch.allclose(got[inside].double(), want[inside], rtol=1e-4, atol=1e-5)
    assert (got[~inside] == -torch.inf).all()


def test_compressed_rows_begin_at_the_window() -> None:
    q, weights = cases.queries(3, 4)
    kv = quantize(cases.keys(40), "fp32")
    starts, ends = int32(0, 5, 38), int32(7, 12, 40)
    plain = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends)
    got = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends, max_seqlen_k=7)
    assert got.shape == (3, 7)
    for t in range(3):
        n = int(ends[t] - starts[t])
        assert torch.equal(got[t, :n], plain[t, starts[t] : ends[t]])
        assert (got[t, n:] == -torch.inf).all()


def test_pages_and_a_context_length_for_every_query() -> None:
    q, weights = cases.queries(4, 8)
    keys = cases.keys(3 * 64)
    cache = IndexCache.allocate(num_pages=4)
    table = int32(2, 0, 3, 1).view(2, 2)
    flat = table.flatten().long()[:, None] * 64 + torch.arange(64)
    cache.append(keys, flat.flatten()[:192])
    lens = int32(5, 100, 60, 64).view(2, 2)
    pages = cache.data.view(4, 64, 1, 132)
    meta = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    q4 = q.view(2, 2, 8, 128)
    got = deep_gemm.fp8_paged_mqa_logits(
        q4, pages, weights, lens, table, meta, 128, clean_logits=True
    )
    assert meta.shape == (133, 2) and got.shape == (4, 128)
    for row in range(4):
        n, first = int(lens.flatten()[row]), row // 2 * 128
        values, scales = cache.gather(flat.flatten()[first : first + n])
        want = cases.formula(q[row : row + 1], values, scales, weights[row : row + 1])[0]
        assert torch.allclose(got[row, :n].double(), want, rtol=1e-4, atol=1e-5)
        assert (got[row, n:] == -torch.inf).all()


def test_what_is_not_served_is_refused() -> None:
    q, weights = cases.queries(2, 8)
    pages = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    q4, lens, table = q.view(1, 2, 8, 128), int32(3, 4).view(1, 2), int32(0).view(1, 1)
    with pytest.raises(Unsupported, match="indices"):
        deep_gemm.fp8_paged_mqa_logits(q4, pages, weights, lens, table, None, 64, indices=lens)
    with pytest.raises(InvalidArgument, match="context_lens"):
        deep_gemm.fp8_paged_mqa_logits(q4, pages, weights, lens[0], table, None, 64)
    with pytest.raises(InvalidArgument, match="kv"):
        cache = IndexCache.allocate(num_pages=1)
        deep_gemm.fp8_mqa_logits(q, cache, weights, lens[0], lens[0])
