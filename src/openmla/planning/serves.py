"""What a kernel serves, declared as data: the values of every field of a problem that it takes.

A declaration is an allow-list. A field that it does not mention is served at its default value
alone, so an option that is added to a problem is refused by every kernel until the kernel says
otherwise.

>>> from openmla.problem import Problem
>>> toy = Serves({
...     "form": OneOf("dense"), "heads": Range(1, 128), "d_nope": OneOf(64, 128),
...     "d_rope": OneOf(0, 64), "d_v": OneOf(64, 128),
...     ("q_dtype", "kv_dtype"): OneOf(("bf16", "bf16"), ("fp16", "fp16")),
...     "total_q": ANY, "total_k": ANY,
... })
>>> toy.why_not(Problem(form="dense", heads=16, d_nope=112, d_rope=64, d_v=128))
'd_nope 112: 64 or 128 are served'
>>> toy.why_not(Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, has_sink=True))
'has_sink True: not served'
>>> toy.why_not(Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128))
''
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

from openmla.arithmetic import Limit, broken
from openmla.formats import FORMATS
from openmla.planning.problems import AnyProblem
from openmla.problem import RowSource

Field = str | tuple[str, ...]
"""One field of a problem, or several whose values go together."""


class OneOf:
    """These values and no others; tuples of values for fields that go together."""

    def __init__(self, *values: Any, why: str = "") -> None:
        self.values, self.why = values, why

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        words = [_spelled(value) for value in self.values]
        listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
        return self.why or f"{listed} {'is' if len(words) == 1 else 'are'} served"


class Range:
    """Integers from `low` to `high` in steps; without a `high`, from `low` on."""

    def __init__(self, low: int, high: int | None = None, step: int = 1) -> None:
        self.low, self.high, self.step = low, high, step

    def __contains__(self, value: Any) -> bool:
        inside = self.low <= value and (self.high is None or value <= self.high)
        return bool(inside and (value - self.low) % self.step == 0)

    def __str__(self) -> str:
        span = f"{self.low} and more" if self.high is None else f"{self.low} to {self.high}"
        steps = "" if self.step == 1 else f" in steps of {self.step}"
        return f"{span}{steps} are served"


class Second:
    """A second source of rows, or none; a field that is not mentioned has its default value."""

    def __init__(self, allowed: Mapping[str, OneOf | Range]) -> None:
        self.allowed = {f.name: allowed.get(f.name, OneOf(f.default)) for f in fields(RowSource)}

    def __contains__(self, value: Any) -> bool:
        return value is None or all(getattr(value, k) in v for k, v in self.allowed.items())

    def __str__(self) -> str:
        return "of a second source, " + "; ".join(f"{k}: {v}" for k, v in self.allowed.items())


Allowed = OneOf | Range | Second
ANY = Range(0)
YES_OR_NO = OneOf(False, True)
SECOND: Mapping[str, OneOf | Range] = {
    **dict.fromkeys(("page_size", "topk", "total_k", "table_keys"), ANY),
    **dict.fromkeys(("span", "has_topk_lengths"), YES_OR_NO),
}
"""A second source of any lengths; which rows it may have is the kernel's to say."""
ALIGNED = OneOf(
    True,
    why="a pointer or stride is no multiple of 16 bytes above 0, as asynchronous copies demand",
)
MOST_PAGE_ROWS = 1024
FP8_KEYS = OneOf("e4m3")
"""Keys of the indexer that every kernel of scores reads."""
LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}
"""Element types as the configs of Blackwell and CDNA4 call them."""
QUANTIZED_CACHES = tuple(name for name, format in FORMATS.items() if format.scale)
GLUON_CACHES = ("fp8_656", "fp8_block32", "fp8_block64", "fp8_block128", "fp8_token")
"""FP8 caches that the loaders of the Gluon kernels unpack."""


def alike(*dtypes: str) -> tuple[tuple[str, ...], ...]:
    """Q, K, V and rope of one element type: rows of the `DTYPES` group."""
    return tuple((dtype,) * 4 for dtype in dtypes)


