"""FlashMLA's decode call against the formula, in FlashMLA's own conventions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
from cache import row_bytes
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
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
        "enable_batch_invariant",
        "use_legacy",
        "kv_format",
        "descale_q",
        "descale_k",
        "out",
    ]
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == expected


def test_metadata_is_a_pair_whatever_is_asked():
    assert get_mla_metadata(torch.zeros(2), 16, num_heads_k=1) == (FlashMLASchedMeta(), None)


def dense(s_q: int, lengths: list[int], heads: int = 3) -> dict[str, Any]:
    """Requests over pages in no order, the rest of the pool NaN."""
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    k_cache = calls.numbers(7, PAGE, 1, 12, seed=1, dtype=BF16)
    k_cache[6] = torch.nan
    return {
        "q": calls.numbers(2, s_q, heads, 12, dtype=BF16),
        "k_cache": k_cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "head_dim_v": 8,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }


def keys_of(call: dict[str, Any], request: int) -> Tensor:
    pages = call["block_table"][request].long()
    length = int(call["cache_seqlens"][request])
    return call["k_cache"][pages].reshape(-1, 12)[:length]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("s_q", [1, 2, 8], ids="s_q={}".format)
def test_pages_match_the_formula(s_q: int, causal: bool):
    width = 12 if s_q == 1 else 8  # rows may be values as a whole
    call = {**dense(s_q, [11, 9]), "head_dim_v": width}
    out, lse = flash_mla_with_kvcache(**call, causal=causal)
    assert out.shape == (2, s_q, 3, width) and lse.shape == (2, 3, s_q) and lse.is_contiguous()
    for request in range(2):
        rows = keys_of(call, request)[:, None].expand(-1, 3, -1)
        seen = formula.bottom_right(s_q, rows.shape[0], causal)
        want = formula.attend(call["q"][request], rows, rows[..., :width], 12**-0.5, seen)
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


@pytest.mark.parametrize(("batch", "s_q"), [(0, 1), (2, 0)])
def test_no_query_has_no_result(batch: int, s_q: int):
    call = dense(1, [11, 9])
    call["q"] = torch.empty(batch, s_q, 3, 12, dtype=BF16)
    tables = {name: call[name][:batch] for name in ("block_table", "cache_seqlens")}
    out, lse = flash_mla_with_kvcache(**call | tables)
    assert out.shape == (batch, s_q, 3, 8) and lse.shape == (batch, 3, s_q)
    out, lse = flash_mla_with_kvcache(**call, indices=torch.zeros(batch, s_q, 2).int())
    assert out.shape == (batch, s_q, 3, 8) and lse.shape == (batch, 3, s_q)


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
        "q": calls.numbers(2, 2, 3, 576, dtype=BF16),
        "k_cache": cache.data[:, :, None],
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "is_fp8_kvcache": True,
        "indices": indices,
        "softmax_scale": 0.04,
    }


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


def paged_v4(pages: int, page_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """k_cache as DeepSeek-V4's engines keep it, its pages padded to 576 bytes, and its values."""
    bytes_of_page = -(-page_size * 584 // 576) * 576
    pool = torch.zeros(pages, bytes_of_page, dtype=torch.uint8)
    data = pool[:, : page_size * 576].view(pages, page_size, 576)
    scales = pool[:, page_size * 576 : page_size * 584].view(pages, page_size, 8)
    cache = LatentCache(data, scales, 512, 0, "fp8_584")
    rows = torch.arange(pages * page_size)
    cache.append(calls.numbers(len(rows), 512, seed=seed, dtype=BF16), None, rows)
    k_cache = pool[:, : page_size * 584].view(torch.float8_e4m3fn).view(pages, page_size, 1, 584)
    return k_cache, cache.gather(rows)


@pytest.mark.parametrize("extra", [False, True], ids=["one cache", "two caches"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_rows_of_584_bytes_and_a_second_cache(with_sink: bool, extra: bool):
    k_cache, kv = paged_v4(4, 5, seed=1)
    lists = [[0, 19, 5], [7, 7], [3], []]
    indices = torch.full((2, 2, 4), -1, dtype=torch.int32)
    for row, listed in zip(indices.flatten(0, 1), lists, strict=True):
        row[: len(listed)] = torch.tensor(listed)
    call: dict[str, Any] = {
        "q": calls.numbers(2, 2, 3, 512, dtype=BF16),
        "k_cache": k_cache,
        "indices": indices,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "is_fp8_kvcache": True,
    }
    if extra:
        more, others = paged_v4(2, 3, seed=2)
        call |= {
            "extra_k_cache": more,
            "extra_indices_in_kvcache": torch.tensor([[[1, 5], [0, 2]], [[4, -1], [-1, -1]]]).int(),
            "extra_topk_length": torch.tensor([2, 1], dtype=torch.int32),
        }
        kv = torch.cat([kv, others])
        theirs: list[list[int]] = [[1, 5], [0, 2], [4], []]
        lists = [own + [20 + i for i in its] for own, its in zip(lists, theirs, strict=True)]
    sink = torch.tensor([0.5, -torch.inf, torch.inf]) if with_sink else None
    out, lse = flash_mla_with_kvcache(**call, attn_sink=sink)
    want = formula.listed(call["q"].flatten(0, 1), kv, lists, 512, 512**-0.5, sink)
    formula.assert_close(out.flatten(0, 1), want.out, bound=2**-7)
    want_lse = want.lse.masked_fill(want.lse == -torch.inf, torch.inf)
    formula.assert_close(lse.transpose(1, 2).flatten(0, 1), want_lse)


def v4_step(tokens: int = 3) -> dict[str, Any]:
    """What vLLM passes for a decode step of a DeepSeek-V4 layer: every token is a batch row, the
    window's pages are the cache and the compressed ones, of another size, the extra cache."""
    window, _ = paged_v4(4, 8, seed=1)
    pooled, _ = paged_v4(5, 2, seed=2)
    drawn = torch.Generator().manual_seed(3)
    lists = torch.full((tokens, 1, 16), -1, dtype=torch.int32)
    lists[:, 0, :9] = torch.randint(0, 32, (tokens, 9), generator=drawn).int()
    more = torch.full((tokens, 1, 8), -1, dtype=torch.int32)
    more[:, 0, :5] = torch.randint(0, 10, (tokens, 5), generator=drawn).int()
    return {
        "q": calls.numbers(tokens, 1, 8, 512, dtype=BF16),
        "k_cache": window,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": 512**-0.5,
        "is_fp8_kvcache": True,
        "indices": lists,
        "topk_length": torch.tensor([9, 4, 0][:tokens], dtype=torch.int32),
        "attn_sink": calls.numbers(8, seed=4),
        "extra_k_cache": pooled,
        "extra_indices_in_kvcache": more,
        "extra_topk_length": torch.tensor([5, 0, 2][:tokens], dtype=torch.int32),
    }


def test_engines_write_into_their_output_and_name_the_rows():
    call = v4_step()
    want, lse = flash_mla_with_kvcache(**call)
    padded = torch.full((3, 1, 16, 512), torch.nan, dtype=BF16)
    out, again = flash_mla_with_kvcache(
        **call, out=padded[:, :, :8], kv_format="V4", enable_batch_invariant=True, use_legacy=True
    )
    assert out.data_ptr() == padded.data_ptr()
    assert formula.same_bits(padded[:, :, :8].contiguous(), want) and formula.same_bits(again, lse)
    assert padded[:, :, 8:].isnan().all()


def test_lengths_may_be_one_per_query():
    call = v4_step() | {"q": calls.numbers(1, 3, 8, 512, dtype=BF16)}
    for name in ("indices", "extra_indices_in_kvcache"):
        call[name] = call[name].view(1, 3, -1)
    lengths = {name: call[name] for name in ("topk_length", "extra_topk_length")}
    per_query, _ = flash_mla_with_kvcache(**call | {k: v[None] for k, v in lengths.items()})
    for token in range(3):
        one = slice(token, token + 1)
        alone = {name: call[name][:, one] for name in ("q", "indices", "extra_indices_in_kvcache")}
        alone |= {name: value[one] for name, value in lengths.items()}
        assert formula.same_bits(flash_mla_with_kvcache(**call | alone)[0], per_query[:, one])


def test_both_caches_are_one_softmax_rounded_once():
    """In bf16, two rounded results and their merge would miss the nearest number often."""
    call = v4_step() | {"attn_sink": None}
    out, _ = flash_mla_with_kvcache(**call)
    for token in range(3):
        keys = []
        for lists, lengths, pages in (
            ("indices", "topk_length", (4, 8, 1)),
            ("extra_indices_in_kvcache", "extra_topk_length", (5, 2, 2)),
        ):
            values = paged_v4(*pages[:2], seed=pages[2])[1]
            named = call[lists][token, 0, : int(call[lengths][token])].long()
            keys.append(values[named].double())
        k = torch.cat(keys)[:, None].expand(-1, 8, -1)
        seen = torch.ones(1, k.shape[0], dtype=torch.bool)
        want = formula.attend(call["q"][token], k, k, 512**-0.5, seen).out
        off = (out[token].double() - want).abs()
        assert bool((off <= want.abs() * 2**-8 * 1.02 + 1e-5).all())


def paged_rows(format: str, pages: int, page_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """k_cache of rows without rope, other bytes between its pages, and its values."""
    size = row_bytes.ROW_BYTES[format]
    pool = torch.full((pages, page_size * size + 64), 0xEE, dtype=torch.uint8)
    cache = LatentCache.from_pages(pool, page_size=page_size, format=format)
    rows = torch.arange(cache.rows)
    cache.append(calls.numbers(len(rows), 512, seed=seed, dtype=BF16), None, rows)
    return pool[:, : page_size * size].view(pages, page_size, 1, size), cache.gather(rows)


@pytest.mark.parametrize(
    ("formats", "names"),
    [
        (("fp8_528_v41", "fp4_288"), {}),
        (("fp4_288", "fp8_584"), {}),
        (("fp8_528_v41_split", "fp4_288_split"), {"kv_format": "V41"}),
        (("fp4_288_split", "fp8_528_v41_split"), {"kv_format": "V41_FP4", "use_legacy": True}),
        (("fp8_528_v32", "fp8_528_v32"), {"kv_format": "V32_NO_ROPE"}),
        (("fp4_288_split", "fp4_288_split"), {"use_legacy": True}),
    ],
)
def test_rows_of_528_and_288_bytes(formats: tuple[str, str], names: dict[str, Any]):
    made = [
        paged_v4(2, 3, seed=i) if f == "fp8_584" else paged_rows(f, 2 + i, 5 - i, seed=i)
        for i, f in enumerate(formats)
    ]
    (k_cache, kv), (more, others) = made
    lists, theirs = [[0, 9, 4], [7, 7, 1]], [[5, 2], [3, 0]]
    call: dict[str, Any] = {
        "q": calls.numbers(2, 1, 3, 512, dtype=BF16),
        "k_cache": k_cache,
        "indices": torch.tensor(lists, dtype=torch.int32)[:, None],
        "extra_k_cache": more,
        "extra_indices_in_kvcache": torch.tensor(theirs, dtype=torch.int32)[:, None],
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "is_fp8_kvcache": True,
    }
    out, lse = flash_mla_with_kvcache(**call, **names)
    both = [a + [len(kv) + i for i in b] for a, b in zip(lists, theirs, strict=True)]
    want = formula.listed(call["q"][:, 0], torch.cat([kv, others]), both, 512, 512**-0.5, None)
    formula.assert_close(out[:, 0], want.out, bound=2**-7)
    formula.assert_close(lse[:, :, 0], want.lse)


@pytest.mark.parametrize(
    ("format", "names", "says"),
    [
        ("fp8_528_v41", {"use_legacy": True}, "rows of 584 or 288 bytes, or a kv_format"),
        ("fp8_528_v41", {"kv_format": "V4"}, "k_cache: expected rows of 584 bytes"),
        ("fp4_288", {"kv_format": "V41"}, "k_cache: expected rows of 528 bytes"),
        ("fp8_528_v32", {"kv_format": "V41_FP4"}, "k_cache: expected rows of 288 bytes"),
        ("fp8_528_v32", {"kv_format": "V32"}, "kv_format: expected the rows that q of 512"),
    ],
)
def test_rows_that_are_not_what_they_are_called(format: str, names: dict[str, Any], says: str):
    k_cache, _ = paged_rows(format, 2, 3, seed=0)
    q, indices = calls.numbers(1, 1, 3, 512, dtype=BF16), torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=says):
        flash_mla_with_kvcache(
            q, k_cache, None, None, 512, is_fp8_kvcache=True, indices=indices, **names
        )


def test_pages_of_584_bytes_lie_together():
    k_cache, _ = paged_v4(4, 6, seed=1)
    q = calls.numbers(1, 1, 3, 512, dtype=BF16)
    indices = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="k_cache: expected pages without gaps"):
        flash_mla_with_kvcache(
            q, k_cache[:, ::2], None, None, 512, is_fp8_kvcache=True, indices=indices
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(2, 3, 12)}, "q: expected"),
        ({"k_cache": torch.zeros(7, PAGE, 2, 12, dtype=BF16)}, "k_cache: expected"),
        ({"head_dim_v": 13}, "head_dim_v: expected an integer from 1 to 12"),
        ({"num_splits": torch.zeros(3)}, "num_splits: expected None"),
        ({"topk_length": torch.zeros(2)}, "topk_length: expected None"),
        ({"extra_k_cache": torch.zeros(2)}, "extra_k_cache: expected None without indices"),
        ({"block_table": None}, "block_table: expected"),
        ({"is_fp8_kvcache": True}, "q: expected 576 or 512 columns"),
        ({"causal": 1}, "causal: expected"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_argument_is_named(change: dict[str, Any], says: str):
    with pytest.raises(InvalidArgument, match=says):
        flash_mla_with_kvcache(**{**dense(1, [3, 2]), **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"causal": True}, "causal: expected False with indices"),
        ({"head_dim_v": 448}, "head_dim_v: expected 512"),
        ({"topk_length": torch.zeros(3).int()}, "topk_length: expected"),
        ({"extra_k_cache": torch.zeros(1)}, "extra_k_cache: expected"),
        ({"extra_topk_length": torch.zeros(2).int()}, "None without extra_k_cache"),
        ({"q": torch.zeros(2, 2, 3, 320, dtype=BF16)}, "q: expected 576 or 512"),
        ({"kv_format": "V4"}, "kv_format: expected the rows that q of 576 columns reads"),
        ({"kv_format": "V41"}, "kv_format: expected the rows that q of 576 columns reads"),
        ({"kv_format": "V5"}, "kv_format: expected None or one of V32, V32_NO_ROPE, V4, V41"),
        ({"topk_length": torch.zeros(2, 3).int()}, "topk_length: expected"),
        ({"out": torch.zeros(2, 2, 3, 256, dtype=BF16)}, "out: expected"),
        ({"out": torch.zeros(2, 3, 3, 512, dtype=BF16)[:, :2]}, "out: expected queries at equal"),
        ({"enable_batch_invariant": 1}, "enable_batch_invariant: expected True or False"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_list_is_named(change: dict[str, Any], says: str):
    with pytest.raises(InvalidArgument, match=says):
        flash_mla_with_kvcache(**{**sparse(), **change})


@pytest.mark.parametrize("name", ["descale_q", "descale_k"])
def test_scales_of_a_tensor_are_taken_as_none_and_refused_otherwise(name: str) -> None:
    """Engines name them also where there are none."""
    q, pages = torch.randn(1, 1, 4, 576).bfloat16(), torch.randn(1, 64, 1, 576).bfloat16()
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    flash_mla_with_kvcache(q, pages, table, lengths, 512, **{name: None})
    with pytest.raises(Unsupported, match=name):
        flash_mla_with_kvcache(q, pages, table, lengths, 512, **{name: torch.ones(1)})
