"""Branches that tell where they went: conditions of a kernel are handed to a recorder first.

Only functions that are translated while somebody records (`gluon_sim.recording`) are changed so.
"""

from __future__ import annotations

import ast

BRANCH = "__sim_branch__"


class Marked(ast.NodeTransformer):
    """Wraps the condition of every `if`, `elif`, `while` and conditional expression.

    >>> tree = ast.parse("a = 1 if b > 2 else 3")
    >>> ast.unparse(Marked("kernel.py").visit(tree))
    "a = 1 if __sim_branch__('kernel.py', 1, 9, b > 2) else 3"
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.changed = False

    def _mark(self, test: ast.expr) -> ast.expr:
        self.changed = True
        place = [ast.Constant(part) for part in (self.file, test.lineno, test.col_offset)]
        call = ast.Call(ast.Name(BRANCH, ast.Load()), [*place, test], [])
        for node in (call, call.func, *place):
            ast.copy_location(node, test)
        return call

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        node.test = self._mark(node.test)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        self.generic_visit(node)
        node.test = self._mark(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        self.generic_visit(node)
        node.test = self._mark(node.test)
        return node
