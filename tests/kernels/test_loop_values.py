"""No kernel runs into Triton's trap for values that a loop hands on.

Triton's front end (3.6 and 3.9) walks a loop's body once to find out what it changes, and takes a
variable for unchanged if it ends as the value that it began as. In

    last = tile
    while ...:
        last = tile
        tile = tile + 1

`last` ends that walk as the first tile, as it began, so the loop never hands it on: it stays the
first tile for ever. The simulator runs Python and cannot see this.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from repository.package_source import functions, modules

TRAP = """
def kernel(tile, n):
    last = tile
    while n > 0:
        use(last)
        last = tile
        tile = tile + 1
"""
HARMLESS = {
    "another value to begin with": TRAP.replace("last = tile\n    while", "last = 0\n    while"),
    "a value of the body": TRAP.replace("tile = tile + 1", "pass").replace(
        "        last = tile", "        tile = tile + 1\n        last = tile"
    ),
    "changed in place": TRAP.replace("        last = tile\n", "        last += tile\n"),
}


def trapped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Variables that a loop would not hand on."""
    yield from _trapped(function.body, {})


def _trapped(block: list[ast.stmt], known: dict[str, str]) -> Iterator[str]:
    """`known`: names that stand for another name's value at this point."""
    for statement in block:
        if isinstance(statement, ast.For | ast.While):
            yield from _loop(statement, known)
        for inner in _blocks(statement):
            yield from _trapped(inner, dict(known))
        _follow(statement, known)


def _loop(loop: ast.For | ast.While, known: dict[str, str]) -> Iterator[str]:
    inside: dict[str, str] = {}
    changed: set[str] = set()
    for statement in loop.body:
        source = _alias(statement)
        if source and source[1] not in changed:
            inside[source[0]] = source[1]
        changed |= set(_assigned(statement))
    for name, value in inside.items():
        if known.get(name) == value:
            yield f"line {loop.lineno}: {name} begins as {value}, and becomes {value}"


def _follow(statement: ast.stmt, known: dict[str, str]) -> None:
    alias = _alias(statement)
    for name in _assigned(statement):
        known.pop(name, None)
        for other in [k for k, value in known.items() if value == name]:
            del known[other]
    if alias:
        known[alias[0]] = alias[1]


def _alias(statement: ast.stmt) -> tuple[str, str] | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
            return name, value
    return None


def _assigned(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(statement, field, []) for field in ("body", "orelse")]
    return [block for block in found if isinstance(block, list)]


def test_no_kernel_hands_on_a_value_that_triton_takes_for_unchanged() -> None:
    found = {
        f"{module}.{name}": list(trapped(function))
        for module in modules()
        if module.startswith("kernels.")
        for name, function in functions(module)
    }
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


def first_function(source: str) -> ast.FunctionDef:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def test_the_trap_is_found() -> None:
    assert list(trapped(first_function(TRAP))) == ["line 4: last begins as tile, and becomes tile"]


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_loops_are_left_alone(name: str) -> None:
    assert list(trapped(first_function(HARMLESS[name]))) == []
