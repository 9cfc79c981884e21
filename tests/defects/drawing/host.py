"""Operators on host code: launches, descriptors, workspaces, plans."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from defects.drawing.expressions import expression_changes
from defects.drawing.source import Edit, Source, name_of

GROUP = "host"
ALLOCATES = {"empty", "zeros", "ones", "full", "new_empty", "new_zeros", "empty_strided"}


def host_changes(source: Source, required: frozenset[str]) -> Iterator[Edit]:
    """The changes of a file by every operator of this class.

    `required`: names of parameters of kernels, without which no launch begins.
    """
    for node in source.of(ast.AST, device=False):
        yield from expression_changes(source, node, GROUP)
        if isinstance(node, ast.Call):
            yield from programs(source, node)
            yield from workspace(source, node)
            yield from dimension(source, node)
        elif isinstance(node, ast.Dict):
            yield from entries(source, node, required)
        elif isinstance(node, ast.Tuple):
            yield from keys(source, node)
        elif isinstance(node, ast.Subscript):
            yield from size(source, node)


def programs(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A kernel is launched with one program more, or less."""
    if name_of(node.func) == "Call" and len(node.args) > 1:
        grid = node.args[1]
        for step in ("- 1", "+ 1"):
            yield source.edit(grid, f"({source.text(grid)}) {step}", "programs", GROUP)


def workspace(source: Source, node: ast.Call) -> Iterator[Edit]:
    """Memory is smaller by one unit."""
    if name_of(node.func) in ALLOCATES and node.args:
        sizes = node.args[0]
        if isinstance(sizes, ast.Tuple | ast.List) and sizes.elts:
            sizes = sizes.elts[0]
        if not isinstance(sizes, ast.Starred | ast.Tuple | ast.List | ast.Constant):
            new = f"({source.text(sizes)}) - 1"
            yield source.edit(sizes, new, "workspace", GROUP)


def dimension(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A stride is that of another dimension."""
    if name_of(node.func) == "stride" and len(node.args) == 1:
        yield from another(source, node.args[0], "stride exchanged")


def size(source: Source, node: ast.Subscript) -> Iterator[Edit]:
    """A size is that of another dimension."""
    if name_of(node.value) == "shape":
        yield from another(source, node.slice, "size exchanged")


def another(source: Source, node: ast.expr, operator: str) -> Iterator[Edit]:
    """The dimension beside a given one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield source.edit(node, str(node.value - 1 if node.value else 1), operator, GROUP)


def entries(source: Source, node: ast.Dict, required: frozenset[str]) -> Iterator[Edit]:
    """An entry of a dict is dropped, where no kernel has a parameter of its name."""
    for i, key in enumerate(node.keys):
        if not isinstance(key, ast.Constant) or key.value in required:
            continue
        start = source.span(key)[0]
        if i + 1 == len(node.keys):
            stop = source.span(node)[1] - 1
        else:
            behind = node.keys[i + 1]
            first = source.span(node.values[i + 1] if behind is None else behind)[0]
            stop = first - (len("**") if behind is None else 0)
        text = source.data[start:stop].decode()
        kept = text[len(text.rstrip()) :]  # the line break that follows
        if "#" not in text:
            yield source.edit(key, kept, "entry dropped", GROUP, (start, stop))


def keys(source: Source, node: ast.Tuple) -> Iterator[Edit]:
    """A key of something kept forgets what it must tell apart."""
    if not isinstance(node.ctx, ast.Load) or len(node.elts) < 2 or not is_key(source, node):
        return
    for i in range(len(node.elts)):
        rest = [source.text(e) for j, e in enumerate(node.elts) if j != i]
        yield source.edit(node, f"({', '.join(rest)},)", "key entry dropped", GROUP)


def is_key(source: Source, node: ast.Tuple) -> bool:
    """Whether a tuple is a key: by the name that it gets, or by that of its function."""
    parent, scope = source.parents[id(node)], source.scope(node)
    if isinstance(parent, ast.Assign):
        return any("key" in name_of(target).lower().split("_") for target in parent.targets)
    return isinstance(parent, ast.Return) and "key" in scope.function.rpartition(".")[2].split("_")
