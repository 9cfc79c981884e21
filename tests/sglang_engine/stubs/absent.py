"""Packages that SGLang imports and a CPU cannot have: every name is there, none can be called."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class Absent:
    """A function or a class of such a package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} on a CPU")

    def __or__(self, other: object) -> Absent:  # in annotations
        return self

    __ror__ = __or__


def fill(package: str, submodules: str) -> None:
    """Let a package have every name, and modules inside it that have every name."""
    for name in (package, *(f"{package}.{inner}" for inner in submodules.split())):
        module = sys.modules.setdefault(name, ModuleType(name))
        module.__getattr__ = _names(name)  # type: ignore[method-assign]
        if name != package:
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            owner, _, last = name.rpartition(".")
            setattr(sys.modules[owner], last, module)


def _names(module: str) -> Any:
    def get(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get
