"""Operators on numbers that kernels compute, but for addresses and what orders threads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from defects.drawing.addresses import address_roots, is_address
from defects.drawing.expressions import expression_changes
from defects.drawing.source import Edit, Source
from defects.drawing.synchronization import orders

GROUP = "arithmetic"


def arithmetic_changes(source: Source) -> Iterator[Edit]:
    """The changes of a file by every operator of this class."""
    roots = address_roots(source)
    for node in source.of(ast.AST, device=True):
        ordering = not isinstance(node, ast.stmt) and any(
            orders(outer) for outer in source.within(node)
        )
        if not ordering and not is_address(source, node, roots):
            yield from expression_changes(source, node, GROUP)
