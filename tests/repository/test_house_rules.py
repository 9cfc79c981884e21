"""The rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from repository.package_source import ROOT, functions, modules, path_of

MAY_READ_ENVIRONMENT = (
    "cli",
    "lab.compiling",
    "integrations.vllm.registration",
    "integrations.sglang.registration",
)
# Argument errors must survive `python -O`.
NO_ASSERTS_WITH_MESSAGES = ("checks", "api.attention", "cache")
MACHINE_PATHS = ("/" + "work/", "/" + "root/", "/" + "home/")


def is_device_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Compiled by Triton: what reaches it are Triton's own values."""
    decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
    return "jit" in decorators or "constexpr_function" in decorators


def public(dotted: str) -> bool:
    return not any(part.startswith("_") for part in dotted.split("."))


def public_functions(module: str) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods that a user of the module can name; nested ones are not."""
    everything = dict(functions(module))
    return [
        (name, node)
        for name, node in everything.items()
        if public(name) and name.rpartition(".")[0] not in everything
    ]


def says_what_it_is(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """A docstring, a decorator that begins with a description, or a bare `...` of a protocol.

    Of a property that only returns a value, its name may be enough.
    """
    described = any(
        isinstance(d, ast.Call) and d.args and isinstance(d.args[0], ast.Constant)
        for d in node.decorator_list
    )
    decorators = [ast.unparse(d) for d in node.decorator_list]
    value = decorators[-1:] in (["property"], ["cached_property"])
    only_returns = value and len(node.body) == 1 and isinstance(node.body[0], ast.Return)
    documented = bool(ast.get_docstring(node)) or ast.unparse(node.body) == "..."
    return documented or described or only_returns


@cache
def documented_methods() -> set[str]:
    """Names that some class of the package defines with a docstring."""
    return {
        node.name
        for module in modules()
        for name, node in functions(module)
        if "." in name and ast.get_docstring(node)
    }


def test_modules_say_what_they_are():
    assert [m for m, tree in modules().items() if not ast.get_docstring(tree)] == []


def test_files_that_the_source_names_exist():
    """A header says in which file something is; that file may have been moved since."""
    folders = ("src", "tests", "benchmarks", "gluon-sim")
    there = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    ends = {"/".join(path.split("/")[-n:]) for path in there for n in range(1, 9)}
    named = {
        (module, name)
        for module in modules()
        for name in re.findall(r"[\w/-]+\.py\b", path_of(module).read_text())
    }
    assert sorted((module, name) for module, name in named if name.strip("/") not in ends) == []


def test_public_names_have_docstrings():
    undocumented = []
    for module, tree in modules().items():
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        undocumented += [
            f"{module}.{name}"
            for name, node in classes.items()
            if public(name) and not says_what_it_is(node)
        ]
        for name, node in public_functions(module):
            owner = classes.get(name.rpartition(".")[0])
            # A method that overrides another has its docstring, as help() shows it.
            inherits = owner is not None and owner.bases and node.name in documented_methods()
            if not says_what_it_is(node) and not inherits:
                undocumented.append(f"{module}.{name}")
    assert undocumented == []


def test_public_functions_are_annotated():
    bare = []
    for module in modules():
        for name, node in public_functions(module):
            missing = [a.arg for a in _arguments(node) if a.annotation is None]
            if (missing or node.returns is None) and not is_device_function(node):
                bare.append(f"{module}.{name}: {missing or 'its result'}")
    assert bare == []


def test_the_environment_is_read_in_few_places():
    reads = []
    for module, tree in modules().items():
        if not any(
            module == m or module.startswith((f"{m}.", f"{m}_")) for m in MAY_READ_ENVIRONMENT
        ):
            reads += [
                f"{module}, line {node.lineno}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            ]
    assert reads == []


def test_user_errors_are_not_asserts():
    asserts = [
        f"{module}, line {node.lineno}"
        for module in NO_ASSERTS_WITH_MESSAGES
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Assert) and node.msg is not None
    ]
    assert asserts == []


def test_no_machine_paths_in_tracked_files():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".svg", ".gz"):
            continue
        text = path.read_text(errors="replace")
        found += [f"{name}: {part}" for part in MACHINE_PATHS if part in text]
    assert found == []


def test_the_matrix_of_tritons_has_all_its_tests():
    """The Makefile names where they are, so that no other test is collected with every Triton."""
    [named] = re.findall(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    places = [ROOT / place for place in named.split()]
    assert all(place.exists() for place in places)
    marked = [
        path
        for folder in ("tests", "gluon-sim/tests")
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"mark\.tritons\b", path.read_text()) and path != Path(__file__)
    ]
    assert marked
    assert [p for p in marked if not any(p == x or x in p.parents for x in places)] == []


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    named += [a for a in (spec.vararg, spec.kwarg) if a is not None]
    return [a for a in named if a.arg not in ("self", "cls")]
