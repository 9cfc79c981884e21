"""Operators on what orders threads, copies and kernels: waits, arrivals, fences, barriers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from defects.drawing.source import Edit, Source, name_of, owner_of

GROUP = "synchronization"
ORDERS = re.compile(
    r"wait|arrive|expect|fence|barrier|commit|signal|release|let_next_begin|trust_arrived"
    r"|invalidate"
)
"""Calls of these names order others."""
MAKES = re.compile(r"^(barriers|barrier_pair|barrier_layout|signals)$")
"""Calls of these names make barriers."""
STAGES = re.compile(r"^slots?_at$")
"""Calls of these names take a stage of several rings, their second argument."""
COUNTED_WAITS = {"wait_group", "store_wait", "warpgroup_mma_wait"}


def synchronization_changes(source: Source) -> Iterator[Edit]:
    """The changes of a file by every operator of this class."""
    for node in source.of(ast.Expr, device=True):
        assert isinstance(node, ast.Expr)
        yield from statement(source, node)
    for node in source.of(ast.Call, device=True):
        assert isinstance(node, ast.Call)
        for operator in (results, phase, waits, count, expected, predicate, stage):
            yield from operator(source, node)


def orders(node: ast.AST) -> bool:
    """Whether a call orders others."""
    return isinstance(node, ast.Call) and bool(
        ORDERS.search(name_of(node.func)) and not MAKES.search(name_of(node.func))
    )


def statement(source: Source, node: ast.Expr) -> Iterator[Edit]:
    """A statement that orders others is dropped, or happens twice."""
    if orders(node.value):
        yield source.edit(node, "pass", "dropped", GROUP)
        start = source.span(node)[0]
        indent = start - source.data.rindex(b"\n", 0, start) - 1
        text = source.text(node)
        yield source.edit(node, f"{text}\n{' ' * indent}{text}", "twice", GROUP)


def results(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A wait that hands on what it waited for hands it on at once."""
    deps = next((k.value for k in node.keywords if k.arg == "deps"), None)
    if orders(node) and isinstance(deps, ast.Tuple | ast.List) and deps.elts:
        only = f"({source.text(deps.elts[0])})"
        yield source.edit(
            node, only if len(deps.elts) == 1 else source.text(deps), "dropped", GROUP
        )


def phase(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A wait for the other phase of an mbarrier."""
    if name_of(node.func) == "wait" and owner_of(node.func) == "mbarrier" and len(node.args) > 1:
        asked = node.args[1]
        yield source.edit(asked, f"({source.text(asked)}) ^ 1", "phase flipped", GROUP)


def waits(source: Source, node: ast.Call) -> Iterator[Edit]:
    """One more group may be in flight after a wait."""
    if name_of(node.func) in COUNTED_WAITS and node.args:
        most = node.args[0]
        yield source.edit(most, f"({source.text(most)}) + 1", "one less waited for", GROUP)


def count(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A barrier is completed by one arrival more, or less."""
    counts = [k.value for k in node.keywords if k.arg in ("count", "COUNT")]
    if name_of(node.func) == "barriers" and len(node.args) > 1:
        counts.append(node.args[1])
    if name_of(node.func) == "barrier_pair":
        counts += node.args
    for each in counts:
        for step in ("+ 1", "- 1"):
            yield source.edit(each, f"({source.text(each)}) {step}", "arrivals counted", GROUP)


def expected(source: Source, node: ast.Call) -> Iterator[Edit]:
    """A barrier waits for 16 bytes more, or less."""
    if name_of(node.func) == "expect" and len(node.args) > 1:
        for step in ("+ 16", "- 16"):
            new = f"({source.text(node.args[1])}) {step}"
            yield source.edit(node.args[1], new, "bytes expected", GROUP)


def predicate(source: Source, node: ast.Call) -> Iterator[Edit]:
    """What happens under a condition always happens."""
    if orders(node):
        for keyword in node.keywords:
            if keyword.arg == "pred":
                yield source.edit(keyword, "pred=True", "condition dropped", GROUP)


def stage(source: Source, node: ast.Call) -> Iterator[Edit]:
    """The stage of a ring is its neighbor, or the first."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "index" and len(node.args) == 1:
        at = node.args[0]
    elif STAGES.search(name_of(node.func)) and len(node.args) > 1:
        at = node.args[1]
    else:
        return
    if isinstance(at, ast.Starred):
        return
    if isinstance(at, ast.Constant):
        if isinstance(at.value, int):
            yield source.edit(at, str(at.value ^ 1), "another stage", GROUP)
    else:
        yield source.edit(at, f"({source.text(at)}) ^ 1", "another stage", GROUP)
        yield source.edit(at, "0", "another stage", GROUP)
