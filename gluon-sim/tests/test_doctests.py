"""The examples in docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import gluon_sim

MODULES = [m.name for m in pkgutil.walk_packages(gluon_sim.__path__, "gluon_sim.")]
WITH_EXAMPLES = ("values.dtypes", "values.tensors", "memory.lanes", "memory.placement")


@pytest.mark.parametrize("name", MODULES)
def test_worked_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert not result.failed
    assert result.attempted or name.removeprefix("gluon_sim.") not in WITH_EXAMPLES
