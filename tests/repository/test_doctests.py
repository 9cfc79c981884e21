"""Examples in docstrings of the package give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from repository.package_source import modules, path_of

WITH_EXAMPLES = [name for name in modules() if ">>> " in path_of(name).read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module(name: str):
    result = doctest.testmod(import_module(f"openmla.{name}" if name else "openmla"))
    assert result.failed == 0


def test_modules_with_examples_are_found():
    assert len(WITH_EXAMPLES) > 40 and "planning.form" in WITH_EXAMPLES
