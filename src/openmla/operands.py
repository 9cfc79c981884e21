"""The tensors of one call, checked and bundled, as kernels receive them.

One record per form; `problem(results)` is the same call as plain data, for the planner. Results are
allocated by the caller; a kernel only writes into them. `max_logits` is the largest scaled score of
a row, -inf where it sees no key.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from openmla.cache import DTYPES, LatentCache
from openmla.planning.problems import AnyProblem
from openmla.problem import DTYPE_BYTES, Problem, RopeSource, RowSource
from openmla.sources import Listed, Source, Span, TurnBack

DTYPE_NAMES = {DTYPES[name]: name for name in DTYPE_BYTES}


class AnyOperands(Protocol):
    """The tensors of a call of attention, of its backward pass, or of a step of the indexer."""

    @property
    def device(self) -> torch.device:
        """Where the call runs."""

    def problem(self, results: Any, /) -> AnyProblem:
        """The call without its tensors."""


@dataclass(frozen=True, eq=False)
class Results:
    """Where a kernel writes: out [total_q, H, d_v]; lse, max_logits fp32 [total_q, H] or None."""

    out: Tensor
    lse: Tensor | None = None
    max_logits: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The results that are wanted, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def of_tokens(self, tokens: slice | None) -> "Results":
        """Where the rows of some tokens are written; None: of all."""
        if tokens is None:
            return self
        return Results(**{name: x[tokens] for name, x in self.tensors().items()})

    def write(self, place: Any, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
        """Fill the rows at a place; what is not wanted is dropped."""
        self.out[place] = out.to(self.out.dtype)
        for rows, values in ((self.lse, lse), (self.max_logits, max_logits)):
            if rows is not None:
                rows[place] = values

    def clear(self) -> None:
        """Make every row an empty row: zeros, -inf."""
        for name, rows in self.tensors().items():
            rows.fill_(0.0 if name == "out" else -torch.inf)


@dataclass(frozen=True, eq=False)
class Weights:
    """What shapes the scores besides the dot product, the same for every form.

    scores = scale * q_scale[query] * k_scale[key] * (q . k); sink is one more term exp(sink[head])
    in the denominator.
    """

    scale: float
    sink: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None


class _OfQueries:
    """A call runs where its queries are, and leaves its results as they are."""

    q: Tensor
    turn_back: TurnBack | None = None

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return self.q.device


@dataclass(frozen=True, eq=False)
class DenseOperands(_OfQueries):
    """MHA form: per-head keys and values, ragged; rope from a tensor or from a cache.

    K and V may have fewer heads than q: query head h then reads head h // group of theirs.
    """

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor | None
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool
    weights: Weights
    rope_cache: LatentCache | None = None
    block_table: Tensor | None = None
    k_start: Tensor | None = None
    """Where the keys of each sequence begin; cu_seqlens_k then says only how many there are."""
    key_mask: Tensor | None = None
    """int32 [total_q, words]: bit s % 32 of word s // 32 lets a query see key s of its sequence."""
    window: int = 0
    """Keys that a query sees at most, the nearest ones up to its own position; 0: all."""

    def problem(self, results: Results) -> Problem:
        """This call without its tensors."""
        d_nope, cache = self.k_nope.shape[2], self.rope_cache
        rope = self.k_nope if self.k_rope is None else self.k_rope
        rows = rope if cache is None else cache.data[..., cache.latent :]
        copied = [self.q, self.k_nope, rows, self.v, results.out]
        copied += [] if self.key_mask is None else [self.key_mask]
        return Problem(
            form="dense",
            d_nope=d_nope,
            d_rope=self.q.shape[2] - d_nope,
            d_v=self.v.shape[2],
            group=self.group,
            kv_dtype=DTYPE_NAMES[self.k_nope.dtype],
            v_dtype=DTYPE_NAMES[self.v.dtype],
            rope=self._rope_source(),
            rope_dtype=DTYPE_NAMES[rope.dtype] if cache is None else cache.format,
            page_size=0 if cache is None else cache.page_size,
            causal=self.causal,
            window=self.window,
            has_k_start=self.k_start is not None,
            has_key_mask=self.key_mask is not None,
            batch=self.cu_seqlens_q.shape[0] - 1,
            total_k=self.k_nope.shape[0],
            self_attention=same_offsets(self.cu_seqlens_q, self.cu_seqlens_k),
            aligned_16=aligned_16(*copied),
            **_common(self.q, self.weights, results),
        )

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.q.shape[1] // self.k_nope.shape[1]

    def of_heads(self, rows: Tensor, heads: slice | None = None) -> Tensor:
        """Rows [n, heads of K, d] as query heads see them, [n, heads, d]: some of them, or all."""
        heads = slice(0, self.q.shape[1]) if heads is None else heads
        if self.group == 1:
            return rows[:, heads]
        first, last = heads.start // self.group, -(-heads.stop // self.group)
        each = rows[:, first:last, None].expand(-1, -1, self.group, -1).flatten(1, 2)
        return each[:, heads.start - first * self.group :][:, : heads.stop - heads.start]

    @property
    def has_keys(self) -> bool:
        """Whether a query could see a key: there are keys, and where their rope lies in pages there
        are pages, and entries in the block table."""
        mask, cache, table = self.key_mask, self.rope_cache, self.block_table
        paged = cache is not None and table is not None and self.q.shape[2] > self.k_nope.shape[2]
        reached = not paged or bool(cache.rows and table.shape[1])  # type: ignore[union-attr]
        return bool(self.k_nope.shape[0]) and reached and (mask is None or mask.shape[1] > 0)

    def _rope_source(self) -> RopeSource:
        if self.rope_cache is not None:
            return "cache"
        if self.k_rope is None:
            return "none"
        return "shared" if self.k_rope.dim() == 2 else "per_head"


