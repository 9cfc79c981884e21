"""`Case`: one attention call as plain data. Everything random about it follows from its seed.

A case says what to compute; `openmla.lab.testing.build` turns it into tensors. It goes to JSON and
back, so a failure found anywhere can be replayed anywhere.

>>> case = Case(form="dense", heads=2, d_nope=8, d_rope=4, d_v=8, q_lens=(3,), k_lens=(5,))
>>> Case.from_json(case.to_json()) == case
True
>>> print(case)
dense bf16 2 heads 8+4->8 q(3) k(5) causal normal seed 0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from openmla.errors import InvalidArgument
from openmla.problem import CACHE_FORMATS, DTYPE_BYTES, FORMS, RANGES_TAKEN, Form, is_range
from openmla.records import decode

ROPES = ("none", "shared", "shared_3d", "per_head", "cache")
"""Where dense rope comes from; shared_3d is [T, 1, d_rope]."""
KV_KINDS = ("plain", *CACHE_FORMATS)
"""plain: rows in an ordinary tensor, not a LatentCache."""
INDEX_KINDS = ("distinct", "duplicates", "mixed", "invalid", "block_end")
"""mixed: some indices negative or past the pool; invalid: all of them; block_end: one of a token's,
in the last place of a block of 16, 32, 64 or 128.

Of spans, duplicates: requests share pages; mixed: some begins, ends, requests and pages name
nothing or lie in the wrong order; invalid: every span does. block_end is distinct."""
SOURCE_KINDS = ("list", "span")
TOPK_LENGTHS = ("none", "full", "ragged", "wild")
"""ragged: 0 to topk; wild: also negative and past topk."""
SINKS = ("none", "normal", "low", "high", "mixed")
"""low: -inf everywhere; high: +inf everywhere; mixed: both among ordinary ones."""
KEY_MASKS = ("none", "half", "few", "all")
"""How many bits of a dense call's key_mask are set: few leave rows and blocks of keys empty."""
VALUES = ("normal", "peaky", "rising", "tiny", "large", "equal", "exact", "broken")
"""What the numbers look like; see openmla.lab.testing.values."""
LAYOUTS = ("contiguous", "strided", "aligned", "values")
"""strided: rows with odd gaps between them; aligned: gaps that keep rows at multiples of 16 bytes,
as hardware copies need them; values: V alone, aligned, as a view of a projection's output is."""
OUTS = ("fresh", "given", "strided", "aligned")
"""fresh: the call allocates out; otherwise the caller passes one, full of NaN."""
DEFAULT_DTYPES = ("fp32", "bf16", "fp16")
DEFAULT_DEVICES = ("", "meta", "same")
"""same: the device that the tensors are on. An empty string leaves torch's own."""

MOST_SOURCES = 2

LEAST = {
    "heads": 1,
    "group": 1,
    "d_nope": 1,
    "d_rope": 0,
    "d_v": 1,
    "page_size": 1,
    "spare": 0,
    "topk": 0,
    "turned": 0,
    "window": 0,
}
"""The smallest value of each count."""


