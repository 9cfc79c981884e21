"""The worked examples in the docstrings of the layout package are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import openmla.layout

MODULES = [
    f"openmla.layout.{module.name}" for module in pkgutil.iter_modules(openmla.layout.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
