"""`IndexProblem`: one step of the indexer as plain data, for the planner.

>>> print(IndexProblem(form="scores", heads=64, page_size=64, total_q=4096, width=32768))
scores, 64 heads, 4096 queries x 32768 keys, pages of 64
>>> print(IndexProblem(form="scores", heads=64, page_size=64, total_q=128, batch=128, width=8192))
scores, 64 heads, 128 queries of 128 requests x 8192 keys, pages of 64
>>> print(IndexProblem(form="select", topk=2048, total_q=4096, width=32768))
select, top-2048 of 4096 rows x 32768 scores
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from openmla.errors import InvalidArgument
from openmla.problem import MAX_HEADS

IndexForm = Literal["scores", "select"]
INDEX_FORMS = ("scores", "select")
KEY_DTYPES = ("e4m3", "e2m1")
_OF_SCORES: dict[str, int | str] = {"heads": 0, "batch": 0, "key_dtype": "e4m3"}
_OF_SELECTION: dict[str, int | str] = {
    "topk": 0,
    "add_starts": False,
    "keeps": False,
    "wants_counts": False,
    "wants_mask": False,
}
DIM = 128
"""Columns of an indexer key: the same in every model that has an indexer."""


@dataclass(frozen=True, slots=True)
class IndexProblem:
    """Scores of queries (e4m3) against keys, or the selection of the best of given scores."""

    form: IndexForm
    heads: int = 0
    page_size: int = 0
    """Rows per page of the keys, or of the physical rows that a selection is written as."""
    topk: int = 0
    add_starts: bool = False
    keeps: bool = False
    """Whether the first or last keys of a row are selected whatever they score."""
    wants_counts: bool = False
    wants_mask: bool = False
    total_q: int = 0
    width: int = 0
    """Columns of the scores."""
    batch: int = 0
    """Requests that queries over pages are of; 0: unknown."""
    key_dtype: str = "e4m3"
    """Element type of the keys that are scored: "e4m3", or "e2m1" in pages with exponents."""
    aligned_16: bool = True
    """Every pointer and row stride is a multiple of 16 bytes, as bulk copies demand."""

    def __post_init__(self) -> None:
        if self.form not in INDEX_FORMS:
            raise InvalidArgument("form", "one of " + ", ".join(INDEX_FORMS), repr(self.form))
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                raise InvalidArgument(f.name, "True or False", repr(value))
            if f.type == "int" and (type(value) is not int or value < 0):
                raise InvalidArgument(f.name, "a count of 0 or more", repr(value))
        if self.key_dtype not in KEY_DTYPES:
            raise InvalidArgument("key_dtype", "one of " + ", ".join(KEY_DTYPES), self.key_dtype)
        if self.form == "scores" and self.key_dtype == "e2m1" and not self.page_size:
            raise InvalidArgument("key_dtype", "e4m3 without pages", self.key_dtype)
        if self.form == "scores" and not 1 <= self.heads <= MAX_HEADS:
            raise InvalidArgument("heads", f"1 to {MAX_HEADS}", self.heads)
        if self.form == "select" and self.topk < 1:
            raise InvalidArgument("topk", "1 or more", self.topk)
        self._settle()

    def _settle(self) -> None:
        """Give fields of the other form, and `batch` without pages, the value that they have by
        default, so that equals are equal."""
        of_the_other = _OF_SCORES if self.form == "select" else _OF_SELECTION
        for name, value in of_the_other.items():
            object.__setattr__(self, name, value)
        if not self.page_size:
            object.__setattr__(self, "batch", 0)

    @property
    def flops(self) -> int:
        """Multiply-adds of the products, 2 flops each, when every query sees every key."""
        return 2 * self.heads * DIM * self.total_q * self.width

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values; `IndexProblem(**d)` is the way back."""
        return asdict(self)

    def __str__(self) -> str:
        if self.form == "select":
            parts = [f"select, top-{self.topk} of {self.total_q} rows x {self.width} scores"]
        else:
            of = f" of {self.batch} requests" if self.batch > 1 else ""
            size = f"{self.total_q} queries{of} x {self.width} keys"
            parts = [f"scores, {self.heads} heads, {size}"]
            parts += [f"{self.key_dtype} keys"] * (self.key_dtype != "e4m3")
        return ", ".join([*parts, *([f"pages of {self.page_size}"] if self.page_size else [])])
