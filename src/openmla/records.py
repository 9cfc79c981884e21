"""Records from plain values: frozen dataclasses whose every field is checked by its annotation.

What was written as JSON may come back damaged, edited by hand or from somewhere else. Reading it
gives the record, or an `InvalidArgument` that names the field, its type and what came instead.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Tile:
...     rows: int
...     stages: tuple[int, ...] = ()
>>> decode("tile", Tile, {"rows": 64, "stages": [2, 3]})
Tile(rows=64, stages=(2, 3))
>>> decode("tile", Tile, {"rows": True})
Traceback (most recent call last):
openmla.errors.InvalidArgument: tile.rows: expected an integer, got True
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from openmla.errors import InvalidArgument

CLASS = "class"
"""Key under which `encode` writes the name of a record's class."""
INT_BITS = 128
"""Every count of a record fits, products of several too, and such numbers are written quickly."""
_PLAIN: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    bool: ("true or false", "true or false"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    NoneType: ("null", "null"),
}
"""Types that JSON has itself, in the singular and in the plural."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def parse_json(name: str, text: str | bytes) -> Any:
    """The values of a JSON text or file; `name` says in an error what it was to be."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(name, "JSON", str(error)) from None
    except RecursionError:
        raise InvalidArgument(name, "JSON", "lists and objects nested too deeply") from None


def encode(value: Any) -> Any:
    """A record as plain values, each record inside with the name of its class."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, IntEnum):
        return int(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    record = {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    return {CLASS: type(value).__name__, **record}


def decode(name: str, kind: Any, value: Any) -> Any:
    """The value of a type annotation that plain values stand for.

    It knows int, bool, float, str, None, Literal, tuples, unions and records of these. The nesting
    of the annotations limits how deep values are followed.
    """
    if kind in _PLAIN:
        return _plain(name, kind, value)
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _record(name, kind, value)
    if origin is tuple:
        return _tuple(name, kind, value)
    if origin in (Union, UnionType):
        return _one_of(name, kind, value)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
            return value
        raise InvalidArgument(name, describe(kind), shown(value))
    raise TypeError(f"{name}: no rule reads {kind}")


def describe(kind: Any) -> str:
    """What an annotation asks for, in words.

    >>> describe(tuple[int, int, int]), describe(Literal["pages", "indices"] | None)
    ('a list of 3 integers', "'pages', 'indices' or null")
    """
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    if is_dataclass(kind):
        return f"an object with the fields of {kind.__name__}"  # type: ignore[union-attr]
    items = get_args(kind)
    if get_origin(kind) is tuple:
        if is_dataclass(items[0]):
            return f"a list of objects with the fields of {items[0].__name__}"  # type: ignore[union-attr]
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        return f"a list of {count}{_PLAIN[items[0]][1]}"
    if get_origin(kind) is Literal:
        return _alternatives([repr(item) for item in items])
    return _alternatives([word for item in items for word in describe(item).split(" or ")])


def shown(value: Any) -> str:
    """A value for an error message: short, however long or deep it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"a long {type(value).__name__}"


def _alternatives(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _plain(name: str, kind: Any, value: Any) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is float or type(value) is not kind:  # True is no integer here
        raise InvalidArgument(name, describe(kind), shown(value))
    if kind is int and value.bit_length() >= INT_BITS:
        raise InvalidArgument(name, f"an integer of at most {INT_BITS} bits", shown(value))
    return value


def _tuple(name: str, kind: Any, value: Any) -> tuple[Any, ...]:
    items = get_args(kind)
    if not isinstance(value, list | tuple):
        raise InvalidArgument(name, describe(kind), shown(value))
    kinds = (items[0],) * len(value) if items[-1] is Ellipsis else items
    if len(value) != len(kinds):
        raise InvalidArgument(name, describe(kind), f"{len(value)} of them")
    pairs = zip(kinds, value, strict=True)
    return tuple(decode(f"{name}[{i}]", item, part) for i, (item, part) in enumerate(pairs))


def _one_of(name: str, kind: Any, value: Any) -> Any:
    """The only alternative besides None says best what is wrong with a value that is there."""
    kinds = [item for item in get_args(kind) if item is not NoneType]
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1 and isinstance(value, dict | list):
        return decode(name, kinds[0], value)
    for item in kinds:
        try:
            return decode(name, item, value)
        except InvalidArgument:
            continue
    raise InvalidArgument(name, describe(kind), shown(value))


def _record(name: str, kind: Any, value: Any) -> Any:
    """An instance from its fields; those that have a default may be missing."""
    if not isinstance(value, dict):
        raise InvalidArgument(name, describe(kind), shown(value))
    known, given = _fields(kind), dict(value)
    written = given.pop(CLASS, kind.__name__)
    if written != kind.__name__:
        raise InvalidArgument(f"{name}.{CLASS}", repr(kind.__name__), shown(written))
    expected = f"the fields of {kind.__name__}"
    if unknown := [key for key in given if key not in known]:
        raise InvalidArgument(name, expected, f"unknown {shown(unknown)}")
    missing = [key for key, (field, _) in known.items() if key not in given and _required(field)]
    if missing:
        raise InvalidArgument(name, expected, f"missing {', '.join(missing)}")
    made: Callable[..., Any] = kind
    return made(
        **{key: decode(f"{name}.{key}", known[key][1], part) for key, part in given.items()}
    )


@lru_cache(maxsize=256)
def _fields(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """Fields of a record with their annotations, by name."""
    hints = get_type_hints(kind)
    return {field.name: (field, hints[field.name]) for field in fields(kind)}


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
