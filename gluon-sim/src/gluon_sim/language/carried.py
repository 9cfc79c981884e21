"""Numbers that a loop carries become registers, as in the compiler.

`it = 0` before a loop that changes `it` is a constant to Python and a 32-bit register to Triton: it
wraps around, divides to zero and has `.to()`. The function is compiled again from its own file with
such constants wrapped, so files and lines stay what they are. On request its branches are marked
on the way (see `branches`).
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gluon_sim.language.branches import Marked

WRAP = "__sim_register__"


def recompile(function: Callable[..., Any], branches: bool = False) -> types.CodeType | None:
    """The code of `function` with loop-carried constants wrapped, and `branches` marked; None where
    that changes nothing."""
    code = function.__code__
    return _recompile(code.co_filename, code.co_firstlineno, code, branches)


@functools.cache
def _functions(path: str, changed: int) -> dict[tuple[str, int], ast.FunctionDef]:
    """The functions of a file, by their names and first lines (of the decorators)."""
    tree = ast.parse(Path(path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node
        for node in found
    }


@functools.cache
def _recompile(file: str, line: int, code: types.CodeType, branches: bool) -> types.CodeType | None:
    # Code objects of two files compare equal when their instructions do, hence file and line.
    path = Path(file)
    if code.co_freevars or not path.is_file():
        return None
    functions = _functions(str(path), path.stat().st_mtime_ns)
    kept = functions.get((code.co_name, code.co_firstlineno))
    if kept is None:
        return None
    names = _carried(kept)
    if not names and not branches:
        return None
    node = copy.deepcopy(kept)
    wrapper = _Wrap(names)
    wrapper.visit(node)
    marked = Marked(file)
    if branches:
        marked.visit(node)
    if not (wrapper.changed or marked.changed):
        return None
    node.decorator_list = []
    node.args.defaults = []
    node.args.kw_defaults = [None for _ in node.args.kwonlyargs]
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.returns = None
    module = ast.fix_missing_locations(ast.Module([node], []))
    made = compile(module, code.co_filename, "exec")
    found = (c for c in made.co_consts if inspect.iscode(c) and c.co_name == code.co_name)
    return next(found, None)


def _carried(function: ast.FunctionDef) -> set[str]:
    """Names that a runtime loop of the function assigns."""
    names: set[str] = set()
    for loop in ast.walk(function):
        if isinstance(loop, ast.For) and _is_static(loop.iter):
            continue
        if isinstance(loop, ast.For | ast.While):
            for inner in loop.body:
                for node in ast.walk(inner):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        names.add(node.id)
    return names


def _is_static(iterator: ast.expr) -> bool:
    called = iterator.func if isinstance(iterator, ast.Call) else iterator
    return getattr(called, "attr", getattr(called, "id", "")) == "static_range"


class _Wrap(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.changed = False

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        (target, *others) = node.targets
        simple = isinstance(target, ast.Name) and not others and target.id in self.names
        if simple and _is_number(node.value):
            node.value = ast.Call(ast.Name(WRAP, ast.Load()), [node.value], [])
            self.changed = True
        return node


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        value = value.operand
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)
