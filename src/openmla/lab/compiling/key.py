"""A hash of a kernel and of all it refers to, the same in every process and import order.

Triton's own `cache_key` serves one process: it holds line numbers, and whether a callee's
constants are part of it depends on what was hashed before. Reports that travel with the
repository need a key that changes with what the compiler sees and with nothing else:

    kernel = source, decorators, defaults
             + f       another function or class of ours: likewise, recursively
             + BLOCK   a constant: its value
             + gl.load something of Triton: its name; Triton's version is the caller's to add

Comments, docstrings, how lines are wrapped and the place in the file are not part of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import keyword
import symtable
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

# Packages that are named but not read.
FOREIGN = {*sys.stdlib_module_names, "torch", "triton"}
PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
# What `jit` was told, decorator or not.
OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug", "version")
LAYOUT_TOKENS = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


def stable_key(value: Any) -> str:
    """A text that changes when a value, or any source or constant it refers to, changes.

    >>> stable_key((64, "bf16"))
    "tuple(64, 'bf16')"
    """
    return _Reader().text(value)


class _Reader:
    """One walk over what a value refers to. References are visited in the order of their names."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def text(self, value: Any) -> str:
        from triton.language.core import constexpr
        from triton.runtime.jit import JITCallable

        kind = type(value)
        if kind in PLAIN:
            return repr(value)
        if kind in (tuple, list):
            return f"{kind.__name__}({', '.join(map(self.text, value))})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({', '.join(sorted(map(self.text, value)))})"
        if kind is dict:
            return f"dict({', '.join(sorted(self.text(item) for item in value.items()))})"
        if isinstance(value, constexpr):
            return f"constexpr({self.text(value.value)})"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if hasattr(value, "__func__"):  # a bound method
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, JITCallable | type) or inspect.isroutine(inspect.unwrap(value)):
            return self._definition(inspect.unwrap(value))
        shown = repr(value)
        if " at 0x" in shown:
            raise TypeError(f"a kernel refers to {shown}, which is another in every process")
        return f"{shown} of {self.text(kind)}"

    def _definition(self, value: Any) -> str:
        """A function or class: its name, and a hash of it unless it is foreign."""
        name = f"{value.__module__}.{value.__qualname__}"
        if _is_foreign(value.__module__ or "builtins"):
            return name
        if id(value) not in self._known:
            self._known[id(value)] = f"{name}, recursively"
            parts = [type(value).__name__, *self._parts(value)]
            digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
            self._known[id(value)] = f"{name} {digest}"
        return self._known[id(value)]

    def _parts(self, value: Any) -> Iterator[str]:
        source, scope = _class_source(value) if isinstance(value, type) else _function_source(value)
        code, references = _read(source)
        yield code
        if not isinstance(value, type):
            function = getattr(value, "fn", value)
            yield self.text([function.__defaults__, function.__kwdefaults__])
            yield self.text([getattr(value, option, None) for option in OPTIONS])
        for reference in references:
            if reference[0] in scope:
                yield f"{'.'.join(reference)}: {self.text(_resolve(reference, scope))}"


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in FOREIGN


def _function_source(function: Any) -> tuple[str, Mapping[str, Any]]:
    """Source with decorators, and the names that the function sees."""
    plain = getattr(function, "fn", function)  # a JIT function keeps the one it was made of
    lines = getattr(function, "raw_src", None) or inspect.getsourcelines(plain)[0]
    return "".join(lines), {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}


def _class_source(made: type) -> tuple[str, Mapping[str, Any]]:
    """Every class of that name in the file: an aggregate is no longer the class in the source."""
    if "<locals>" in made.__qualname__:
        raise TypeError(f"a kernel refers to {made.__qualname__}: define the class in a module")
    module = sys.modules[made.__module__]
    found = _classes(inspect.getsource(module)).get(made.__name__)
    if not found:
        raise TypeError(f"a kernel refers to {made.__qualname__}, which has no source")
    return found, vars(module)


@functools.cache
def _classes(source: str) -> dict[str, str]:
    """The classes of a file by name, with decorators; those of one name one after the other."""
    lines = source.splitlines(keepends=True)
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
            found[node.name] = found.get(node.name, "") + text
    return found


def _resolve(reference: tuple[str, ...], scope: Mapping[str, Any]) -> Any:
    """("scores", "MINUS_INF") -> its value; ("gl", "load") -> gl, as Triton is not read."""
    value = scope[reference[0]]
    for name in reference[1:]:
        if not isinstance(value, ModuleType) or _is_foreign(value.__name__):
            break
        value = getattr(value, name)
    return value


@functools.cache
def _read(source: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """The code that matters, and the dotted names in it that come from outside, sorted."""
    source = textwrap.dedent(source)
    outside = set(_outside_names(symtable.symtable(source, "kernel", "exec")))
    used = _dotted_names(ast.parse(source))
    return _code(source), tuple(sorted({name for name in used if name[0] in outside}))


def _outside_names(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (s.get_name() for s in table.get_symbols() if s.is_global())
    for inner in table.get_children():
        yield from _outside_names(inner)


def _dotted_names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """`scores.MINUS_INF + f(x).y` has (scores, MINUS_INF), (f,) and (x,)."""
    attributes: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        attributes.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *attributes)
        return
    for child in ast.iter_child_nodes(inner):
        yield from _dotted_names(child)


def _code(source: str) -> str:
    """One line per statement, without comments and docstrings."""
    lines: list[str] = []
    line: list[tokenize.TokenInfo] = []
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type == tokenize.NEWLINE:
            if [t.type for t in line] != [tokenize.STRING]:  # a docstring
                lines.append(" " * depth + _joined(line))
            line = []
        elif token.type not in LAYOUT_TOKENS:
            line.append(token)
    return "\n".join(lines)


def _joined(line: list[tokenize.TokenInfo]) -> str:
    """The tokens of a statement, however a formatter has wrapped it: a comma before a closing
    bracket is left out, unless it makes a tuple of one element."""
    words = [token.string for token in line]
    kept = []
    for at, word in enumerate(words):
        closes = word == "," and words[at + 1 : at + 2] in ([")"], ["]"], ["}"])
        if not closes or _makes_a_tuple(words, at):
            kept.append(word)
    return " ".join(kept)


def _makes_a_tuple(words: list[str], comma: int) -> bool:
    """Whether the comma in front of a ")" is the only one between its brackets, which are those of
    no call.

    >>> _makes_a_tuple(["x", "=", "(", "1", ",", ")"], 4)
    True
    >>> _makes_a_tuple(["f", "(", "1", ",", ")"], 3)
    False
    >>> _makes_a_tuple(["(", "1", ",", "2", ",", ")"], 4)
    False
    """
    depth = 0
    for at in range(comma - 1, -1, -1):
        word = words[at]
        depth += (word in (")", "]", "}")) - (word in ("(", "[", "{"))
        if depth < 0:
            before = words[at - 1] if at else ""
            named = before.isidentifier() and not keyword.iskeyword(before)
            return word == "(" and not named and before not in (")", "]")
        if depth == 0 and word == ",":
            return False
    return False
