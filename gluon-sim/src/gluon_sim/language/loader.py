"""Runs the very source that compiles: rebinds the names a `@gluon.jit` function uses.

A jitted function keeps its plain Python function. The loader makes a copy of that function (same
source, so the same file and lines; see `carried` for what changes) whose globals lead to the
simulator's language instead of Triton's: modules and builtins by the module that defines them,
other jitted functions by translating them the same way, constexprs by their value. Everything else
(numbers, strings, layouts) stays as it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from gluon_sim.errors import Unsupported
from gluon_sim.language import NAMESPACES, gl
from gluon_sim.language.branches import BRANCH
from gluon_sim.language.carried import WRAP, recompile
from gluon_sim.values import dtypes
from gluon_sim.values.tensors import scalar


def same_kind(record: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """These values as a tuple, or as a named one where the record is one.

    >>> from collections import namedtuple
    >>> same_kind(namedtuple("Rows", "first last")(1, 2), (3, 4))
    Rows(first=3, last=4)
    """
    return type(record)(*values) if hasattr(record, "_fields") else tuple(values)


class Loader:
    """Translates functions; every object is translated once.

    `branch` gets the place and the condition of every branch, and says where it goes.
    """

    def __init__(self, branch: Callable[[str, int, int, Any], bool] | None = None) -> None:
        self._names: dict[str, Any] = {"range": gl.range, WRAP: scalar, BRANCH: branch}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._classes: dict[int, type] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._keep: list[Any] = []  # ids above stay valid while these live

    def function(self, source: Any) -> Callable[..., Any]:
        """The simulated form of a jitted (or plain) function."""
        plain = getattr(source, "fn", source)
        if id(plain) in self._functions:
            return self._functions[id(plain)]
        module = self._globals.setdefault(id(plain.__globals__), dict(self._names))
        self._keep.append(plain)
        closure = plain.__closure__
        cells = tuple(types.CellType() for _ in closure) if closure else None
        code = recompile(plain, self._names[BRANCH] is not None) or plain.__code__
        copy = types.FunctionType(code, module, plain.__name__, None, cells)
        copy.__kwdefaults__ = self._defaults(plain.__kwdefaults__)
        copy.__defaults__ = tuple(self.value(v) for v in plain.__defaults__ or ()) or None
        self._functions[id(plain)] = copy
        for cell, original in zip(cells or (), closure or (), strict=True):
            cell.cell_contents = self.value(original.cell_contents)
        for name in _names(plain.__code__):
            if name not in module and name in plain.__globals__:
                module[name] = self.value(plain.__globals__[name])
        return copy

    def _defaults(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        return {k: self.value(v) for k, v in values.items()} if values else None

    def value(self, x: Any) -> Any:
        """The simulated form of anything a kernel can name."""
        if isinstance(x, types.ModuleType):
            return self._module(x)
        if isinstance(x, tuple):
            return same_kind(x, (self.value(v) for v in x))
        if isinstance(x, list):
            return [self.value(v) for v in x]
        kind = type(x)
        if kind.__module__ == "triton.language.core":
            if kind.__name__ == "constexpr":
                return self.value(x.value)
            if kind.__name__ == "dtype":
                return self._dtype(x)
        if isinstance(x, type):
            return self._class(x)
        if hasattr(x, "fn") and kind.__module__.startswith("triton"):
            return self._named(x.fn) or self.function(x)
        if isinstance(x, types.FunctionType):
            return self._named(x) or x
        return x

    def _module(self, module: types.ModuleType) -> Any:
        if module.__name__ in NAMESPACES:
            return NAMESPACES[module.__name__]
        if module.__name__.split(".")[0] == "triton":
            return _Missing(module.__name__)
        return _Module(self, module)

    def _named(self, function: Any) -> Any:
        """The substitute for a function that Triton defines, or None for a kernel's own.

        A kernel's own function that asks Triton about layouts may name what stands in for it:
        f.__gluon_sim__ = "triton.experimental.gluon.language.nvidia.blackwell.tmem_reg_layout".
        """
        module, name = function.__module__ or "", function.__name__
        if alias := getattr(function, "__gluon_sim__", ""):
            module, _, name = alias.rpartition(".")
        found = vars(NAMESPACES[module]).get(name) if module in NAMESPACES else None
        if found is None and module.startswith("triton"):
            raise Unsupported(f"the simulator does not model {module}.{name}")
        return found

    def _class(self, cls: type) -> Any:
        if getattr(cls, "__triton_aggregate__", False):
            return self._aggregate(cls)
        if not cls.__module__.startswith("triton"):
            return cls
        return vars(NAMESPACES.get(cls.__module__, gl)).get(cls.__name__, cls)

    def _aggregate(self, cls: type) -> type:
        """A record type of the kernel: its own constructor and methods, translated."""
        if id(cls) not in self._classes:
            made = type(cls.__name__, (), {})
            self._classes[id(cls)] = made
            self._keep.append(cls)
            constructor = cls.hash_attrs[0]  # type: ignore[attr-defined]
            made.__init__ = self.function(constructor)  # type: ignore[misc]
            for name, member in vars(cls).items():
                if hasattr(member, "fn") and type(member).__module__.startswith("triton"):
                    setattr(made, name, self.function(member))
        return self._classes[id(cls)]

    @staticmethod
    def _dtype(x: Any) -> Any:
        name = str(x)
        if name not in dtypes.BY_NAME:
            raise Unsupported(f"the simulator has no element type {name}")
        return dtypes.BY_NAME[name]


class _Module:
    """A kernel's own module, imported as a name: its members are translated when used."""

    def __init__(self, loader: Loader, module: types.ModuleType) -> None:
        self._loader, self._module = loader, module

    def __getattr__(self, name: str) -> Any:
        member = self._loader.value(getattr(self._module, name))
        setattr(self, name, member)
        return member


class _Missing:
    """A Triton module without a substitute: naming it is fine, using it is not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"the simulator does not model {self._name}.{name}")


def _names(code: types.CodeType) -> set[str]:
    """Global names a code object and its nested ones may load."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
