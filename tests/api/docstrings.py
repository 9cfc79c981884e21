"""What a docstring says of a call's arguments and errors, and what the call itself says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from typing import Any

import torch


def described(words: str, section: str = "Args") -> list[str]:
    """Names of the items of a section of a docstring."""
    section_of = inspect.cleandoc(words).partition(f"{section}:\n")[2]
    return re.findall(r"^    \**(\w+): \S", re.split(r"\n\S", section_of)[0], re.MULTILINE)


def arguments(call: Any) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "cls")]


def raised_by(call: Any) -> set[str]:
    """Names of the errors that a function raises itself; of a class, none."""
    if inspect.isclass(call):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    raises = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return {ast.unparse(error.func) for error in raises if isinstance(error, ast.Call)}


def members(module: str) -> dict[str, Any]:
    """Public names of a module: those of __all__, or functions that it defines without one."""
    found = importlib.import_module(f"openmla.{module}")
    named = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if inspect.isfunction(value)
        and value.__module__ == found.__name__
        and not name.startswith("_")
    ]
    return {f"{module}.{name}": getattr(found, name) for name in named}


def methods(name: str, owner: type) -> dict[str, Any]:
    """Public methods of a class, by their full names; a module's own constructor as the class."""
    found = {
        f"{name}.{key}": getattr(owner, key)
        for key, value in vars(owner).items()
        if not key.startswith("_") and inspect.isfunction(getattr(owner, key))
    }
    return {**found, name: owner} if issubclass(owner, torch.nn.Module) else found
