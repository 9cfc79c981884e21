"""Every public call has an example that runs, and the types it promises."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from operator import attrgetter
from typing import Any, get_args, get_overloads, get_type_hints

import pytest

import openmla
from api import typed_calls
from openmla.api import options
from openmla.distributed import options as on_ranks
from openmla.formats import FORMATS, FormatName
from openmla.planning import BACKENDS
from openmla.problem import Backend

MODULES = ("api.attention", "api.merging", "api.quantizing", "planning", "indexer.api")
CALLS = [name for name in openmla.__all__ if inspect.isfunction(getattr(openmla, name))]
OPTIONS = {
    "mla_attend": options.AttendOptions,
    "mla_prefill": options.DenseOptions,
    "mla_prefill_latent": options.LatentOptions,
    "mla_prefill_sparse": options.SparseOptions,
    "distributed.prefill": on_ranks.DenseOptions,
    "distributed.prefill_latent": on_ranks.LatentOptions,
    "distributed.prefill_sparse": on_ranks.SparseOptions,
}


def call_named(name: str) -> Any:
    return attrgetter(name)(openmla)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str):
    found = doctest.testmod(importlib.import_module(f"openmla.{module}"))
    assert found.attempted >= 3 and found.failed == 0


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_an_example(name: str):
    call = getattr(openmla, name)
    assert f">>> {name}(" in call.__doc__ or f"= {name}(" in call.__doc__


@pytest.mark.parametrize("name", OPTIONS)
def test_overloads_name_every_option_once(name: str):
    """What an overload says in its own words and in its options is what the call takes."""
    call = call_named(name)
    taken = {p.name: p for p in inspect.signature(call).parameters.values()}
    assert len(get_overloads(call)) >= 3
    for overload in get_overloads(call):
        own = [p for p in inspect.signature(overload).parameters if p != "options"]
        assert sorted([*own, *OPTIONS[name].__annotations__]) == sorted(taken)
    required = {n for n, p in taken.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    assert OPTIONS[name].__required_keys__ == required


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_types_of_the_call(name: str):
    written = get_type_hints(OPTIONS[name])
    assert written == {n: t for n, t in get_type_hints(call_named(name)).items() if n in written}


def test_typed_calls_return_what_their_types_say():
    for wanted in (True, False):
        typed_calls.dense(wanted)
    typed_calls.latent()
    typed_calls.sparse()
    typed_calls.on_ranks()


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_a_call_is_described(name: str):
    """`help(openmla.mla_prefill)` says what each argument is, and what may be raised."""
    call = getattr(openmla, name)
    described = inspect.getdoc(call).partition("Args:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): \S", described, re.MULTILINE)
    assert found and sorted(found) == sorted(inspect.signature(call).parameters)
    assert "Raises:\n    InvalidArgument: " in inspect.getdoc(call)


@pytest.mark.parametrize("method", ["allocate", "append", "gather"])
def test_every_argument_of_a_cache_is_described(method: str):
    call = getattr(openmla.LatentCache, method)
    wanted = set(inspect.signature(call).parameters) - {"self"}
    described = inspect.getdoc(call).partition("Args:\n")[2].partition("\nRaises:")[0]
    assert set(re.findall(r"^    (\w+): \S", described, re.MULTILINE)) == wanted


def test_literal_types_list_what_there_is():
    assert sorted(get_args(Backend)) == sorted(BACKENDS)
    assert list(get_args(FormatName)) == list(FORMATS)