@dataclass(frozen=True, eq=False)
class LatentOperands(_OfQueries):
    """Latent form over a paged cache: every head reads the same rows."""

    q: Tensor
    cache: LatentCache
    block_table: Tensor
    cache_lengths: Tensor
    cu_seqlens_q: Tensor
    causal: bool
    d_v: int
    weights: Weights
    invariant: bool = False
    """A row's bits depend on the row and the keys it sees alone."""
    window: int = 0
    """Keys that a query sees at most, the nearest ones up to its own position; 0: all."""
    range_keys: int = 0
    """Keys of a range of an invariant call; 0: as many as the plan says."""

    def of_tokens(self, tokens: slice) -> "LatentOperands":
        """Tokens first … last - 1 of all requests as a call of their own, without waiting for the
        device. A causal request that loses its last n tokens loses its last n keys too.

        Only with `invariant` do the rows have the bits that they have in the whole call.
        """
        first, last, total = tokens.start, tokens.stop, self.q.shape[0]
        ends = self.cu_seqlens_q.clamp(0, total)
        lengths = self.cache_lengths.clamp(0, self.block_table.shape[1] * self.cache.page_size)
        if self.causal:
            lengths = lengths - (ends[1:] - last).clamp(min=0)
        q_scale = self.weights.q_scale
        weights = replace(self.weights, q_scale=None if q_scale is None else q_scale[tokens])
        return replace(
            self,
            q=self.q[tokens],
            cu_seqlens_q=ends.clamp(first, last) - first,
            cache_lengths=lengths,
            weights=weights,
        )

    @property
    def has_keys(self) -> bool:
        """Whether a query could see a key: the pool has rows, and the block table entries."""
        return bool(self.cache.rows and self.block_table.numel())

    def problem(self, results: Results) -> Problem:
        """This call without its tensors."""
        return _latent_problem(
            self,
            results,
            form="latent",
            invariant=self.invariant,
            range_keys=self.range_keys,
            page_size=self.cache.page_size,
            causal=self.causal,
            window=self.window,
            batch=self.cu_seqlens_q.shape[0] - 1,
            total_k=self.cache.rows,
            table_keys=self.block_table.shape[1] * self.cache.page_size,
        )


@dataclass(frozen=True, eq=False)
class SparseOperands(_OfQueries):
    """Latent form, each query with its own list of physical rows."""

    q: Tensor
    cache: LatentCache | Tensor
    indices: Tensor
    topk_lengths: Tensor | None
    d_v: int
    weights: Weights

    @property
    def sources(self) -> tuple[Source, ...]:
        """The one list of rows that this is."""
        return (Listed(self.cache, self.indices, self.topk_lengths),)

    @property
    def rows(self) -> int:
        """Rows an index may name."""
        return self.sources[0].count

    @property
    def has_keys(self) -> bool:
        """Whether a query could see a row."""
        return self.sources[0].has_rows

    def read(self, rows: Tensor) -> Tensor:
        """The values of physical rows, [len(rows), d_qk]."""
        return self.sources[0].read(rows)

    def problem(self, results: Results) -> Problem:
        """This call without its tensors."""
        return _latent_problem(
            self,
            results,
            form="sparse",
            causal=False,
            topk=self.indices.shape[1],
            page_size=self.cache.page_size if isinstance(self.cache, LatentCache) else 0,
            has_topk_lengths=self.topk_lengths is not None,
            wants_max_logits=results.max_logits is not None,
            total_k=self.rows,
        )


