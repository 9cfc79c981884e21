"""Rows that neighboring queries share are fetched once, and no bit of a query knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla import LatentCache, Listed, Span
from openmla.kernels.cpu import seen as neighbors
from openmla.kernels.cpu import sparse, workers
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.seen import ReadOnce, longest, read_once, seen_by
from openmla.sources import Source

TOKENS, PAGE, PAGES = 96, 4, 24
ROWS = PAGE * PAGES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: pieces are as large as they get."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def a_cache(format: str = "fp8_584", latent: int = 512, rope: int = 0) -> LatentCache:
    cache = LatentCache.allocate(
        num_pages=PAGES, page_size=PAGE, latent=latent, rope=rope, format=format
    )
    cache.append(calls.numbers(ROWS, latent), calls.numbers(ROWS, rope, seed=1), torch.arange(ROWS))
    return cache


def i32(values: object) -> Tensor:
    return torch.as_tensor(values).int()


def a_window(cache: LatentCache, width: int = 16) -> Span:
    """A sliding window over one request, then whatever a caller may ask for."""
    tokens = torch.arange(TOKENS)
    table = torch.stack(
        [torch.randperm(PAGES, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    )
    table[1, 3], table[1, 9] = -1, PAGES  # pages that are not there
    request, begin, end = torch.zeros_like(tokens), tokens - width + 1, tokens + 1
    request[40:60] = 1
    request[60:64] = i32([-1, 2, 3, 2])
    begin[64:70], end[64:70] = 30, 45  # an image
    begin[70:74] = i32([20, 17, 14, 50])  # going back, empty, and far away
    end[70:74] = i32([40, 37, 14, 70])
    begin[74], end[74] = -(2**31), 2**31 - 1
    return Span(cache, i32(table), i32(request), i32(begin), i32(end))


def a_list(cache: LatentCache, entries: int = 9) -> Listed:
    drawn = torch.randint(
        -2, ROWS + 2, (TOKENS, entries), generator=torch.Generator().manual_seed(5)
    )
    return Listed(cache, i32(drawn), i32(torch.arange(TOKENS) % (entries + 3) - 1))


def a_full_list(cache: LatentCache, entries: int = 9) -> Listed:
    return Listed(cache, a_list(cache, entries).indices.clamp(0, ROWS - 1))


SOURCES = {
    "span": lambda cache: [a_window(cache)],
    "list": lambda cache: [a_list(cache)],
    "full list": lambda cache: [a_full_list(cache)],
    "span and list": lambda cache: [a_window(cache), a_full_list(cache)],
    "two spans": lambda cache: [a_window(cache), a_window(cache, width=40)],
}
CACHES = {
    "fp8_584": {},
    "fp8_528_v41": {"format": "fp8_528_v41"},
    "fp4_288": {"format": "fp4_288"},
    "bf16": {"format": "bf16"},
    "bf16, rows that begin inside of cache lines": {"format": "bf16", "latent": 36, "rope": 6},
}


def some(source: Source, tokens: Tensor) -> Source:
    """The source as some of the queries see it."""
    if isinstance(source, Listed):
        lengths = None if source.lengths is None else source.lengths[tokens]
        return replace(source, indices=source.indices[tokens], lengths=lengths)
    asked = {name: getattr(source, name)[tokens] for name in ("request", "begin", "end")}
    return replace(source, **asked)


def attend(sources: list[Source], heads: int, tokens: Tensor | None = None) -> tuple[Tensor, ...]:
    tokens = torch.arange(TOKENS) if tokens is None else tokens
    q = calls.numbers(TOKENS, heads, sources[0].rows.width, seed=3).bfloat16()
    here = [some(source, tokens) for source in sources]
    sink = calls.numbers(heads)
    return openmla.mla_attend(q[tokens], here, scale=0.05, sink=sink, return_lse=True)


@pytest.mark.parametrize("heads", [1, 3, 8, 64])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", SOURCES)
def test_bits_are_those_without_neighbors(kind: str, cache: str, heads: int):
    sources = SOURCES[kind](a_cache(**CACHES[cache]))
    whole = attend(sources, heads)
    orders = {
        "interleaved": torch.arange(TOKENS).view(3, -1).T.flatten(),
        "shuffled": torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9)),
        "a chunk": torch.arange(33, 80),
    }
    for name, tokens in orders.items():
        for found, expected in zip(attend(sources, heads, tokens), whole, strict=True):
            assert formula.same_bits(found, expected[tokens]), name
    for token in range(0, TOKENS, 5):
        one = torch.tensor([token])
        for found, expected in zip(attend(sources, heads, one), whole, strict=True):
            assert formula.same_bits(found, expected[one]), token


def test_a_row_of_a_window_is_read_once_for_its_neighbors(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.arange(64)
    window = Span(
        a_cache(),
        torch.arange(PAGES).int()[None],
        torch.zeros(64).int(),
        begin=i32(tokens),
        end=i32(tokens + 32),
    )
    read = _rows_read(monkeypatch)
    q = calls.numbers(64, 8, 512)
    openmla.mla_attend(q, [window], scale=0.05)
    # Pieces of 16 queries, a fourth of all: 15 rows more than one query sees.
    assert sum(read) == 4 * (32 + 15)


def test_quantized_rows_that_lists_name_often_are_dequantized_once(monkeypatch: pytest.MonkeyPatch):
    read = _rows_read(monkeypatch)
    listed = a_full_list(a_cache(), entries=20)
    openmla.mla_attend(calls.numbers(TOKENS, 8, 512), [listed], scale=0.05)
    assert sum(read) == listed.indices.unique().numel()


def _rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each read of a cache is asked for, from now on."""
    counts: list[int] = []
    plain = LatentCache.read

    def read(cache: LatentCache, rows: Tensor, columns: slice = slice(None)) -> Tensor:
        counts.append(rows.numel())
        return plain(cache, rows, columns)

    monkeypatch.setattr(LatentCache, "read", read)
    return counts


