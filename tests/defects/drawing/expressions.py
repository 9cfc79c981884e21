"""Operators on expressions, which device code and host code share.

Each takes a file and a node, and yields the changes of that node. Numbers that only say how values
are laid out, and along which axis they are combined, are left alone: a change is refused at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from defects.drawing.source import Edit, Node, Source, name_of

Operator = Callable[[Source, ast.AST, str], Iterator[Edit]]

NEIGHBORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
OPPOSITES: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
CEILINGS = {
    "ceildiv": "(({0}) // ({1}))",
    "cdiv": "(({0}) // ({1}))",
    "round_up": "(({0}) // ({1}) * ({1}))",
}
ALONG_AXIS = {"max", "min", "sum", "reduce", "expand_dims", "permute", "join", "split", "stride"}
SHAPE_KEYWORDS = {"dim", "axis", "pack", "order", "num_stages", "maxsize"}
UNJOINED = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.JoinedStr)


def expression_changes(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """The changes of a node by every operator of this file."""
    for operator in (
        comparison,
        sum_or_difference,
        truth,
        extreme,
        rounding,
        factor,
        constant,
        cast,
        branches,
    ):
        yield from operator(source, node, group)


def token(source: Source, left: Node, right: Node, sign: str) -> tuple[int, int] | None:
    """Where the sign of an operation stands; None if a comment is in the way."""
    start, stop = source.between(left, right)
    gap = source.data[start:stop].decode()
    found = re.search(rf"(?<![\w<>=!]){re.escape(sign)}(?![\w<>=])", gap)
    if "#" in gap or not found:
        return None
    before = len(gap[: found.start()].encode())
    return start + before, start + before + len(sign)


def comparison(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """The bound of a comparison is let in, or kept out; equality becomes its opposite."""
    if not isinstance(node, ast.Compare):
        return
    left = node.left
    for kind, right in zip(node.ops, node.comparators, strict=True):
        old, new = NEIGHBORS.get(type(kind), ("", ""))
        at = token(source, left, right, old) if old else None
        if at:
            yield source.edit(node, new, "comparison", group, at)
        left = right


def sum_or_difference(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A sum becomes a difference, and "both" becomes "either"."""
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
    elif isinstance(node, ast.AugAssign):
        left, right = node.target, node.value
    else:
        return
    old, new = OPPOSITES.get(type(node.op), ("", ""))
    lists = any(isinstance(part, UNJOINED) or is_text(part) for part in (left, right))
    if not old or lists or (old in "&|" and not source.scope(node).device):
        return
    ending = "=" if isinstance(node, ast.AugAssign) else ""
    at = token(source, left, right, old + ending)
    if at:
        operator = "sum or difference" if old in "+-" else "both or either"
        yield source.edit(node, new + ending, operator, group, at)


def truth(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A condition is turned around: and, or, not, True, False, and plain names."""
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            at = token(source, left, right, old)
            if at:
                yield source.edit(node, new, "condition", group, at)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.edit(node, str(not node.value), "truth value", group)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.edit(node, f"({source.text(node.operand)})", "condition", group)
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Subscript | ast.Call
    ):
        new = f"(not {source.text(node.test)})"
        yield source.edit(node.test, new, "condition", group)


def extreme(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A minimum becomes a maximum, and the other way around."""
    if isinstance(node, ast.Call) and name_of(node.func) in EXTREMES:
        old = name_of(node.func)
        stop = source.span(node.func)[1]
        yield source.edit(node, EXTREMES[old], "minimum or maximum", group, (stop - len(old), stop))


def rounding(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A quotient is rounded the other way."""
    if isinstance(node, ast.Call) and name_of(node.func) in CEILINGS and len(node.args) == 2:
        first, second = (source.text(argument) for argument in node.args)
        new = CEILINGS[name_of(node.func)].format(first, second)
        yield source.edit(node, new, "rounding", group)
    ceiling = ceiling_of(node)
    if ceiling:
        left, right = source.text(ceiling.left), source.text(ceiling.right)
        assert isinstance(node, ast.UnaryOp)
        yield source.edit(node, f"(({left[1:]}) // ({right}))", "rounding", group)
    elif (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv)
        and ceiling_of(source.parents[id(node)]) is not node
    ):
        left, right = source.text(node.left), source.text(node.right)
        # Triton rounds quotients toward zero, so that -(-a // b) is a // b in a kernel.
        if source.scope(node).device:
            new = f"((({left}) + ({right}) - 1) // ({right}))"
        else:
            new = f"(-(-({left}) // ({right})))"
        yield source.edit(node, new, "rounding", group)


def ceiling_of(node: ast.AST) -> ast.BinOp | None:
    """The quotient of `-(-a // b)`, None for other nodes."""
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)):
        return None
    inner = node.operand
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv)):
        return None
    negative = isinstance(inner.left, ast.UnaryOp) and isinstance(inner.left.op, ast.USub)
    return inner if negative else None


def factor(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A product loses a factor, a remainder its divisor."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Mod):
        if is_text(node.left) or isinstance(node.left, UNJOINED):
            return
        name = "factor" if isinstance(node.op, ast.Mult) else "remainder"
        yield source.edit(node, f"({source.text(node.left)})", f"{name} dropped", group)
        if isinstance(node.op, ast.Mult) and not isinstance(node.right, ast.Constant):
            yield source.edit(node, f"({source.text(node.right)})", f"{name} dropped", group)


def constant(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A number is one more, or one less."""
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return
    if not isinstance(node.value, int | float) or shapes(source, node):
        return
    for step in (1, -1):
        value = node.value + step
        new = str(value) if value >= 0 else f"({value})"
        if value != node.value:
            yield source.edit(node, new, "constant", group)


def shapes(source: Source, node: ast.Constant) -> bool:
    """Whether a number only says how values are laid out, or along which axis."""
    inner: ast.AST = node
    for outer in source.within(node):
        if isinstance(outer, ast.keyword) and outer.arg in SHAPE_KEYWORDS:
            return True
        if isinstance(outer, ast.Call):
            name = name_of(outer.func)
            along = name in ALONG_AXIS and isinstance(outer.func, ast.Attribute)
            if "layout" in name.lower() or (along and inner in outer.args):
                return True
            if name == "lru_cache":
                return True
        if isinstance(outer, ast.Subscript) and name_of(outer.value) in ("shape", "block_shape"):
            return True
        inner = outer
    return False


def cast(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """A value keeps its type: `.to(...)` is dropped."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and source.scope(node).device
    ):
        start = source.span(node)[0]
        stop = source.span(node.func)[1] - len(".to")
        value = source.data[start:stop].decode()
        if value.rstrip() == value:
            yield source.edit(node, value, "cast dropped", group)


def branches(source: Source, node: ast.AST, group: str) -> Iterator[Edit]:
    """The two values of a choice are exchanged."""
    if isinstance(node, ast.Call) and name_of(node.func) == "where" and len(node.args) == 3:
        condition, yes, no = (source.text(argument) for argument in node.args)
        if yes != no:
            new = f"{source.text(node.func)}({condition}, ({no}), ({yes}))"
            yield source.edit(node, new, "choice exchanged", group)


def is_text(node: ast.expr) -> bool:
    """Whether a node is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
