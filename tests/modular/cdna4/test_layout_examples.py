"""The worked examples in the docstrings of the layout package are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from modular.cdna4 import proof
from openmla.modular.cdna4 import layout

MODULES = [f"{layout.__name__}.{module.name}" for module in pkgutil.iter_modules(layout.__path__)]
MODULES.append(proof.__name__)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
