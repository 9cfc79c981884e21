"""Places of a kernel's source that a run can exercise, and what to call them.

A place is a file, a line and a column, which code objects know of every call. The source says what
stands there: the text of a wait or a condition, the function around it, the branches that lead to
it, and the name of what a call allocates.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DEVICE = re.compile(r"\b(jit|constexpr_function)\b")
"""In the decorators of what Triton compiles or evaluates."""


class Place(NamedTuple):
    """Where an expression begins."""

    file: str
    line: int
    column: int


class Way(NamedTuple):
    """One of the two ways that a branch can go."""

    condition: Place
    taken: bool


@dataclass(frozen=True)
class Site:
    """A wait for an mbarrier, or a branch: its place, its function, its text in one line, and the
    ways that lead there inside the function."""

    place: Place
    function: str
    text: str
    inside: tuple[Way, ...]


class Part(NamedTuple):
    """A part of a tuple or a record: its number where it has one, and how it is written."""

    number: int | None
    text: str


@dataclass(frozen=True)
class Allocated:
    """What a function calls something that it allocates: "" where it does not name it.

    `returned`: as which parts of its result the function returns it; None if it does not.
    """

    name: str
    returned: tuple[Part, ...] | None


class Source:
    """The device functions of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.branches: list[Site] = []
        self.waits: list[Site] = []
        self.calls: dict[Place, ast.Call] = {}
        self._parents: dict[int, ast.AST] = {}
        self._functions: dict[Place, ast.FunctionDef] = {}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[id(child)] = node
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and _is_device(function):
                for statement in function.body:
                    self._visit(statement, function, ())

    def _place(self, node: ast.expr) -> Place:
        return Place(self.file, node.lineno, node.col_offset)

    def _visit(self, node: ast.AST, function: ast.FunctionDef, inside: tuple[Way, ...]) -> None:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            place = self._place(node.test)
            self.branches.append(Site(place, function.name, ast.unparse(node.test), inside))
            self._visit(node.test, function, inside)
            for taken, way in ((True, node.body), (False, node.orelse)):
                for child in way if isinstance(way, list) else [way]:
                    self._visit(child, function, (*inside, Way(place, taken)))
            return
        if isinstance(node, ast.Call):
            place = self._place(node)
            self.calls.setdefault(place, node)
            self._functions[place] = function
            if _is_wait(node.func):
                self.waits.append(Site(place, function.name, ast.unparse(node), inside))
        for part in ast.iter_child_nodes(node):
            self._visit(part, function, inside)

    def text(self, place: Place) -> str:
        """The call that begins at a place."""
        return ast.unparse(self.calls[place]) if place in self.calls else f"line {place.line}"

    def function(self, place: Place) -> str:
        """The function that a call is in."""
        return self._functions[place].name if place in self._functions else "(module)"

    def allocated(self, place: Place, parts: tuple[Part, ...] = ()) -> Allocated:
        """What `parts` of the result of the call at a place are bound to."""
        if place not in self.calls:
            return Allocated("", None)
        name = self._name(self.calls[place], parts)
        return Allocated(name, _returned(self._functions[place], name, parts))

    def _name(self, node: ast.AST, parts: tuple[Part, ...]) -> str:
        """`bars` for `bars = f()`, `bars[1]` for the second of `bars = (f(), f())`, and
        `bars.ready` for `bars = Bars(ready=f())`."""
        parent = self._parents[id(node)]
        if isinstance(parent, ast.keyword):
            return self._name(self._parents[id(parent)], (Part(None, f".{parent.arg}"), *parts))
        if isinstance(parent, ast.Tuple | ast.List):
            number = next(i for i, each in enumerate(parent.elts) if each is node)
            return self._name(parent, (Part(number, f"[{number}]"), *parts))
        if isinstance(parent, ast.Attribute | ast.IfExp):
            return self._name(parent, parts)
        if isinstance(parent, ast.Call) and parent.func is node:
            return self._name(parent, parts)  # a view of it: f().index(0)
        if isinstance(parent, ast.Assign):
            return _target(parent.targets[0], parts)
        if isinstance(parent, ast.AnnAssign):
            return _target(parent.target, parts)
        return ""


def _target(target: ast.expr, parts: tuple[Part, ...]) -> str:
    if isinstance(target, ast.Tuple) and parts and parts[0].number is not None:
        return _target(target.elts[parts[0].number], parts[1:])
    return ast.unparse(target) + "".join(part.text for part in parts)


def _returned(
    function: ast.FunctionDef, name: str, parts: tuple[Part, ...]
) -> tuple[Part, ...] | None:
    """The parts of its result as which a function returns what it calls `name`."""
    base = re.split(r"[.\[]", name)[0]
    for node in ast.walk(function):
        value = node.value if isinstance(node, ast.Return) else None
        if value is None:
            continue
        if not name:
            return parts
        if ast.unparse(value) == base:
            return _parts_of(name[len(base) :])
        if isinstance(value, ast.Tuple):
            for number, each in enumerate(value.elts):
                if _mentions(each, base):
                    return (Part(number, f".{name}"),)
        elif _mentions(value, base):
            return (Part(None, f".{name}"),)
    return None


def _parts_of(text: str) -> tuple[Part, ...]:
    """Parts as they are written.

    >>> _parts_of("[1].ready")
    (Part(number=1, text='[1]'), Part(number=None, text='.ready'))
    """
    found = re.findall(r"\[\d+\]|\.\w+", text)
    return tuple(Part(int(part[1:-1]) if part[0] == "[" else None, part) for part in found)


def _mentions(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))


def _is_device(function: ast.FunctionDef) -> bool:
    return bool(DEVICE.search(" ".join(map(ast.unparse, function.decorator_list))))


def _is_wait(called: ast.expr) -> bool:
    """Whether it is `mbarrier.wait`."""
    return ast.unparse(called).endswith("mbarrier.wait")


@functools.cache
def source_of(file: str) -> Source:
    """The source of a file, read once."""
    return Source(file, Path(file).read_text())


def device_functions(path: Path) -> Iterator[str]:
    """The names of what Triton compiles or evaluates in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and _is_device(node):
            yield node.name
