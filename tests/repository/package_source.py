"""The package as syntax trees, for the tests that read its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "openmla"


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below openmla ("plan.target", "" for the package itself) -> its tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = ast.parse(path.read_text())
    return found


def path_of(module: str) -> Path:
    """The file of a module named as in `modules`."""
    flat = PACKAGE.joinpath(*module.split(".")).with_suffix(".py") if module else PACKAGE
    return flat if flat.is_file() else PACKAGE.joinpath(*module.split(".")) / "__init__.py"


def imports(module: str, module_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of everything a module imports.

    Imports for type checkers alone do not count: they never run. With `module_level_only`, those
    inside functions do not count either.
    """
    nodes = modules()[module].body
    while nodes:
        inner: list[ast.stmt] = []
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((name, node.lineno) for name in _imported_names(node))
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                inner += node.orelse
            elif not (module_level_only and isinstance(node, ast.FunctionDef)):
                inner += _direct_statements(node)
        nodes = inner


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a module, methods and nested ones included, with its dotted name."""
    yield from _functions(modules()[module], "")


def _functions(
    parent: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _imported_names(node: ast.ImportFrom) -> Iterator[str]:
    """`from a import b` may mean the module a.b: it counts as that when there is one."""
    base = node.module or ""
    for alias in node.names:
        below = f"{base}.{alias.name}".removeprefix("openmla.")
        yield f"{base}.{alias.name}" if below in modules() else base


def _direct_statements(node: ast.stmt) -> list[ast.stmt]:
    """The statements in the blocks of a statement, and not in deeper ones."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            found += child.body
    return found
