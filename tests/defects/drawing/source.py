"""A source file as the operators see it: its text, its tree, and which parts are never changed.

Edits are made in the text, at the bytes of a node, so that everything else keeps its formatting.
Docstrings, comments, annotations, decorators, `__all__`, f-strings and what only explains or
refuses are left alone: no result depends on them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

EXPLAINS = re.compile(r"explain|describe|^__(str|repr)__$|_lines$|^verdict")
"""Functions and calls of these names make text for people."""
REFUSES = re.compile(r"(Error|Unsupported|InvalidArgument|NotPrepared|NotCompiled|^warn)$")
"""Calls of these names make messages."""
DEVICE = re.compile(r"\b(jit|constexpr_function)\b")
MODULE = "(module)"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.expr | ast.stmt | ast.keyword


@dataclass(frozen=True)
class Edit:
    """One change of one file: the bytes from `start` to `stop` become `new`."""

    file: str
    """Below src/openmla."""
    start: int
    stop: int
    new: str
    operator: str
    group: str
    """The class of the operator."""
    line: int
    function: str
    old: str
    statement: str
    """The statement that holds the change, in one line."""
    becomes: str
    """That statement afterwards."""
    place: int
    """Which of the function's statements with this text it is, from 1 on."""

    def apply(self, data: bytes) -> bytes:
        """The text of the file with the change made."""
        return data[: self.start] + self.new.encode() + data[self.stop :]


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; nothing for what has none.

    >>> name_of(ast.parse("gl.load", mode="eval").body)
    'load'
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(node: ast.expr) -> str:
    """The part of a dotted name before the last: "gl" of `gl.load`."""
    return name_of(node.value) if isinstance(node, ast.Attribute) else ""


def one_line(text: str) -> str:
    """The text without line breaks and wide gaps."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Scope:
    """Where a node stands."""

    function: str
    """Its dotted name, or that of the module."""
    device: bool
    statement: ast.stmt
    place: int


class Source:
    """One file below src/openmla."""

    def __init__(self, file: str, data: bytes) -> None:
        self.file, self.data = file, data
        self.tree = ast.parse(data)
        self._lines = [0]
        for line in data.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)
        self.scopes: dict[int, Scope] = {}
        self.parents: dict[int, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._seen: dict[tuple[str, str], int] = {}
        self._visit_body(self.tree.body, MODULE, False)

    def span(self, node: Node) -> tuple[int, int]:
        """The bytes of a node, without parentheses around it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Node) -> str:
        """The text of a node, without parentheses around it."""
        start, stop = self.span(node)
        return self.data[start:stop].decode()

    def between(self, left: Node, right: Node) -> tuple[int, int]:
        """The bytes after one node and before another."""
        return self.span(left)[1], self.span(right)[0]

    def scope(self, node: ast.AST) -> Scope:
        """Where a node stands; only for nodes that may be changed."""
        return self.scopes[id(node)]

    def within(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, from the inside, up to its statement."""
        while not isinstance(node, ast.stmt):
            node = self.parents[id(node)]
            yield node

    def of(self, *kinds: type[ast.AST], device: bool) -> Iterator[ast.AST]:
        """The nodes of some kinds that may be changed, in the order of the text."""
        for node in self.nodes:
            if isinstance(node, kinds) and self.scope(node).device == device:
                yield node

    def header(self, statement: ast.stmt) -> tuple[int, int]:
        """The bytes of a statement; of one with a body, those before the body."""
        start, stop = self.span(statement)
        body = getattr(statement, "body", None)
        if body:
            first = body[0]
            decorated = getattr(first, "decorator_list", [])
            stop = self.span(decorated[0])[0] if decorated else self.span(first)[0]
        return start, stop

    def statement_at(self, byte: int) -> tuple[int, int]:
        """The bytes of the innermost statement there that may be changed, without its body."""
        spans = [self.header(node) for node in self.nodes if isinstance(node, ast.stmt)]
        return min((s for s in spans if s[0] <= byte < s[1]), key=lambda s: s[1] - s[0])

    def line(self, byte: int) -> int:
        """The line of the text that a byte is in, from 1 on."""
        return self.data.count(b"\n", 0, byte) + 1

    def edit(
        self, node: Node, new: str, operator: str, group: str, at: tuple[int, int] | None = None
    ) -> Edit:
        """A change of the bytes of a node, or of those `at` a place beside it."""
        start, stop = at or self.span(node)
        scope = self.scope(node)
        first, last = self.header(scope.statement)
        old = self.data[start:stop].decode()
        before = self.data[first:start].decode()
        behind = self.data[stop : max(last, stop)].decode()
        return Edit(
            self.file,
            start,
            stop,
            new,
            operator,
            group,
            self.line(start),
            scope.function,
            old,
            one_line(before + old + behind),
            one_line(before + new + behind),
            scope.place,
        )

    def _visit_body(self, body: list[ast.stmt], function: str, device: bool) -> None:
        for statement in body:
            self._visit_statement(statement, function, device)

    def _visit_statement(self, statement: ast.stmt, function: str, device: bool) -> None:
        if isinstance(statement, Function):
            self._visit_function(statement, function, device)
            return
        if isinstance(statement, ast.ClassDef):
            self._visit_body(statement.body, joined(function, statement.name), False)
            return
        if not changeable(statement):
            return
        if function == MODULE and is_constexpr(statement):
            device = True
        key = (function, one_line(self.data[slice(*self.header(statement))].decode()))
        self._seen[key] = self._seen.get(key, 0) + 1
        scope = Scope(function, device, statement, self._seen[key])
        self._note(statement, statement, scope)
        for field, value in ast.iter_fields(statement):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    self._visit_statement(child, function, device)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self._visit_body(child.body, function, device)
                elif isinstance(child, ast.AST):
                    self._visit(child, statement, scope)

    def _visit_function(self, node: Function, function: str, device: bool) -> None:
        if EXPLAINS.search(node.name):
            return
        self._visit_body(node.body, joined(function, node.name), device or is_device(node))

    def _visit(self, node: ast.AST, parent: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if EXPLAINS.search(name) or REFUSES.search(name):
                return
        self._note(node, parent, scope)
        for child in ast.iter_child_nodes(node):
            self._visit(child, node, scope)

    def _note(self, node: ast.AST, parent: ast.AST, scope: Scope) -> None:
        self.scopes[id(node)] = scope
        self.parents[id(node)] = parent
        self.nodes.append(node)


def is_device(node: Function) -> bool:
    """Whether Triton compiles a function."""
    return bool(DEVICE.search(" ".join(map(ast.unparse, node.decorator_list))))


def joined(function: str, name: str) -> str:
    """The dotted name of what is defined inside a function, a class or the module."""
    return name if function == MODULE else f"{function}.{name}"


def changeable(statement: ast.stmt) -> bool:
    """Whether results can depend on a statement: not on docstrings, imports and refusals."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert | ast.Pass):
        return False
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return all(name_of(target) != "__all__" for target in targets)


def is_constexpr(statement: ast.stmt) -> bool:
    """Whether a statement gives names to numbers that are compiled into kernels."""
    return isinstance(statement, ast.Assign | ast.AnnAssign) and "constexpr(" in ast.unparse(
        statement
    )