@dataclass(frozen=True, eq=False)
class AttendOperands(_OfQueries):
    """Sparse form, rows from one or two sources in one softmax: lists and spans.

    One list alone is `SparseOperands`; whatever reads `sources` serves both.
    """

    q: Tensor
    sources: tuple[Source, ...]
    """In the order of the softmax."""
    d_v: int
    weights: Weights
    turn_back: TurnBack | None = None
    """How the last columns of the results are turned back."""

    @property
    def latent(self) -> int:
        """Columns without rope: what caches say, and all of V where there are plain rows alone."""
        caches = [source.rows for source in self.sources if isinstance(source.rows, LatentCache)]
        return caches[0].latent if caches else self.d_v

    @property
    def has_keys(self) -> bool:
        """Whether a query could see a row of any source."""
        return any(source.has_rows for source in self.sources)

    def problem(self, results: Results) -> Problem:
        """This call without its tensors."""
        first, *more = (row_source(source) for source in self.sources)
        width, rows = self.q.shape[2], [data_of(source.rows) for source in self.sources]
        return Problem(
            form="sparse",
            d_nope=self.latent,
            d_rope=width - self.latent,
            d_v=self.d_v,
            causal=False,
            second=more[0] if more else None,
            turned_back=0 if self.turn_back is None else self.turn_back.columns,
            aligned_16=aligned_16(self.q, *rows, results.out)
            and all(scales_are_words(source.rows) for source in self.sources),
            **asdict(first),
            **_common(self.q, self.weights, results),
        )


Operands = DenseOperands | LatentOperands | SparseOperands | AttendOperands


def data_of(rows: LatentCache | Tensor) -> Tensor:
    """The tensor that holds the elements of rows."""
    return rows.data if isinstance(rows, LatentCache) else rows


def row_source(source: Source) -> RowSource:
    """A source without its tensors."""
    rows = source.rows
    common: dict[str, Any] = {
        "kv_dtype": rows.format if isinstance(rows, LatentCache) else DTYPE_NAMES[rows.dtype],
        "page_size": rows.page_size if isinstance(rows, LatentCache) else 0,
        "total_k": source.count,
    }
    if isinstance(source, Span):
        return RowSource(span=True, table_keys=source.table_keys, **common)
    lengths = source.lengths is not None
    return RowSource(topk=source.indices.shape[1], has_topk_lengths=lengths, **common)


def _latent_problem(op: LatentOperands | SparseOperands, results: Results, **rest: Any) -> Problem:
    """What the latent and the sparse form have in common."""
    rows, width = op.cache, op.q.shape[2]
    if isinstance(rows, LatentCache):
        latent, kv_dtype, data = rows.latent, rows.format, rows.data
    else:
        latent, kv_dtype, data = op.d_v, DTYPE_NAMES[rows.dtype], rows
    return Problem(
        d_nope=latent,
        d_rope=width - latent,
        d_v=op.d_v,
        kv_dtype=kv_dtype,
        v_dtype=kv_dtype,
        rope="shared" if width > latent else "none",
        rope_dtype=kv_dtype,
        aligned_16=aligned_16(op.q, data, results.out) and scales_are_words(rows),
        **_common(op.q, op.weights, results),
        **rest,
    )


def _common(q: Tensor, weights: Weights, results: Results) -> dict[str, Any]:
    """Fields that every form fills alike."""
    given = {f"has_{x}": getattr(weights, x) is not None for x in ("sink", "q_scale", "k_scale")}
    return {
        "heads": q.shape[1],
        "q_dtype": DTYPE_NAMES[q.dtype],
        "total_q": q.shape[0],
        "fp32_out": results.out.dtype == torch.float32 != q.dtype,
        "wants_lse": results.lse is not None,
        **given,
    }


def same_offsets(queries: Tensor, keys: Tensor) -> bool:
    """Whether offsets of queries and of keys are one tensor: then each sequence has as many keys as
    queries. Views that begin at one address may still step differently.

    >>> offsets = torch.tensor([0, 5, 9])
    >>> same_offsets(offsets[:2], offsets[:2]), same_offsets(offsets[:2], offsets[::2])
    (True, False)
    """
    return queries.data_ptr() == keys.data_ptr() and queries.stride() == keys.stride()


def token_slices(total: int, most: int) -> Iterator[slice | None]:
    """All tokens in parts of at most so many; 0, or no fewer than there are: None, for all."""
    if not most or most >= total:
        yield None
        return
    for first in range(0, total, most):
        yield slice(first, min(first + most, total))


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to just past its last."""
    if x.is_contiguous():
        return int(x.nbytes)
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (reach + 1) * x.element_size() if x.numel() else 0


def scales_are_words(rows: LatentCache | Tensor) -> bool:
    """Whether one-byte scales of rows, if there are any, can be read four at a time."""
    scales = rows.scales if isinstance(rows, LatentCache) else None
    if scales is None or scales.element_size() > 1:
        return True
    return all(n % 4 == 0 for n in (scales.data_ptr(), *scales.stride()[:2]))


def aligned_16(*tensors: Tensor) -> bool:
    """Whether every pointer and every row stride is a multiple of 16 bytes, and none is 0: bulk
    copies have no descriptor of a tensor whose rows are one row, as `expand` makes them.

    >>> heads = torch.zeros(4, 2, 8)
    >>> aligned_16(heads), aligned_16(heads[:, :1].expand(4, 2, 8))
    (True, False)
    """
    return all(
        t.data_ptr() % 16 == 0
        and all(n * t.element_size() % 16 == 0 and n > 0 for n in t.stride()[:-1])
        for t in tensors
    )
