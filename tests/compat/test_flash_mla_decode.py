"""FlashMLA's decode call against the formula, in FlashMLA's own conventions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
from openmla.cache import LatentCache
from openmla.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from openmla.errors import InvalidArgument, Unsupported

PAGE = 4
BF16 = torch.bfloat16


def test_signature_is_flash_mlas():
    expected = [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
        "num_splits", "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink",
        "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == expected


def test_metadata_is_a_pair_whatever_is_asked():
    assert get_mla_metadata(torch.zeros(2), 16, num_heads_k=1) == (FlashMLASchedMeta(), None)


def dense(s_q: int, lengths: list[int], heads: int = 3) -> dict[str, Any]:
    """Requests over pages in no order, the rest of the pool NaN."""
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    k_cache = calls.numbers(7, PAGE, 1, 12, seed=1, dtype=BF16)
    k_cache[6] = torch.nan
    return {
        "q": calls.numbers(2, s_q, heads, 12, dtype=BF16), "k_cache": k_cache, "block_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "head_dim_v": 8,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }  # fmt: skip


def keys_of(call: dict[str, Any], request: int) -> Tensor:
    pages = call["block_table"][request].long()
    length = int(call["cache_seqlens"][request])
    return call["k_cache"][pages].reshape(-1, 12)[:length]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("s_q", [1, 2, 8], ids="s_q={}".format)
def test_pages_match_the_formula(s_q: int, causal: bool):
    call = dense(s_q, [11, 9])
    out, lse = flash_mla_with_kvcache(**call, causal=causal)
    assert out.shape == (2, s_q, 3, 8) and lse.shape == (2, 3, s_q) and lse.is_contiguous()
    for request in range(2):
        rows = keys_of(call, request)[:, None].expand(-1, 3, -1)
        seen = formula.bottom_right(s_q, rows.shape[0], causal)
        want = formula.attend(call["q"][request], rows, rows[..., :8], 12**-0.5, seen)
        formula.assert_close(out[request], want.out, bound=2**-7)
        formula.assert_close(lse[request].T, want.lse)


def test_a_request_without_keys_is_zero_and_plus_infinity():
    call = dense(2, [0, 1])
    out, lse = flash_mla_with_kvcache(**call, causal=True)
    assert formula.same_bits(out[0], torch.zeros(2, 3, 8, dtype=BF16))
    assert formula.same_bits(lse[0], torch.full((3, 2), torch.inf))
    # Bottom right: of two queries over one key, the first sees none.
    assert formula.same_bits(lse[1, :, 0], torch.full((3,), torch.inf))
    assert lse[1, :, 1].isfinite().all()


def sparse() -> dict[str, Any]:
    """Rows of 656 bytes; row 31 is on the last page."""
    cache = LatentCache.allocate(num_pages=4, page_size=8, format="fp8_656")
    latent = calls.numbers(32, 512, seed=1, dtype=BF16)
    rope = calls.numbers(32, 64, seed=2, dtype=BF16)
    cache.append(latent, rope, torch.arange(32))
    indices = torch.tensor(
        [[[0, 31, 5, -1], [7, 7, 40, 2]], [[3, 2, 1, 0], [9, -1, -1, -1]]], dtype=torch.int32
    )
    return {
        "q": calls.numbers(2, 2, 3, 576, dtype=BF16), "k_cache": cache.data[:, :, None],
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "tile_scheduler_metadata": None, "is_fp8_kvcache": True, "indices": indices,
        "softmax_scale": 0.04,
    }  # fmt: skip


LISTS = [[0, 31, 5], [7, 7, 2], [3, 2, 1, 0], [9]]


@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("cut", [None, [2, 0]], ids=["whole", "topk_length"])
def test_lists_of_fp8_rows_match_the_formula(with_sink: bool, cut: list[int] | None):
    call = sparse()
    cache = LatentCache(call["k_cache"][:, :, 0], None, 512, 64, "fp8_656")
    kv = cache.gather(torch.arange(32))
    sink = torch.tensor([0.5, -torch.inf, torch.inf]) if with_sink else None
    lengths = None if cut is None else torch.tensor(cut, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(**call, attn_sink=sink, topk_length=lengths)
    lists = LISTS if cut is None else [LISTS[0][:2], LISTS[1][:2], [], []]
    want = formula.listed(call["q"].flatten(0, 1), kv, lists, 512, 0.04, sink)
    formula.assert_close(out.flatten(0, 1), want.out, bound=2**-7)
    empty = want.lse == -torch.inf
    formula.assert_close(lse.transpose(1, 2).flatten(0, 1), want.lse.masked_fill(empty, torch.inf))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(2, 3, 12)}, "q: expected"),
        ({"k_cache": torch.zeros(7, PAGE, 2, 12, dtype=BF16)}, "k_cache: expected"),
        ({"head_dim_v": 13}, "head_dim_v: expected an integer from 1 to 12"),
        ({"num_splits": torch.zeros(3)}, "num_splits: expected None"),
        ({"topk_length": torch.zeros(2)}, "topk_length: expected None"),
        ({"block_table": None}, "block_table: expected"),
        ({"is_fp8_kvcache": True}, "k_cache: expected"),
        ({"causal": 1}, "causal: expected"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_argument_is_named(change: dict[str, Any], says: str):
    with pytest.raises(InvalidArgument, match=says):
        flash_mla_with_kvcache(**{**dense(1, [3, 2]), **change})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"causal": True}, InvalidArgument, "causal: expected False with indices"),
        ({"head_dim_v": 448}, InvalidArgument, "head_dim_v: expected 512"),
        ({"topk_length": torch.zeros(3).int()}, InvalidArgument, "topk_length: expected"),
        ({"extra_k_cache": torch.zeros(1)}, Unsupported, "a second cache"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_list_is_named(change: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        flash_mla_with_kvcache(**{**sparse(), **change})
