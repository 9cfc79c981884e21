"""Which parts of shared files a kernel uses, by what its own files import from them.

A defect in a function of kernels/gluon that a kernel never calls says nothing about its tests, not
even where the kernel has a function of the same name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from defects.drawing.source import MODULE, Edit, name_of

Name = tuple[str, str]
"""A file below the package, and a name that it defines."""


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


def imports(tree: ast.Module, package: str) -> dict[str, Name]:
    """The names that a file imports from other files of the package, and what they are there."""
    found: dict[str, Name] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            file = "/".join(str(node.module).split(".")[1:]) + ".py"
            found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return found


def reached(package: Path, own: Iterable[str], shared: Iterable[str]) -> set[Name]:
    """The names of shared files that files of a kernel import, through one another too."""
    names: set[Name] = set()
    for file in own:
        names |= set(imports(ast.parse((package / file).read_bytes()), package.name).values())
    uses: list[tuple[set[Name], set[Name]]] = []
    for file in shared:
        tree = ast.parse((package / file).read_bytes())
        meant = imports(tree, package.name)
        for statement in tree.body:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                made = {(file, name) for name in defined(statement)}
                used = {meant.get(name, (file, name)) for name in mentioned(statement)}
                uses.append((made, used))
    while True:
        more = set().union(*(used for made, used in uses if made & names)) - names
        if not more:
            return names
        names |= more


def uses(edit: Edit, names: set[Name]) -> bool:
    """Whether a change of a shared file is in what a kernel reaches."""
    if edit.function == MODULE:
        made = set().union(*map(defined, ast.parse(shortened(edit)).body))
    else:
        made = {edit.function.split(".")[0]}
    return any((edit.file, name) in names for name in made)


def shortened(edit: Edit) -> str:
    """The statement of a change as a program of its own; nothing where it has a body."""
    try:
        ast.parse(edit.statement)
    except SyntaxError:
        return ""
    return edit.statement
