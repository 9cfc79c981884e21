"""Which parts of shared files a kernel uses, by the names that its own files mention.

A defect in a function of kernels/gluon that a kernel never calls says nothing about its tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from defects.drawing.source import MODULE, Edit, name_of


def mentioned(tree: ast.AST) -> set[str]:
    """The names, attributes and imports in a tree."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(name_of(node))
        elif isinstance(node, ast.alias):
            found.add(node.name)
    return found


def defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {name_of(part) for target in statement.targets for part in parts_of(target)}
    if isinstance(statement, ast.AnnAssign | ast.AugAssign):
        return {name_of(statement.target)}
    inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return set().union(*map(defined, inner)) if inner else set()


def parts_of(target: ast.expr) -> list[ast.expr]:
    """The targets of an assignment, one by one."""
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def reached(package: Path, own: Iterable[str], shared: Iterable[str]) -> set[str]:
    """The names of shared files that files of a kernel mention, through one another too."""
    names = set().union(*(mentioned(ast.parse((package / file).read_bytes())) for file in own))
    uses: list[tuple[set[str], set[str]]] = []
    for file in shared:
        for statement in ast.parse((package / file).read_bytes()).body:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                uses.append((defined(statement), mentioned(statement)))
    while True:
        more = set().union(*(used for made, used in uses if made & names)) - names
        if not more:
            return names
        names |= more


def uses(edit: Edit, names: set[str]) -> bool:
    """Whether a change of a shared file is in what a kernel reaches."""
    if edit.function == MODULE:
        return bool(set().union(*map(defined, ast.parse(shortened(edit)).body)) & names)
    return edit.function.split(".")[0] in names


def shortened(edit: Edit) -> str:
    """The statement of a change as a program of its own; nothing where it has a body."""
    try:
        ast.parse(edit.statement)
    except SyntaxError:
        return ""
    return edit.statement
