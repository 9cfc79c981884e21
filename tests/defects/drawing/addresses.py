"""Operators on addresses: pointers, offsets, coordinates and masks of what is read and written.

An address is an argument of a load, a store or a copy; the value of a name that stands in such an
argument, where the same function assigns it; or a product with a stride.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from defects.drawing.expressions import expression_changes
from defects.drawing.source import Edit, Source, name_of, owner_of

GROUP = "addresses"
LANGUAGES = ("gl", "tl", "ttgl", "cdna4")
POINTED = re.compile(r"^(load|store|atomic_\w+)$")
"""Calls of a language whose first argument is a pointer."""
COPIES = re.compile(
    r"^(tma_load|tma_store|cp_async|async_(copy|gather|scatter|load)\w*|buffer_(load|store)\w*"
    r"|global_load_to_shared|(load|copy|fetch)_\w+|copied\w*|listed|words|scales|gather\w*"
    r"|\w*(pointers|offsets?)|make_\w*descriptor|upcast_row\w*|row_\w+)$"
)
"""Calls whose arguments are places."""
NOT_COUNTED = re.compile(r"nan|inf", re.IGNORECASE)


def address_changes(source: Source) -> Iterator[Edit]:
    """The changes of a file by every operator of this class."""
    roots = address_roots(source)
    for node in source.of(ast.AST, device=True):
        if is_address(source, node, roots):
            yield from expression_changes(source, node, GROUP)
            if isinstance(node, ast.Compare):
                yield from bound(source, node)
        if isinstance(node, ast.Call):
            yield from masks(source, node)
            yield from coordinates(source, node)


def places_of(node: ast.Call) -> list[ast.expr]:
    """The arguments of a call that are addresses, but for masks."""
    name = name_of(node.func)
    if POINTED.match(name) and owner_of(node.func) in LANGUAGES:
        return node.args[:1]
    if COPIES.match(name):
        named = [k.value for k in node.keywords if k.arg not in (None, "mask", "other")]
        return [*(a for a in node.args if not isinstance(a, ast.Starred)), *named]
    return []


def masks_of(node: ast.Call) -> list[ast.expr]:
    """The mask of a load, a store or a copy, if it has one."""
    return [k.value for k in node.keywords if k.arg == "mask"]


def address_roots(source: Source) -> set[int]:
    """The identities of the expressions that are addresses."""
    roots: set[int] = set()
    names: set[tuple[str, str]] = set()
    for node in source.of(ast.Call, device=True):
        assert isinstance(node, ast.Call)
        for place in (*places_of(node), *masks_of(node)):
            roots.add(id(place))
            function = source.scope(node).function
            names |= {(function, n.id) for n in ast.walk(place) if isinstance(n, ast.Name)}
    for node in source.of(ast.Assign, ast.AugAssign, device=True):
        assert isinstance(node, ast.Assign | ast.AugAssign)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        function = source.scope(node).function
        if any((function, name_of(target)) in names for target in targets):
            roots.add(id(node.value))
    for node in source.of(ast.BinOp, device=True):
        assert isinstance(node, ast.BinOp)
        sides = (node.left, node.right)
        if isinstance(node.op, ast.Mult) and any("stride" in name_of(s) for s in sides):
            roots.add(id(node))
    return roots


def is_address(source: Source, node: ast.AST, roots: set[int]) -> bool:
    """Whether a node is an address, or a part of one."""
    if isinstance(node, ast.stmt):
        return False
    return id(node) in roots or any(id(outer) in roots for outer in source.within(node))


def bound(source: Source, node: ast.Compare) -> Iterator[Edit]:
    """The bound of a mask is one more, or one less."""
    last = node.comparators[-1]
    if len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        for step in ("+ 1", "- 1"):
            yield source.edit(last, f"(({source.text(last)}) {step})", "bound moved", GROUP)


def masks(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A mask is dropped, or what stands in for masked values changes."""
    if not (places_of(node) or masks_of(node)):
        return
    named = {k.arg: k for k in node.keywords}
    mask, other = named.get("mask"), named.get("other")
    if mask is not None and not is_none(mask.value):
        start, stop = source.span(mask)
        if other is not None:
            start, stop = min(start, source.span(other)[0]), max(stop, source.span(other)[1])
        inside = [k for k in node.keywords if start <= source.span(k)[0] < stop]
        if len(inside) == 1 + (other is not None):
            yield source.edit(mask, "mask=None", "mask dropped", GROUP, (start, stop))
    if other is not None and not is_none(other.value):
        text = source.text(other.value)
        number = NOT_COUNTED.search(text) is None  # or one more would be the same
        yield source.edit(other.value, f"({text}) + 1" if number else "0.0", "other value", GROUP)


def coordinates(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A row or a column is its neighbor."""
    for place in places_of(node):
        parts = place.elts if isinstance(place, ast.List | ast.Tuple) else [place]
        pointer = POINTED.match(name_of(node.func)) is not None
        for part in parts:
            listed = isinstance(place, ast.List)
            if isinstance(part, ast.Constant) or not (listed or pointer or is_sum(part)):
                continue
            for step in ("+ 1", "- 1"):
                new = f"({source.text(part)}) {step}"
                yield source.edit(part, new, "neighbor", GROUP)


def is_sum(node: ast.expr) -> bool:
    """Whether a node is plain arithmetic."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult)


def is_none(node: ast.expr) -> bool:
    """Whether a node is None."""
    return isinstance(node, ast.Constant) and node.value is None
