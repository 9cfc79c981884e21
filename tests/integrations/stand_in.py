"""Modules of an engine that is not installed, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Contents = dict[str, dict[str, Any]]


@contextmanager
def installed(
    package: str, contents: Contents, ours: tuple[str, ...], without: tuple[str, ...] = ()
) -> Iterator[Contents]:
    """These modules as `package`; `without` names modules, or module:attribute, that are missing.

    Modules of openmla that import the engine, `ours`, are loaded anew inside and dropped after.
    """
    for missing in without:
        module, _, attribute = missing.partition(":")
        if attribute:
            del contents[module][attribute]
        else:
            del contents[module]
    before = dict(sys.modules)
    _drop(package, ours)
    for name, content in {package: {}, **contents}.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            made.__path__ = []
        vars(sys.modules[name]).update(content)
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], sys.modules[name])
    try:
        yield contents
    finally:
        _drop(package, ours)
        sys.modules.update({n: m for n, m in before.items() if n not in sys.modules})


def _drop(package: str, ours: tuple[str, ...]) -> None:
    for name in list(sys.modules):
        if name in ours or name.partition(".")[0] == package:
            del sys.modules[name]
            above, _, own = name.rpartition(".")
            if above in sys.modules:  # or `from above import own` would find it there
                vars(sys.modules[above]).pop(own, None)
