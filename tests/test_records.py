"""Records from plain values, by their annotations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from openmla.errors import InvalidArgument
from openmla.records import decode, describe, encode, parse_json, shown


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    inner: Inner
    name: str | None = None
    maybe: Inner | None = None
    three: tuple[int, int, int] = (1, 2, 3)
    words: tuple[str, ...] = field(default_factory=tuple)
    mixed: int | str = 0


PLAIN = {"count": 3, "flag": True, "inner": {"kind": "a", "share": 1}}


def test_there_and_back() -> None:
    outer = Outer(3, False, Inner("b"), "x", Inner("a", 2.0), (4, 5, 6), ("w",), "seven")
    assert decode("outer", Outer, encode(outer)) == outer


def test_defaults_may_be_missing_and_numbers_become_floats() -> None:
    made = decode("outer", Outer, PLAIN)
    assert made == Outer(3, True, Inner("a", 1.0)) and type(made.inner.share) is float
    assert decode("outer", Outer, PLAIN | {"three": [7, 8, 9], "mixed": "m"}).three == (7, 8, 9)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"count": True}, "outer.count: expected an integer, got True"),
        ({"count": 10**40}, "outer.count: expected an integer of at most 128 bits"),
        ({"count": 10**5000}, "outer.count: .* got a long int"),
        ({"flag": 0}, "outer.flag: expected true or false, got 0"),
        ({"inner": None}, "outer.inner: expected an object with the fields of Inner, got None"),
        ({"inner": {"kind": "c"}}, "outer.inner.kind: expected 'a' or 'b', got 'c'"),
        (
            {"inner": {"kind": "a", "share": float("nan")}},
            "inner.share: expected a number, got nan",
        ),
        ({"inner": {"kind": "a", "share": False}}, "inner.share: expected a number, got False"),
        ({"inner": {}}, "outer.inner: expected the fields of Inner, got missing kind"),
        ({"inner": {"class": "Outer"}}, "outer.inner.class: expected 'Inner', got 'Outer'"),
        ({"name": 3}, "outer.name: expected a string or null, got 3"),
        ({"maybe": {"kind": 3}}, "outer.maybe.kind: expected 'a' or 'b', got 3"),
        ({"three": [1, 2]}, "outer.three: expected a list of 3 integers, got 2 of them"),
        ({"three": [1, 2, "3"]}, r"outer.three\[2\]: expected an integer, got '3'"),
        ({"words": "abc"}, "outer.words: expected a list of strings, got 'abc'"),
        ({"mixed": None}, "outer.mixed: expected an integer or a string, got None"),
        ({"more": 1, 3: 2}, r"outer: expected the fields of Outer, got unknown \['more', 3\]"),
    ],
)
def test_what_is_wrong_is_named(change: dict[Any, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        decode("outer", Outer, PLAIN | change)


def test_an_annotation_without_a_rule_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="no rule reads"):
        decode("outer", dict[str, int], {})


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "1" * 5000])
def test_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidArgument, match="plan: expected JSON"):
        parse_json("plan", text)


def test_messages_stay_short() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert len(shown(deep)) < 100 and len(shown("x" * 10_000)) < 100
    assert describe(tuple[str, ...] | None) == "a list of strings or null"
