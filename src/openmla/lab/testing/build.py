"""From a Case to tensors: `build(case)`.

Only what the problem addresses is written: tokens of sequences, the slots of their keys, rows that
a valid index names, table entries of pages in use. All other memory keeps the background of the
`Memory` it came from, so building the same case with another background poisons it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla import reference
from openmla.cache import DTYPES, LatentCache
from openmla.checks import out_dtype
from openmla.formats import BF16, FORMATS
from openmla.lab.testing.case import Case, CaseSource
from openmla.lab.testing.memory import INT_FILL, Memory
from openmla.lab.testing.spans import MOST_REQUESTS, SpanDraw
from openmla.lab.testing.values import Draw, finite, to_dtype
from openmla.operands import (
    AttendOperands,
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.sequences import first_key, visible_keys
from openmla.sources import Listed, Source, Span, TurnBack

MOST_ANGLES = 40
"""Lines of a table of angles at most."""
Outcome = Results
"""What an implementation returned."""


@dataclass(frozen=True, eq=False)
class BuiltCase:
    """A case with its tensors, ready to be called."""

    case: Case
    memory: Memory
    operands: Operands
    arguments: dict[str, Any]
    """Keyword arguments of the public call, without out, return_* and backend."""

    def run(self, backend: str = "auto") -> Outcome:
        """The public call. A given `out` starts full of NaN."""
        case = self.case
        options: dict[str, Any] = {"return_lse": case.return_lse, "backend": backend}
        if case.out != "fresh":
            options["out"] = self.new_out()
        if case.call == "sparse":
            options["return_max_logits"] = case.return_max_logits
        call = {
            "dense": openmla.mla_prefill,
            "latent": openmla.mla_prefill_latent,
            "sparse": openmla.mla_prefill_sparse,
            "attend": openmla.mla_attend,
        }[case.call]
        with self._defaults():
            returned = call(**self.arguments, **options)  # type: ignore[operator]
        results = list(returned) if isinstance(returned, tuple) else [returned]
        return Outcome(
            out=results.pop(0),
            lse=results.pop(0) if case.return_lse else None,
            max_logits=results.pop(0) if case.return_max_logits else None,
        )

    def new_out(self) -> Tensor:
        """An `out` full of NaN that lies as the case says."""
        q, place = self.operands.q, self.case.out
        gaps = {"strided": place == "strided", "aligned": place == "aligned"}
        shape = (*q.shape[:2], self.case.d_v)
        dtype = torch.float32 if self.case.fp32_out else out_dtype(q.dtype)
        return self.memory.new(shape, dtype, **gaps).fill_(torch.nan)

    @contextmanager
    def _defaults(self) -> Iterator[None]:
        """torch's defaults as the case wants them, for the call alone."""
        dtype, device = torch.get_default_dtype(), self.case.default_device
        torch.set_default_dtype(DTYPES[self.case.default_dtype])
        where = self.memory.device if device == "same" else device
        try:
            with torch.device(where) if where else nullcontext():
                yield
        finally:
            torch.set_default_dtype(dtype)

    def truth(self) -> reference.Truth:
        """The float64 definition, on the CPU, computed once."""
        return self._truth

    @cached_property
    def _truth(self) -> reference.Truth:
        if self.memory.device.type != "cpu":
            return build(self.case).truth()
        return reference.of(self.operands)

    @property
    def is_exact(self) -> bool:
        """Whether rows that see 2^n keys have no rounding error in any sane implementation."""
        case = self.case
        power_of_two = case.factor == 0 or math.frexp(abs(case.factor))[0] == 0.5
        # V of quantized rows is no integer, and results that are turned back are none either.
        stored = {case.kv, *(source.kv for source in case.sources)}
        changed = case.turned or any(FORMATS.get(kv, BF16).scale for kv in stored)
        # Keys of one source are alike, beside the columns that are V as well; those of two are not.
        alike = len(case.sources) < 2 or case.d_v == case.d_qk
        plain_sink = case.sink in ("none", "low")
        whole = case.key_mask in ("none", "all")
        plain = plain_sink and whole and alike and not changed
        return case.values == "exact" and plain and power_of_two

    def describe_row(self, row: int) -> str:
        """Where a query row sits: its sequence, its place there, what it may see."""
        case = self.case
        ends = list(accumulate(case.q_lens))
        number = next((b for b, end in enumerate(ends) if row < end), None)
        if number is None:
            return "after the last sequence"
        q_len, k_len = case.q_lens[number], case.k_lens[number]
        query = row - (ends[number] - q_len)
        place = f"sequence {number}, query {query} of {q_len}"
        if case.sources:
            return f"{place}, its own rows of each source"
        if case.form == "sparse":
            return f"{place}, its own list of {case.topk} indices"
        seen = visible_keys(query, q_len, k_len, case.causal)
        first = first_key(seen, case.window)
        return f"{place}, sees {seen - first} of {k_len} keys" + f" from {first} on" * bool(first)