def index_scores(
    heads: Allowed,
    page_size: Allowed,
    aligned_16: Allowed = ALIGNED,
    key_dtype: Allowed = FP8_KEYS,
) -> Serves:
    """Scores of the indexer, over pages or contiguous keys."""
    return Serves(
        {
            "form": OneOf("scores"),
            "heads": heads,
            "page_size": page_size,
            **_WINDOWS,
            "batch": ANY,
            "key_dtype": key_dtype,
            "aligned_16": aligned_16,
        }
    )


def index_selection(*flags: str, aligned_16: Allowed = ALIGNED) -> Serves:
    """Selection of any number of scores, with these flags beside the common ones."""
    more = either(*flags, "add_starts", "wants_counts", "wants_mask")
    return Serves(
        {
            "form": OneOf("select"),
            "topk": Range(1),
            "page_size": ANY,
            **more,
            **_WINDOWS,
            "aligned_16": aligned_16,
        }
    )


def either(*names: str) -> dict[Field, Allowed]:
    """Flags that may be set or not."""
    return dict.fromkeys(names, YES_OR_NO)


DTYPES = ("q_dtype", "kv_dtype", "v_dtype", "rope_dtype")
LENGTHS: Mapping[Field, Allowed] = {
    **dict.fromkeys(("batch", "total_q", "total_k", "table_keys"), ANY),
    "self_attention": YES_OR_NO,
}
"""No kernel has a limit on tokens, keys or sequences."""
_WINDOWS: Mapping[Field, Allowed] = {"total_q": ANY, "width": ANY}
"""No kernel of the indexer has a limit on queries or keys."""


@dataclass(frozen=True, eq=False)
class Serves:
    """The values that one kernel takes, by field or by group of fields that go together."""

    allowed: Mapping[Field, Allowed]
    limits: tuple[Limit[Any], ...] = ()
    """What values of several fields must keep together, with the reason."""

    def why_not(self, problem: AnyProblem) -> str:
        """The first field whose value is not served, with those that are; empty if all are."""
        return self.misfit(problem)[1]

    def misfit(self, problem: AnyProblem) -> tuple[int, str]:
        """How many fields fit before the first that does not, and why that one does not."""
        if problem.form not in self.allowed["form"]:  # the other fields may not even be there
            return 0, f"form {problem.form}: {self.allowed['form']}"
        complete = _complete(self, type(problem))  # type: ignore[arg-type]  # hashed by identity
        for place, (names, allowed) in enumerate(complete):
            got = _value(problem, names)
            if got not in allowed:
                served = allowed if names in self.allowed else "not served"
                return place, f"{_label(names, got)}: {served}"
        return len(complete), next(broken(self.limits, problem), "")

    def takes(self, name: str, value: Any) -> bool:
        """Whether one field may have a value, for some values of the fields that go with it."""
        for names, allowed in self.allowed.items():
            if names == name:
                return value in allowed
            if isinstance(names, tuple) and name in names and isinstance(allowed, OneOf):
                return any(group[names.index(name)] == value for group in allowed.values)
        return False

    def mentions(self, name: str) -> bool:
        """Whether a field of a problem is declared, alone or in a group."""
        return any(name in (key if isinstance(key, tuple) else (key,)) for key in self.allowed)


@lru_cache(maxsize=256)
def _complete(serves: Serves, kind: type[AnyProblem]) -> tuple[tuple[Field, Allowed], ...]:
    """A declaration, and the defaults of the fields that it does not mention."""
    rest = [
        (f.name, OneOf() if f.default is MISSING else OneOf(f.default))
        for f in fields(kind)
        if not serves.mentions(f.name)
    ]
    return (*serves.allowed.items(), *rest)


def _value(problem: AnyProblem, names: Field) -> Any:
    if isinstance(names, tuple):
        return tuple(_value(problem, name) for name in names)
    return getattr(problem, names)


def _label(names: Field, value: Any) -> str:
    if not isinstance(names, tuple):
        return f"{names} {value}"
    return ", ".join(f"{name} {item}" for name, item in zip(names, value, strict=True))


def _spelled(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    one_type = len(set(value)) == 1 and isinstance(value[0], str)
    return f"all {value[0]}" if one_type else "/".join(map(str, value))
