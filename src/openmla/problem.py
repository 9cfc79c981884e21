"""`Problem`: what is to be computed, as plain data.

A frozen, hashable record of everything that can change which kernel runs or how: dimensions,
dtypes, mask, where the keys live. No tensors, no devices, so a problem can be planned on a machine
that has neither torch nor a GPU. The hash is the key of every plan and kernel cache.

>>> deepseek_v3 = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128,
...                       total_q=512, total_k=512)
>>> deepseek_v3.d_qk
192
>>> print(deepseek_v3)
dense bf16, 128 heads, d_nope 128 + d_rope 64 -> d_v 128, 512 queries x 512 keys, 1 sequence, causal
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from openmla.errors import InvalidArgument
from openmla.formats import FORMATS

Form = Literal["dense", "latent", "sparse"]
Backend = Literal["auto", "reference", "cpu", "hopper", "blackwell", "cdna4", "portable"]
"""What calls take as `backend`: a family of kernels, or the best that a chip has."""
RopeSource = Literal["none", "shared", "per_head", "cache"]

FORMS = ("dense", "latent", "sparse")
ROPE_SOURCES = ("none", "shared", "per_head", "cache")
# Element types by the short names used everywhere in openmla, with their size in bytes.
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}
CACHE_FORMATS = tuple(FORMATS)
MAX_HEADS = 128
LEAST_RANGE, MOST_RANGE = 128, 2**20
"""Keys of a range that a caller may name: from a step of the kernels, which no range cuts, to more
than a model's context. Powers of two, since device code divides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where one part of the rows of a query comes from: a list, or consecutive positions.

    The fields are those that a `Problem` has for its first source.
    """

    kv_dtype: str = "bf16"
    page_size: int = 0
    span: bool = False
    topk: int = 0
    has_topk_lengths: bool = False
    total_k: int = 0
    table_keys: int = 0

    def __post_init__(self) -> None:
        _check_choice("kv_dtype", self.kv_dtype, (*DTYPE_BYTES, *CACHE_FORMATS))
        for name in ("page_size", "topk", "total_k", "table_keys"):
            _check_count(name, getattr(self, name))
        for name in ("span", "has_topk_lengths"):
            _check_flag(name, getattr(self, name))
        _check_span(self)

    @property
    def most_rows(self) -> int:
        """Most rows that one query can see of it."""
        return self.table_keys if self.span else self.topk

    def __str__(self) -> str:
        kind = "positions" if self.span else f"top-{self.topk}"
        pages = f" in pages of {self.page_size}" if self.page_size else ""
        return f"{kind} of {self.total_k} {self.kv_dtype} rows{pages}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call without its tensors.

    In the latent and sparse forms `d_nope` is the latent width (512 for DeepSeek-V3) and `d_v`
    equals it: V is the first `d_v` columns of the row that K is.
    """

    form: Form
    heads: int
    d_nope: int
    d_rope: int
    d_v: int
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    """Element type of the keys and values, or a cache format when they come from a cache."""
    v_dtype: str = "bf16"
    rope: RopeSource = "shared"
    rope_dtype: str = "bf16"
    """Element type of `k_rope`, or the cache format it is read from."""
    page_size: int = 0
    """Rows per page of the cache; 0 when nothing is paged."""
    causal: bool = True
    window: int = 0
    """Keys that a causal query sees at most: those up to its own position that are nearest to it;
    0: all of them. Dense and latent form."""
    group: int = 1
    """Query heads that share a head of K and V, one after another; dense form only."""
    has_k_start: bool = False
    """Sequences name the row their keys begin at, so that they may share keys. Dense form only."""
    span: bool = False
    """A query sees consecutive positions of a request's pages instead of a list of rows. Sparse
    form only."""
    topk: int = 0
    has_topk_lengths: bool = False
    second: RowSource | None = None
    """A second source of rows in the same softmax, after the one that the other fields describe.
    Sparse form only."""
    invariant: bool = False
    """A row's bits depend on the row and the keys it sees alone, not on how many other queries its
    request has. Latent form only."""
    range_keys: int = 0
    """Keys of a range of an invariant call; 0: as many as openmla.planning.latent_split says."""
    turned_back: int = 0
    """Columns at the end of V whose results are turned back by the angle of the query's position;
    0: none. Sparse form only."""
    fp32_out: bool = False
    """The output is fp32 beside queries of another type, so that sums of parts lose nothing."""
    has_sink: bool = False
    has_q_scale: bool = False
    has_k_scale: bool = False
    has_key_mask: bool = False
    """Whether bits say which keys a query sees, besides causal; dense form only."""
    wants_lse: bool = False
    wants_max_logits: bool = False
    batch: int = 1
    total_q: int = 0
    total_k: int = 0
    """Rows of keys that exist: ragged keys, rows of a plain tensor, or capacity of the cache."""
    self_attention: bool = False
    """Queries and keys share their offsets: each request has as many keys as queries. Dense form
    only."""
    table_keys: int = 0
    """Keys that a line of the block table can name; 0 where no table is known. Latent form, and
    spans."""
    aligned_16: bool = True
    """Every pointer and every stride is a multiple of 16 bytes, no stride is 0: bulk copies demand
    it."""

    def __post_init__(self) -> None:
        _check_choice("form", self.form, FORMS)
        _check_choice("rope", self.rope, ROPE_SOURCES)
        _check_choice("q_dtype", self.q_dtype, tuple(DTYPE_BYTES))
        for name in ("kv_dtype", "v_dtype", "rope_dtype"):
            _check_choice(name, getattr(self, name), (*DTYPE_BYTES, *CACHE_FORMATS))
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidArgument(name, "an int", repr(value))
        for name in _FLAGS:
            _check_flag(name, getattr(self, name))
        if not 1 <= self.heads <= MAX_HEADS:
            raise InvalidArgument("heads", f"1 to {MAX_HEADS}", self.heads)
        if self.group < 1 or self.heads % self.group:
            raise InvalidArgument("group", f"a divisor of {self.heads} heads", self.group)
        if self.group > 1 and self.form != "dense":
            raise InvalidArgument("group", "1 unless the form is dense", self.group)
        for name in ("d_nope", "d_v"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(name, "a positive width", getattr(self, name))
        for name in ("d_rope", "page_size", "topk", "batch", "total_q", "total_k", "table_keys"):
            _check_count(name, getattr(self, name))
        _check_count("window", self.window)
        if self.window and (self.form == "sparse" or not self.causal):
            expected = "0 unless the form is dense or latent, and causal"
            raise InvalidArgument("window", expected, self.window)
        if self.form != "dense" and self.has_k_start:
            raise InvalidArgument("has_k_start", "False: only dense keys are ragged", True)
        if self.form != "dense" and self.d_v > self.d_nope:
            raise InvalidArgument("d_v", f"at most the latent width {self.d_nope}", self.d_v)
        self._check_invariant()
        if self.has_key_mask and self.form != "dense":
            raise InvalidArgument("has_key_mask", "False unless the form is dense", True)
        self._check_turn()
        self._check_sources()
        self._settle()

    def _check_invariant(self) -> None:
        """The latent form has invariant calls, and they have ranges of a length of their own."""
        if self.range_keys and self.form != "latent":
            raise InvalidArgument("range_keys", "0 unless the form is latent", self.range_keys)
        if self.invariant and self.form != "latent":
            raise InvalidArgument("invariant", "False unless the form is latent", True)
        if self.range_keys and not (self.invariant and is_range(self.range_keys)):
            expected = f"0, or in an invariant call {RANGES_TAKEN}"
            raise InvalidArgument("range_keys", expected, self.range_keys)

    def _check_turn(self) -> None:
        """Pairs of columns turn, in the sparse form alone, and nothing scales single tokens or keys
        beside that."""
        columns = self.turned_back
        _check_count("turned_back", columns)
        if columns and self.form != "sparse":
            raise InvalidArgument("turned_back", "0 unless the form is sparse", columns)
        if columns % 2 or columns > self.d_v:
            raise InvalidArgument("turned_back", f"pairs of columns of {self.d_v}", columns)
        if columns and (self.has_k_scale or self.has_q_scale):
            raise InvalidArgument("turned_back", "0 beside q_scale or k_scale", columns)

    def _check_sources(self) -> None:
        """Spans and second sources exist in the sparse form alone."""
        if isinstance(self.second, dict):  # as `to_json` wrote it
            object.__setattr__(self, "second", RowSource(**self.second))
        if self.second is not None and not isinstance(self.second, RowSource):
            raise InvalidArgument("second", "a RowSource or None", repr(self.second))
        if self.form != "sparse":
            for name in ("span", "second"):
                if getattr(self, name):
                    raise InvalidArgument(name, "nothing unless the form is sparse", "a value")
        elif self.span:
            _check_span(self)
        if self.second is not None and (self.has_k_scale or self.has_q_scale):
            raise InvalidArgument("second", "None beside q_scale or k_scale", "a source")

    def _settle(self) -> None:
        """Give fields that say nothing new the one value they can have, so that equals are equal.

        V and rope of the latent and sparse forms are columns of the row that K is.
        """
        if self.q_dtype == "fp32":
            object.__setattr__(self, "fp32_out", False)
        if self.form != "dense":
            object.__setattr__(self, "self_attention", False)
            object.__setattr__(self, "rope", "shared")
            object.__setattr__(self, "v_dtype", self.kv_dtype)
            object.__setattr__(self, "rope_dtype", self.kv_dtype)
        if self.form != "latent" and not self.span:
            object.__setattr__(self, "table_keys", 0)
        if not self.d_rope:
            object.__setattr__(self, "rope", "none")
            object.__setattr__(self, "rope_dtype", self.kv_dtype)

    @property
    def d_qk(self) -> int:
        """Width of a query: d_nope + d_rope."""
        return self.d_nope + self.d_rope

    @property
    def key_heads(self) -> int:
        """Heads of K and V in the dense form."""
        return self.heads // self.group

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """Where the rows of the sparse form come from, in the order of the softmax."""
        first = RowSource(
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            span=self.span,
            topk=self.topk,
            has_topk_lengths=self.has_topk_lengths,
            total_k=self.total_k,
            table_keys=self.table_keys,
        )
        return (first,) if self.second is None else (first, self.second)

    @property
    def is_attend(self) -> bool:
        """Whether this is a call of `mla_attend` that one list of rows, as `mla_prefill_sparse` has
        it, is not all of: spans, a second source, or results that are turned back."""
        return self.span or self.second is not None or self.turned_back > 0

    @property
    def most_rows(self) -> int:
        """Most rows that one query of the sparse form can see, of all sources together."""
        return sum(source.most_rows for source in self.sources)

    @property
    def most_keys(self) -> int:
        """Most keys that one request can have, by what is known without its length."""
        return self.table_keys or self.total_k

    @property
    def out_dtype(self) -> str:
        """Outputs have the dtype of the queries, FP8 queries give bf16; or fp32, if asked for."""
        if self.fp32_out:
            return "fp32"
        return "bf16" if self.q_dtype == "e4m3" else self.q_dtype

    def keys_seen(self, queries: int, keys: int) -> int:
        """How many keys of a request any of its queries sees.

        >>> windowed = Problem(form="dense", heads=1, d_nope=8, d_rope=0, d_v=8, window=128)
        >>> windowed.keys_seen(queries=3, keys=4096), windowed.keys_seen(queries=3, keys=50)
        (130, 50)
        """
        return min(keys, max(queries, 1) + self.window - 1) if self.window else keys

    @property
    def flops(self) -> int:
        """Upper bound of the multiply-add work, 2 flops each, when every query sees every key, or
        as many as a window has."""
        keys = self.most_rows if self.form == "sparse" else self.total_k
        keys = min(keys, self.window or keys)
        return 2 * self.heads * self.total_q * keys * (self.d_qk + self.d_v)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values; `Problem(**d)` is the way back."""
        return asdict(self)

    def __str__(self) -> str:
        dtype = self.q_dtype if self.kv_dtype == self.q_dtype else f"{self.q_dtype}/{self.kv_dtype}"
        widths = f"d_nope {self.d_nope} + d_rope {self.d_rope} -> d_v {self.d_v}"
        sparse = self.form == "sparse"
        keys = f"{self.total_k} keys"
        if sparse and (self.span or self.second):
            keys = " and ".join(f"({source})" for source in self.sources)
        elif sparse:
            keys = f"top-{self.topk} of {self.total_k} rows"
        work = f"{self.total_q} queries x {keys}"
        heads = f"{self.heads} heads" + f" over {self.key_heads} of K and V" * (self.group > 1)
        parts = [f"{self.form} {dtype}", heads, widths, work]
        if not sparse:
            parts += [f"{self.batch} sequence{'s' * (self.batch != 1)}"]
            parts += ["causal" if self.causal else "full"]
            parts += [f"window of {self.window}"] * bool(self.window)
            parts += ["keys that may be shared"] * self.has_k_start
        if self.page_size and not (self.span or self.second):
            parts += [f"pages of {self.page_size}"]
        options = {"key mask": self.has_key_mask, "sink": self.has_sink, "lse": self.wants_lse}
        options |= {"invariant": self.invariant, "fp32 out": self.fp32_out}
        options |= {f"ranges of {self.range_keys} keys": bool(self.range_keys)}
        options |= {f"{self.turned_back} columns turned back": bool(self.turned_back)}
        parts += [label for label, on in options.items() if on]
        return ", ".join(parts)


_COUNTS = tuple(f.name for f in fields(Problem) if f.type == "int")
_FLAGS = tuple(f.name for f in fields(Problem) if f.type == "bool")


RANGES_TAKEN = f"a power of two from {LEAST_RANGE} to {MOST_RANGE}"


def is_range(keys: int) -> bool:
    """Whether a caller may name ranges of so many keys.

    >>> [keys for keys in (0, 64, 128, 129, 512, 2**20, 2**21) if is_range(keys)]
    [128, 512, 1048576]
    """
    return LEAST_RANGE <= keys <= MOST_RANGE and not keys & (keys - 1)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(name, "one of " + ", ".join(choices), repr(value))


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(name, "a count of 0 or more", value)


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, "True or False", repr(value))


def _check_span(source: Problem | RowSource) -> None:
    """Positions lie in pages, and there is no list beside them."""
    if source.span and not source.page_size:
        raise InvalidArgument("page_size", "at least 1: a span lies in pages", source.page_size)
    if source.span and (source.topk or source.has_topk_lengths):
        raise InvalidArgument("topk", "0, and no lengths, for a span", source.topk)
