"""mla_attend: what its sources see, one softmax over both, one list being mla_prefill_sparse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla import LatentCache, Listed, Span

BACKENDS = ["cpu", "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
WIDTH = calls.LATENT + calls.ROPE


def visible_and_keys(sources: list[Any], tokens: int) -> tuple[Tensor, Tensor]:
    """(bool [tokens, keys], float64 [keys, width]): the definition, spelled out once more.

    A key for every place that a source could name: an entry of a list, a position of a request.
    """
    seen, keys = [], []
    for source in sources:
        for token in range(tokens):
            if isinstance(source, Listed):
                length = source.indices.shape[1]
                if source.lengths is not None:
                    length = int(source.lengths[token])
                rows = source.indices[token].tolist()[: max(length, 0)]
            else:
                size, rows = source.cache.page_size, []
                table = source.block_table.tolist()
                line = int(source.request[token])
                for position in range(size * source.block_table.shape[1]):
                    asked = int(source.begin[token]) <= position < int(source.end[token])
                    if asked and 0 <= line < len(table):
                        page = table[line][position // size]
                        if 0 <= page < source.cache.num_pages:
                            rows.append(page * size + position % size)
            for row in rows:
                if 0 <= row < source.count:
                    keys.append(source.read(torch.tensor([row]))[0].double())
                    seen.append([t == token for t in range(tokens)])
    if not keys:
        return torch.zeros(tokens, 0, dtype=torch.bool), torch.zeros(0, WIDTH).double()
    return torch.tensor(seen).T, torch.stack(keys)


def expected(q: Tensor, sources: list[Any], d_v: int, sink: Tensor | None) -> formula.Expected:
    visible, keys = visible_and_keys(sources, q.shape[0])
    k = keys[:, None].expand(-1, q.shape[1], -1)
    return formula.attend(q, k, k[..., :d_v], 0.3, visible, sink)


def a_cache(pages: int = 5, page_size: int = 3, seed: int = 1, **more: Any) -> LatentCache:
    widths = {"latent": calls.LATENT, "rope": calls.ROPE} | more
    cache = LatentCache.allocate(num_pages=pages, page_size=page_size, **widths)
    latent = calls.numbers(cache.rows, cache.latent, seed=seed)
    cache.append(
        latent, calls.numbers(cache.rows, cache.rope, seed=seed + 9), torch.arange(cache.rows)
    )
    return cache


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_span(cache: LatentCache | None = None) -> Span:
    """Windows inside a page, across pages, before the first and past the last; lines that are not
    there; a page that is not there; an empty one."""
    table = torch.tensor([[4, 0, 2], [1, -1, 3], [7, 1, 0]], dtype=torch.int32)
    return Span(
        a_cache() if cache is None else cache,
        table,
        request=i32(0, 0, 1, 2, -1, 3, 1, 0, 2),
        begin=i32(0, 2, -4, 0, 0, 0, 5, -(2**31), 8),
        end=i32(2, 7, 20, 9, 9, 9, 5, 2**31 - 1, 3),
    )


TOKENS = 9


def a_list(rows: Any = None, seed: int = 5) -> Listed:
    drawn = calls.numbers(TOKENS, 4, seed=seed).mul(7).int()
    drawn[0] = -1
    rows = calls.numbers(8, WIDTH, seed=seed + 1) if rows is None else rows
    return Listed(rows, drawn, i32(4, 0, 3, -2, 9, 1, 4, 4, 2))


def queries(heads: int = 3) -> Tensor:
    return calls.numbers(TOKENS, heads, WIDTH, seed=3)


SOURCES = {
    "span": lambda: [a_span()],
    "list": lambda: [a_list()],
    "span and list": lambda: [a_span(), a_list()],
    "list and span": lambda: [a_list(a_cache(page_size=2, seed=7)), a_span()],
    "two lists": lambda: [a_list(), a_list(a_cache(page_size=1), seed=11)],
    "two spans": lambda: [a_span(), a_span(a_cache(pages=4, page_size=5, seed=8))],
}


@every_backend
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("kind", SOURCES)
def test_one_softmax_over_the_rows_of_all_sources(kind: str, with_sink: bool, backend: str):
    q, sources = queries(), SOURCES[kind]()
    sink = torch.tensor([0.5, -torch.inf, torch.inf]) if with_sink else None
    want = expected(q, sources, 8, sink)
    out, lse = openmla.mla_attend(
        q, sources, scale=0.3, sink=sink, d_v=8, return_lse=True, backend=backend
    )
    formula.assert_close(out, want.out, bound=1e-5)
    formula.assert_close(lse, want.lse, bound=1e-5)
    empty = want.lse == -torch.inf
    assert formula.same_bits(out[empty], torch.zeros_like(out[empty]))
    assert bool(empty.any()), "a token without a key should be among them"


@every_backend
def test_one_list_is_the_sparse_call_bit_for_bit(backend: str):
    q, listed = queries(), a_list()
    sink = calls.numbers(3)
    options: dict[str, Any] = {"scale": 0.3, "sink": sink, "d_v": 8, "backend": backend}
    sparse = openmla.mla_prefill_sparse(
        q, listed.rows, listed.indices, topk_lengths=listed.lengths, return_lse=True, **options
    )
    attend = openmla.mla_attend(q, [listed], return_lse=True, **options)
    assert all(formula.same_bits(a, b) for a, b in zip(attend, sparse, strict=True))


def test_a_span_has_the_bits_of_the_list_of_its_rows():
    q, span = queries(), a_span()
    rows = [span.seen(token) for token in range(TOKENS)]
    lists = torch.full((TOKENS, max(len(r) for r in rows)), -1, dtype=torch.int32)
    for token, found in enumerate(rows):
        lists[token, : len(found)] = found
    by_position = openmla.mla_attend(q, [span], scale=0.3)
    by_list = openmla.mla_attend(q, [Listed(span.cache, lists)], scale=0.3)
    assert formula.same_bits(by_position, by_list)


def test_bits_of_a_row_do_not_depend_on_its_neighbors():
    q, sources = queries(), SOURCES["span and list"]()
    whole = openmla.mla_attend(q, sources, scale=0.3)
    for token in range(TOKENS):
        one = slice(token, token + 1)
        span, listed = sources
        alone = [
            replace(span, request=span.request[one], begin=span.begin[one], end=span.end[one]),
            replace(listed, indices=listed.indices[one], lengths=listed.lengths[one]),
        ]
        assert formula.same_bits(openmla.mla_attend(q[one], alone, scale=0.3), whole[one])


def test_an_out_of_the_caller_is_filled():
    q, sources = queries(), SOURCES["two lists"]()
    out = torch.full((TOKENS, 3, 8), torch.nan)
    assert openmla.mla_attend(q, sources, scale=0.3, out=out) is out
    assert formula.same_bits(out, openmla.mla_attend(q, sources, scale=0.3))


def test_formats_of_the_sources_may_differ():
    """Rows of 584 bytes beside bf16 rows: a window and a pool of DeepSeek-V4."""
    window = a_cache(4, 2, latent=512, rope=0, format="fp8_584")
    pool = a_cache(3, 8, seed=4, latent=512, rope=0)
    q = calls.numbers(2, 3, 512).bfloat16()
    sources = [
        Span(window, i32(3, 1, 0)[None], i32(0, 0), i32(0, 1), i32(3, 6)),
        Listed(pool, i32(3, -1, 20, 7).view(2, 2)),
    ]
    out = openmla.mla_attend(q, sources, scale=0.3)
    formula.assert_close(out, expected(q, sources, 512, None).out, bound=2e-2)


def test_torch_compile_traces_it_whole():
    q, sources = queries(), SOURCES["span and list"]()
    span, listed = sources

    def attend(q: Tensor, data: Tensor, begin: Tensor, indices: Tensor) -> Tensor:
        cache = LatentCache(data, None, calls.LATENT, calls.ROPE, "bf16")
        window = Span(cache, span.block_table, span.request, begin, span.end)
        return openmla.mla_attend(q, [window, replace(listed, indices=indices)], scale=0.3)

    arguments = q, span.cache.data, span.begin, listed.indices
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert formula.same_bits(compiled(*arguments), attend(*arguments))