def build(case: Case, device: Any = "cpu", memory: Memory | None = None) -> BuiltCase:
    """The tensors of a case, in plain memory of `device` unless another memory is given."""
    builder = _Builder(case, memory or Memory(device))
    operands, arguments = getattr(builder, case.call)()
    return BuiltCase(case, builder.memory, operands, arguments)


def _count(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


class _Builder:
    def __init__(self, case: Case, memory: Memory) -> None:
        self.case, self.memory, self.draw = case, memory, Draw(case)
        self.gaps = {"strided": case.layout == "strided", "aligned": case.layout == "aligned"}
        self.dtype = DTYPES[case.dtype]
        self.side_dtype = DTYPES[case.side_dtype or case.dtype]
        self.rope_dtype = DTYPES[case.rope_dtype or case.side_dtype or case.dtype]
        self.positions = torch.cat([_count(0), *(_count(k) for k in case.k_lens)])
        lens = zip(case.q_lens, case.k_lens, strict=True)
        self.first_keys = [self._first_key(q_len, k_len) for q_len, k_len in lens]
        """Every sequence's first key that a query sees. Keys before it stay background."""
        ends = list(accumulate(case.k_lens))
        runs = zip(ends, case.k_lens, self.first_keys, strict=True)
        seen = [_count(end)[end - k_len + first :] for end, k_len, first in runs]
        self.read = torch.cat([_count(0), *seen])
        """Keys that some query sees, numbered over all sequences."""

    def _first_key(self, q_len: int, k_len: int) -> int:
        """Spelled out, as `_slots` is: what the first query sees, the first of all."""
        if not (self.case.window and q_len):
            return 0
        return max(max(k_len - q_len + 1, 0) - self.case.window, 0)

    def dense(self) -> tuple[Operands, dict[str, Any]]:
        case, draw = self.case, self.draw
        q, tokens = self._queries(), case.total_k
        k_nope = self._keys(draw.keys(self.positions, case.key_heads, case.d_nope), self.dtype)
        gaps = {"aligned": True} if case.layout == "values" else self.gaps
        v = self._keys(draw.values(tokens, case.key_heads, case.d_v), self.side_dtype, gaps)
        cu_q, cu_k = self._offsets(case.q_lens), self._offsets(case.k_lens)
        weights = self._weights(tokens + case.spare, self.read)
        k_rope, cache, paging = None, None, {}
        if case.rope == "cache":
            cache, table = self._paged_cache(self._latent_beside_rope())
            paging = {"block_table": table, "cache_lengths": self._ints(case.k_lens)}
        elif case.rope != "none":
            row = {"shared": (), "shared_3d": (1,), "per_head": (case.key_heads,)}[case.rope]
            keys = draw.keys(self.positions, *row, case.d_rope)
            k_rope = self._keys(keys, self.rope_dtype)
        arguments: dict[str, Any] = {
            "q": q,
            "k_nope": k_nope,
            "k_rope": k_rope if cache is None else cache,
            "v": v,
            "cu_seqlens_q": cu_q,
            "causal": case.causal,
            **paging,
            **self._options(weights),
        }
        if case.k_lens != case.q_lens:
            arguments["cu_seqlens_k"] = cu_k
        if case.scale is None:
            del arguments["scale"]
        if k_rope is not None and case.rope == "shared_3d":
            k_rope = k_rope[:, 0]
        if case.key_mask != "none":
            arguments["key_mask"] = self._key_mask(q.shape[0])
        if case.window:
            arguments["window"] = case.window
        operands = DenseOperands(
            q,
            k_nope,
            k_rope,
            v,
            cu_q,
            cu_k,
            case.causal,
            weights,
            cache,
            paging.get("block_table"),
            key_mask=arguments.get("key_mask"),
            window=case.window,
        )
        return operands, arguments

    def latent(self) -> tuple[Operands, dict[str, Any]]:
        case = self.case
        q = self._queries()
        cache, table = self._paged_cache(case.d_nope)
        slots = self._slots(table, cache.page_size)
        weights = self._weights(cache.rows, slots)
        lengths, cu_q = self._ints(case.k_lens), self._offsets(case.q_lens)
        pool: LatentCache | Tensor = cache
        if case.kv == "plain":
            pool = cache.data
            cache = LatentCache(cache.data, None, case.d_v, case.d_qk - case.d_v, "bf16")
        arguments: dict[str, Any] = {
            "q": q,
            "cache": pool,
            "block_table": table,
            "cache_lengths": lengths,
            "cu_seqlens_q": cu_q,
            "causal": case.causal,
            "invariant": case.invariant,
            **self._options(weights),
        }
        if case.kv == "plain" or case.d_v != case.d_nope:
            arguments["d_v"] = case.d_v
        if case.window:
            arguments["window"] = case.window
        if case.range_keys:
            arguments["range_keys"] = case.range_keys
        invariant = case.invariant or case.range_keys > 0
        flags = case.causal, case.d_v, weights, invariant, case.window, case.range_keys
        operands = LatentOperands(q, cache, table, lengths, cu_q, *flags)
        return operands, arguments

    def sparse(self) -> tuple[Operands, dict[str, Any]]:
        case = self.case
        q = self._queries()
        pages = -(-case.total_k // case.page_size) + case.spare
        rows = pages * case.page_size if case.is_paged else case.total_k + case.spare
        listed, lengths = self._index_lists(q.shape[0], rows, case)
        used = torch.unique(listed[(listed >= 0) & (listed < rows)])
        self._fill_unused(listed, lengths, used, rows)
        kv: LatentCache | Tensor
        if case.is_paged:
            kv = self._cache(pages, case.d_nope, case)
            self._append(kv, used, used)
        else:
            kv = self._plain_rows(rows, used)
        weights = self._weights(rows, used)
        indices = self.memory.new(tuple(listed.shape), torch.int32, **self.gaps)
        indices.copy_(listed)
        on_device = None if lengths is None else self._int32(lengths)
        arguments: dict[str, Any] = {
            "q": q,
            "kv": kv,
            "indices": indices,
            "topk_lengths": on_device,
            **self._options(weights),
        }
        if not case.is_paged or case.d_v != case.d_nope:
            arguments["d_v"] = case.d_v
        return SparseOperands(q, kv, indices, on_device, case.d_v, weights), arguments

    def attend(self) -> tuple[Operands, dict[str, Any]]:
        case = self.case
        q = self._queries()
        sources: list[Source] = []
        for source in case.sources:
            make = self._span if source.kind == "span" else self._list
            sources.append(make(source, q.shape[0]))
        weights = self._weights(0, _count(0))
        turn = self._turn_back(q.shape[0]) if case.turned else None
        arguments: dict[str, Any] = {
            "q": q,
            "sources": sources,
            "scale": weights.scale,
            "sink": weights.sink,
            "turn_back": turn,
        }
        caches = any(source.kv != "plain" for source in case.sources)
        if not caches or case.d_v != case.d_nope:
            arguments["d_v"] = case.d_v
        return AttendOperands(q, tuple(sources), case.d_v, weights, turn), arguments

    def _list(self, source: CaseSource, tokens: int) -> Listed:
        """Rows that each query lists, in a pool or in a plain tensor."""
        pages = -(-source.rows // source.page_size) + self.case.spare
        plain = source.kv == "plain"
        rows = source.rows + self.case.spare if plain else pages * source.page_size
        listed, lengths = self._index_lists(tokens, rows, source)
        used = torch.unique(listed[(listed >= 0) & (listed < rows)])
        self._fill_unused(listed, lengths, used, rows)
        kv: LatentCache | Tensor
        if plain:
            kv = self._plain_rows(rows, used)
        else:
            kv = self._cache(pages, self.case.d_nope, source)
            self._append(kv, used, used)
        indices = self.memory.new(tuple(listed.shape), torch.int32, **self.gaps)
        indices.copy_(listed)
        return Listed(kv, indices, None if lengths is None else self._int32(lengths))

    def _span(self, source: CaseSource, tokens: int) -> Span:
        """Positions of requests whose pages lie in any order. Entries of the table that no query's
        span reaches stay background, and so do rows that nobody sees."""
        case, size = self.case, source.page_size
        lines, across = min(tokens, MOST_REQUESTS), -(-source.rows // size) + case.spare
        cache = self._cache(lines * across + case.spare, case.d_nope, source)
        drawn = SpanDraw(self.draw, source, lines, across)
        pages = drawn.pages(cache.num_pages)
        request, begin, end = drawn.spans(tokens)
        table = self.memory.new((lines, across), torch.int32, **self.gaps)
        seen: dict[int, int] = {}
        """Rows that some query sees, each with a position that it is seen at."""
        for line, first, last in zip(request, begin, end, strict=True):
            if not 0 <= line < lines:
                continue
            for position in range(max(first, 0), min(last, across * size)):
                page = int(pages[line, position // size])
                table[line, position // size] = page
                if 0 <= page < cache.num_pages:
                    seen[page * size + position % size] = position
        used = torch.tensor(sorted(seen), dtype=torch.int64, device="cpu")
        positions = [seen[row] for row in sorted(seen)]
        self._append(cache, used, torch.tensor(positions, dtype=torch.int64, device="cpu"))
        spans = (self._ints(tuple(numbers)) for numbers in (request, begin, end))
        return Span(cache, table, *spans)

    def _turn_back(self, tokens: int) -> TurnBack:
        """Any angles. Lines of the table that no query names, and gaps, stay background; some
        queries name lines that the table does not have."""
        case, draw = self.case, self.draw
        lines = int(draw.integers(1, MOST_ANGLES + 1))
        positions = draw.integers(0, lines, tokens)
        strange = torch.tensor([-1, lines, -(2**31), 2**31 - 1], device="cpu")
        strange = strange[draw.integers(0, 4, tokens)]
        positions = torch.where(draw.integers(0, 4, tokens) == 0, strange, positions)
        table = self.memory.new((lines, case.turned), torch.float32, **self.gaps)
        angles = draw.normal(lines, case.turned // 2) * 3
        named = torch.unique(positions[(positions >= 0) & (positions < lines)])
        written = torch.cat([angles.cos(), angles.sin()], 1)[named]
        table[named.to(table.device)] = written.to(table.device)
        kind = torch.int64 if case.seed % 2 else torch.int32
        return TurnBack(table, self.memory.of(positions.to(kind)))

    def _plain_rows(self, rows: int, used: Tensor) -> Tensor:
        """A tensor of rows of which only those that are used are written."""
        kv = self.memory.new((rows, self.case.d_qk), self.dtype, **self.gaps)
        values = to_dtype(self._latent_rows(used), self.dtype)
        # Plain bytes: indexed writes of float8 tensors are not implemented everywhere.
        raw = kv.view(torch.uint8) if self.dtype.itemsize == 1 else kv
        raw[used.to(raw.device)] = values.view(raw.dtype).to(raw.device)
        return kv

    def _int32(self, values: Tensor) -> Tensor:
        return self.memory.of(values.to(torch.int32))

    def _key_mask(self, tokens: int) -> Tensor:
        """Bits past a query's keys are background. Rows lie 16 bytes apart, as select_topk makes
        them, unless the layout is strided."""
        case = self.case
        words = -(-max(case.k_lens, default=0) // 32) + case.spare
        strided = case.layout == "strided"
        mask = self.memory.new((tokens, words), torch.int32, strided=strided, aligned=not strided)
        mask[: case.total_q].copy_(self.draw.key_mask(words, self.memory.background != "zero"))
        return mask

    def _queries(self) -> Tensor:
        values = self.draw.queries(self.case.total_q)
        if self.case.form == "sparse":  # every row of q is a query: there is no cu_seqlens
            return self._rows(values, self.dtype, spare=0)
        return self._rows(values, self.dtype)

    def _keys(
        self, values: Tensor, dtype: torch.dtype, gaps: dict[str, bool] | None = None
    ) -> Tensor:
        """Rows of keys or of what belongs to them; those that nobody sees stay background."""
        if not any(self.first_keys):
            return self._rows(values, dtype, gaps=gaps)
        rows = self._rows(values[:0], dtype, spare=values.shape[0] + self.case.spare, gaps=gaps)
        ends = accumulate(self.case.k_lens)
        for end, k_len, first in zip(ends, self.case.k_lens, self.first_keys, strict=True):
            seen = slice(end - k_len + first, end)
            rows[seen].copy_(to_dtype(values[seen], dtype))
        return rows

    def _rows(
        self,
        values: Tensor,
        dtype: torch.dtype,
        spare: int | None = None,
        gaps: dict[str, bool] | None = None,
    ) -> Tensor:
        """`values`, followed by spare rows of background."""
        spare = self.case.spare if spare is None else spare
        shape = (values.shape[0] + spare, *values.shape[1:])
        rows = self.memory.new(shape, dtype, **(self.gaps if gaps is None else gaps))
        rows[: values.shape[0]].copy_(to_dtype(values, dtype))
        return rows

    def _ints(self, values: tuple[int, ...]) -> Tensor:
        return self.memory.of(torch.tensor(values, dtype=torch.int32, device="cpu"))

    def _offsets(self, lengths: tuple[int, ...]) -> Tensor:
        return self._ints((0, *accumulate(lengths)))

    def _weights(self, keys: int, used: Tensor) -> Weights:
        """k_scale has one entry per key row; only those of `used` rows are written."""
        case, draw = self.case, self.draw
        sink = draw.sink()
        q_scale = k_scale = None
        if case.q_scale:
            spare = 0 if case.form == "sparse" else case.spare
            q_scale = self._rows(draw.per_token_scale(case.total_q), torch.float32, spare)
        if case.k_scale:
            k_scale = self.memory.new((keys,), torch.float32)
            values = draw.per_token_scale(used.shape[0])
            k_scale[used.to(k_scale.device)] = values.to(k_scale.device)
        return Weights(
            case.factor, None if sink is None else self.memory.of(sink), q_scale, k_scale
        )

    def _options(self, weights: Weights) -> dict[str, Any]:
        q_scale = weights.q_scale
        if q_scale is not None and self.case.seed % 2:
            q_scale = q_scale[:, None]  # the call takes [tokens] and [tokens, 1] alike
        return {
            "scale": weights.scale,
            "sink": weights.sink,
            "q_scale": q_scale,
            "k_scale": weights.k_scale,
        }

    def _latent_beside_rope(self) -> int:
        """How wide the latent of rows is from which only rope is read; narrow if it may be."""
        case = self.case
        return next((latent for latent, d in FORMATS[case.kv].widths if d == case.d_rope), 32)

    def _cache(self, pages: int, latent: int, stored: Case | CaseSource) -> LatentCache:
        """A pool of background. Of several sources, pages of formats that engines keep scales in
        are theirs in two of three cases: all rows of a page, then their scales, then a gap."""
        case, format = self.case, FORMATS.get(stored.kv, BF16)
        layout, scales = format.layout(latent, case.d_rope), None
        if case.sources and format.scales_lie == "page" and case.seed % 3:
            page_bytes = layout.page_bytes(stored.page_size)
            raw = self.memory.new((pages, page_bytes), torch.uint8, **self.gaps)
            return LatentCache.from_pages(
                raw,
                page_size=stored.page_size,
                format=format.name,
                latent=latent,
                rope=case.d_rope,
            )
        dtype, columns = layout.data
        shape: tuple[int, ...] = (pages, stored.page_size)
        data = self.memory.new((*shape, columns), DTYPES[dtype], **self.gaps)
        if layout.scale_columns:
            shape = (*shape, layout.scale_columns)
            scales = self.memory.new(shape, DTYPES[format.scale], **self.gaps)
        return LatentCache(data, scales, latent, case.d_rope, format.name)

    def _paged_cache(self, latent: int) -> tuple[LatentCache, Tensor]:
        """A pool in random page order, its keys written, and the table that finds them."""
        case = self.case
        counts = [-(-k // case.page_size) for k in case.k_lens]
        cache = self._cache(sum(counts) + case.spare, latent, case)
        order = self.draw.permutation(cache.num_pages).to(torch.int32)
        shape = (len(counts), max(counts, default=0) + case.spare)
        table = self.memory.new(shape, torch.int32, **self.gaps)
        start = 0
        for b, (count, first) in enumerate(zip(counts, self.first_keys, strict=True)):
            before = first // case.page_size
            table[b, before:count] = order[start + before : start + count].to(table.device)
            start += count
        self._append(cache, self._slots(table, case.page_size), self.positions[self.read])
        return cache, table

    def _slots(self, table: Tensor, page_size: int) -> Tensor:
        """Physical rows of all keys that are seen, sequence by sequence, on the CPU.

        Spelled out rather than shared with openmla.sequences: a mistake there then reads rows that
        were never written, which poisons show.
        """
        pages = table.tolist()
        rows = [
            pages[b][key // page_size] * page_size + key % page_size
            for b, keys in enumerate(self.case.k_lens)
            for key in range(self.first_keys[b], keys)
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def _append(self, cache: LatentCache, slots: Tensor, positions: Tensor) -> None:
        case, device = self.case, self.memory.device
        rope = self.draw.keys(positions, case.d_rope).to(device)
        slots = slots.to(device)
        if case.form == "dense" and not cache.layout.quantized:
            # Only the rope columns are addressed; the latent ones stay background.
            page, offset = slots // cache.page_size, slots % cache.page_size
            cache.data[page, offset, cache.latent :] = to_dtype(rope, torch.bfloat16)
            return
        if case.form == "dense":
            latent = self.draw.keys(positions, cache.latent)
        else:
            latent = self.draw.latent(positions)
        latent = torch.where(latent.isinf(), latent, finite(latent, torch.bfloat16))
        cache.append(latent.to(device), rope, slots)

    def _latent_rows(self, positions: Tensor) -> Tensor:
        rope = self.draw.keys(positions, self.case.d_rope)
        return torch.cat([self.draw.latent(positions), rope], dim=1)

    def _index_lists(
        self, tokens: int, rows: int, lists: Case | CaseSource
    ) -> tuple[Tensor, Tensor | None]:
        """int64 lists [tokens, topk]; entries at or past a token's length are -1 for now."""
        draw, topk = self.draw, lists.topk
        bad = torch.tensor([-1, -(2**31), 2**31 - 1, rows, rows + 1], device="cpu")
        listed = bad[draw.integers(0, len(bad), tokens, topk)]
        if rows and lists.index_kind != "invalid":
            named = draw.integers(0, rows, tokens, topk)
            if lists.index_kind == "distinct":
                named = torch.full((tokens, topk), -1, device="cpu")
                for token in range(tokens):
                    order = draw.permutation(rows)[:topk]
                    named[token, : order.shape[0]] = order
            keep = draw.integers(0, 10, tokens, topk) < (7 if lists.index_kind == "mixed" else 10)
            if lists.index_kind == "block_end":
                ends = [end for end in (15, 31, 63, 127) if end < topk] or [max(topk - 1, 0)]
                first_bad = torch.tensor(ends)[draw.integers(0, len(ends), tokens, 1)]
                keep = torch.arange(topk) != first_bad
            listed = torch.where(keep, named, listed)
        if lists.topk_lengths == "none":
            return listed, None
        low, high = {"full": (topk, topk), "ragged": (0, topk), "wild": (-2, topk + 3)}[
            lists.topk_lengths
        ]
        lengths = draw.integers(low, high + 1, tokens)
        listed[_count(topk) >= lengths[:, None]] = -1
        return listed, lengths

    def _fill_unused(self, listed: Tensor, lengths: Tensor | None, used: Tensor, rows: int) -> None:
        """Entries at or past topk_lengths: background, and best a real row that nobody names."""
        if lengths is None:
            return
        unnamed = sorted(set(range(rows)) - set(used.tolist()))
        real = unnamed and self.memory.background == "nan"
        filler = unnamed[0] if real else INT_FILL[self.memory.background]
        listed[_count(listed.shape[1]) >= lengths[:, None]] = filler