@pytest.mark.parametrize("kind", SOURCES)
def test_each_query_finds_its_own_rows_in_its_order(kind: str):
    for source in SOURCES[kind](a_cache()):
        for first, last in ((0, TOKENS), (38, 77), (60, 61), (7, 7)):
            seen = seen_by(source, first, last)
            for token, place in zip(range(first, last), seen.places, strict=True):
                assert torch.equal(seen.rows[place], source.seen(token))


def test_the_longest_span_is_what_a_query_asks_for():
    window = a_window(a_cache())
    assert longest(window) == ROWS  # the one that asks for everything
    assert longest(some(window, torch.arange(40))) == 16
    assert longest(some(window, torch.tensor([72]))) == 0
    assert longest(some(window, torch.arange(0))) == 0


def test_a_broken_row_reaches_the_queries_that_see_it_and_no_neighbor():
    cache = a_cache("bf16", 64, 0)
    sources = [a_window(cache)]
    clean, _ = attend(sources, 8)
    row = int(sources[0].seen(20)[0])
    cache.data.view(ROWS, -1)[row, 5] = torch.nan
    broken, _ = attend(sources, 8)
    sees = torch.tensor([row in sources[0].seen(token).tolist() for token in range(TOKENS)])
    assert 0 < int(sees.sum()) < TOKENS
    assert formula.same_bits(broken[~sees], clean[~sees])
    assert broken[sees].isnan().flatten(1).any(1).all()


def test_rows_that_no_list_names_are_not_looked_at():
    cache = a_cache()
    listed = Listed(cache, i32(torch.arange(TOKENS * 8).view(TOKENS, 8) % 7 * 2))
    clean, _ = attend([listed], 8)
    unnamed = torch.ones(ROWS, dtype=torch.bool)
    unnamed[listed.indices.unique()] = False
    cache.data.view(torch.uint8).view(ROWS, -1)[unnamed] = 0xFF
    assert isinstance(read_once(listed), ReadOnce)
    assert formula.same_bits(attend([listed], 8)[0], clean)


@pytest.mark.parametrize("entries", [4, 0])
def test_lists_that_name_rows_once_are_not_read_before(
    entries: int, monkeypatch: pytest.MonkeyPatch
):
    once = Listed(a_cache(), i32(torch.arange(24 * entries).view(24, entries)))
    assert read_once(once) is once
    monkeypatch.setattr(neighbors, "LOOKED_AT", 0)
    often = a_full_list(a_cache())
    assert read_once(often) is often
    bf16 = a_full_list(a_cache("bf16"))
    assert read_once(bf16) is bf16


def test_rows_that_would_take_much_memory_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch):
    listed = a_full_list(a_cache())
    plain = attend([listed], 8)
    monkeypatch.setattr(neighbors, "MOST_ROWS", 10)
    assert read_once(listed) is listed
    for found, expected in zip(attend([listed], 8), plain, strict=True):
        assert formula.same_bits(found, expected)


def test_factors_of_keys_are_those_of_their_rows():
    """`k_scale` is by physical row, whether rows have been dequantized before or not."""
    cache = a_cache("fp8_656", 512, 64)
    indices = a_full_list(cache).indices
    q, k_scale = calls.numbers(TOKENS, 8, 576, seed=3), calls.numbers(ROWS).abs()

    def call(tokens: slice) -> Tensor:
        out: Tensor = openmla.mla_prefill_sparse(
            q[tokens], cache, indices[tokens], scale=0.05, k_scale=k_scale
        )
        return out

    whole = call(slice(None))
    for token in range(0, TOKENS, 7):
        one = slice(token, token + 1)
        assert formula.same_bits(call(one), whole[one])


def test_more_threads_have_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    sources = SOURCES["span and list"](a_cache())
    one = attend(sources, 64)
    torch.set_num_threads(2)
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    for found, expected in zip(attend(sources, 64), one, strict=True):
        assert formula.same_bits(found, expected)


@pytest.mark.parametrize("format", ["bf16", "fp8_584", "fp4_288"])
def test_windows_of_which_nothing_is_there(format: str):
    window = a_window(a_cache(format))
    padding = replace(window, request=torch.full_like(window.request, -1))
    out, lse = attend([padding], 8)
    assert formula.same_bits(out, torch.zeros_like(out))
    assert formula.same_bits(lse, torch.full_like(lse, -torch.inf))
    listed = a_full_list(window.cache)
    for found, expected in zip(attend([padding, listed], 8), attend([listed], 8), strict=True):
        assert formula.same_bits(found, expected)


def test_a_window_longer_than_what_is_kept_for_a_piece(monkeypatch: pytest.MonkeyPatch):
    sources = SOURCES["span and list"](a_cache())
    plain = attend(sources, 8)
    monkeypatch.setattr(sparse, "MOST_SHARED", 20)
    for found, expected in zip(attend(sources, 8), plain, strict=True):
        assert formula.same_bits(found, expected)


def test_blocks_of_long_spans_are_shared_too(monkeypatch: pytest.MonkeyPatch):
    """Blocks of a few keys: those of a list lie apart, those of neighboring windows overlap."""
    sources = SOURCES["span and list"](a_cache())
    monkeypatch.setattr(sparse, "MOST_SHARED", 0)
    monkeypatch.setattr(CpuConfig, "keys_per_block", lambda config, rows: 5)
    whole = attend(sources, 8)
    for token in range(0, TOKENS, 3):
        one = torch.tensor([token])
        for found, expected in zip(attend(sources, 8, one), whole, strict=True):
            assert formula.same_bits(found, expected[one])