@dataclass(frozen=True, slots=True)
class CaseSource:
    """One source of a call of `mla_attend`: a list of rows for each query, or a span of positions.

    >>> print(CaseSource("span", "fp8_584", page_size=64, topk=65, rows=200))
    span of 65 of 200 fp8_584 rows distinct pages of 64
    """

    kind: str = "list"
    kv: str = "bf16"
    page_size: int = 16
    topk: int = 4
    """Entries of each list; the most positions of a span, of which some end outside the table."""
    rows: int = 4
    """Rows that lists name; positions of a request that have pages."""
    index_kind: str = "distinct"
    topk_lengths: str = "none"
    """How many entries of each list count; spans have none."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "kind": SOURCE_KINDS,
            "kv": KV_KINDS if self.kind == "list" else CACHE_FORMATS,
            "index_kind": INDEX_KINDS,
            "topk_lengths": TOPK_LENGTHS if self.kind == "list" else ("none",),
        }
        _require_choices(self, choices)
        for name, least in {"page_size": 1, "topk": 0, "rows": 0}.items():
            if getattr(self, name) < least:
                raise InvalidArgument(name, f"at least {least}", getattr(self, name))

    def __str__(self) -> str:
        parts = [f"{self.kind} of {self.topk} of {self.rows} {self.kv} rows {self.index_kind}"]
        parts += [f"lengths {self.topk_lengths}"] * (self.topk_lengths != "none")
        parts += [f"pages of {self.page_size}"] * (self.kv != "plain")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Sequence b has q_lens[b] queries and k_lens[b] keys.

    In the sparse form the queries of all sequences lie end to end, and sum(k_lens) is the size of
    the pool that indices name. With `sources` it is a call of `mla_attend`; these say then what kv,
    page_size, topk, index_kind, topk_lengths and k_lens say of one list. `spare` adds memory that
    belongs to nobody: tokens after the last sequence, pages in the pool, columns of the block
    table.
    """

    form: Form
    heads: int
    d_nope: int
    d_rope: int
    d_v: int
    q_lens: tuple[int, ...] = (4,)
    k_lens: tuple[int, ...] = (4,)
    dtype: str = "bf16"
    side_dtype: str = ""
    """Type of V and rope beside e4m3 queries; empty: the same."""
    rope_dtype: str = ""
    """Type of rope, where it is not V's; beside e4m3 queries only."""
    rope: str = "shared"
    kv: str = "plain"
    page_size: int = 16
    spare: int = 0
    causal: bool = True
    window: int = 0
    """Keys that a query sees at most; 0: no window."""
    group: int = 1
    """Query heads that share a head of K and V, in the dense form."""
    invariant: bool = False
    """Whether a latent call is asked for bits that do not depend on chunks."""
    range_keys: int = 0
    """Keys of a range that a latent call asks for, which makes it invariant; 0: none are."""
    topk: int = 0
    index_kind: str = "distinct"
    topk_lengths: str = "none"
    sources: tuple[CaseSource, ...] = ()
    """One or two sources of a call of `mla_attend`, in the sparse form."""
    turned: int = 0
    """Columns of such a call's results that are turned back; 0: none."""
    sink: str = "none"
    q_scale: bool = False
    k_scale: bool = False
    key_mask: str = "none"
    return_lse: bool = True
    return_max_logits: bool = False
    scale: float | None = None
    values: str = "normal"
    layout: str = "contiguous"
    out: str = "fresh"
    fp32_out: bool = False
    """Whether the `out` that is given is fp32 beside queries of another type."""
    default_dtype: str = "fp32"
    """torch's default dtype during the call, which must not matter."""
    default_device: str = ""
    """torch's default device during the call, likewise."""
    seed: int = 0

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "form": FORMS,
            "dtype": tuple(DTYPE_BYTES),
            "side_dtype": ("", *DTYPE_BYTES),
            "rope_dtype": ("", *DTYPE_BYTES),
            "rope": ROPES,
            "kv": KV_KINDS,
            "index_kind": INDEX_KINDS,
            "topk_lengths": TOPK_LENGTHS,
            "sink": SINKS,
            "key_mask": KEY_MASKS,
            "values": VALUES,
            "layout": LAYOUTS,
            "out": OUTS,
            "default_dtype": DEFAULT_DTYPES,
            "default_device": DEFAULT_DEVICES,
        }
        _require_choices(self, choices)
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InvalidArgument(name, f"at least {least}", getattr(self, name))
        for name in ("q_lens", "k_lens"):
            if any(length < 0 for length in getattr(self, name)):
                raise InvalidArgument(name, "lengths of at least 0", getattr(self, name))
        if len(self.q_lens) != len(self.k_lens):
            got = f"{len(self.q_lens)} and {len(self.k_lens)} of them"
            raise InvalidArgument("q_lens and k_lens", "as many of each", got)
        if self.form != "dense" and self.scale is None:
            raise InvalidArgument("scale", f"a number, in the {self.form} form", None)
        if self.form != "dense" and self.d_v > self.d_nope:
            raise InvalidArgument("d_v", f"at most the latent width {self.d_nope}", self.d_v)
        if self.form != "dense" and self.key_mask != "none":
            raise InvalidArgument("key_mask", f"'none' in the {self.form} form", self.key_mask)
        if self.window and (self.form == "sparse" or not self.causal):
            raise InvalidArgument("window", "0 unless dense or latent, and causal", self.window)
        if self.fp32_out and (self.out == "fresh" or self.dtype == "fp32"):
            raise InvalidArgument("fp32_out", "False unless a narrower out is given", True)
        if self.heads % self.group or (self.group > 1 and self.form != "dense"):
            raise InvalidArgument("group", f"1, or a divisor of {self.heads} heads", self.group)
        if self.form != "latent" and self.invariant:
            raise InvalidArgument("invariant", f"False in the {self.form} form", True)
        if self.range_keys and (self.form != "latent" or not is_range(self.range_keys)):
            expected = f"0, or in the latent form {RANGES_TAKEN}"
            raise InvalidArgument("range_keys", expected, self.range_keys)
        if self.form == "dense" and (self.rope == "none") != (self.d_rope == 0):
            got = f"{self.rope!r} and {self.d_rope}"
            raise InvalidArgument("rope and d_rope", "'none' and 0, or neither", got)
        self._check_sources()

    def _check_sources(self) -> None:
        """What `mla_attend` takes; one list alone is `mla_prefill_sparse`."""
        if not self.sources:
            if self.turned:
                raise InvalidArgument("turned", "0 without sources", self.turned)
            return
        if self.form != "sparse" or self.q_scale or self.k_scale or self.return_max_logits:
            expected = "none unless the form is sparse, without scales of tokens and max_logits"
            raise InvalidArgument("sources", expected, len(self.sources))
        if len(self.sources) > MOST_SOURCES:
            raise InvalidArgument("sources", f"at most {MOST_SOURCES}", len(self.sources))
        if not self.turned and [source.kind for source in self.sources] == ["list"]:
            raise InvalidArgument("sources", "more than one list, unless results turn", "a list")
        if self.turned % 2 or not 0 <= self.turned <= self.d_v:
            raise InvalidArgument("turned", f"pairs of at most {self.d_v} columns", self.turned)

    @property
    def d_qk(self) -> int:
        """Width of a query."""
        return self.d_nope + self.d_rope

    @property
    def key_heads(self) -> int:
        """Heads of K and V in the dense form."""
        return self.heads // self.group

    @property
    def call(self) -> str:
        """Which call it is: the form, or attend."""
        return "attend" if self.sources else self.form

    @property
    def longest(self) -> int:
        """Keys of the longest sequence, or rows of the largest source."""
        return max([0, *self.k_lens, *(source.rows for source in self.sources)])

    @property
    def total_q(self) -> int:
        """Queries that belong to a sequence."""
        return sum(self.q_lens)

    @property
    def total_k(self) -> int:
        """Keys that belong to a sequence."""
        return sum(self.k_lens)

    @property
    def factor(self) -> float:
        """The scale that applies, default or given."""
        return self.d_qk**-0.5 if self.scale is None else self.scale

    @property
    def is_paged(self) -> bool:
        """Whether any key lives in pages."""
        if self.form == "dense":
            return self.rope == "cache"
        if self.sources:
            return any(source.kv != "plain" for source in self.sources)
        return self.form == "latent" or self.kv != "plain"

    @property
    def cost(self) -> int:
        """Multiply-adds of the reference, roughly."""
        if self.form == "sparse":
            pairs = self.total_q * (self.topk + sum(source.topk for source in self.sources))
        else:
            pairs = sum(q * k for q, k in zip(self.q_lens, self.k_lens, strict=True))
        return pairs * self.heads * (self.d_qk + self.d_v)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Case:
        """The way back from `to_json`; raises InvalidArgument that names a wrong field."""
        case: Case = decode("case", Case, values)
        return case

    def __str__(self) -> str:
        dtype = self.dtype + (f"/{self.side_dtype}" if self.side_dtype else "")
        dtype += f" rope {self.rope_dtype}" if self.rope_dtype else ""
        parts = [
            f"{self.call} {dtype} {self.heads} heads {self.d_nope}+{self.d_rope}->{self.d_v}",
            f"q({','.join(map(str, self.q_lens))}) k({','.join(map(str, self.k_lens))})",
        ]
        if self.sources:
            parts = [parts[0], f"{self.total_q} queries", *map(str, self.sources)]
            parts += [f"{self.turned} columns turned back"] * (self.turned > 0)
        elif self.form == "sparse":
            parts += [f"topk {self.topk} {self.index_kind} lengths {self.topk_lengths}"]
        else:
            parts += ["causal" if self.causal else "full"]
        parts += [f"groups of {self.group}"] * (self.group > 1)
        parts += [f"window {self.window}"] * bool(self.window)
        parts += ["invariant"] * self.invariant
        parts += [f"ranges of {self.range_keys}"] * bool(self.range_keys)
        if self.is_paged and not self.sources:
            parts += [f"{self.kv} pages of {self.page_size}"]
        if self.form == "dense" and self.rope not in ("shared", "cache"):
            parts += [f"rope {self.rope}"]
        parts += [f"sink {self.sink}"] * (self.sink != "none")
        parts += [name for name in ("q_scale", "k_scale") if getattr(self, name)]
        parts += [f"mask {self.key_mask}"] * (self.key_mask != "none")
        parts += [self.layout] * (self.layout != "contiguous")
        parts += [f"out {self.out}" + " fp32" * self.fp32_out] * (self.out != "fresh")
        parts += [f"default {self.default_dtype}"] * (self.default_dtype != "fp32")
        parts += [f"default {self.default_device} device"] * bool(self.default_device)
        return " ".join([*parts, self.values, f"seed {self.seed}"])


def _require_choices(record: Case | CaseSource, choices: dict[str, tuple[str, ...]]) -> None:
    """Every named field must be one of its values."""
    for name, allowed in choices.items():
        if getattr(record, name) not in allowed:
            expected = "one of " + ", ".join(map(repr, allowed))
            raise InvalidArgument(name, expected, repr(getattr(record, name)))
