"""Every public call has an example that runs, and the types it promises."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import itertools
import textwrap
from operator import attrgetter
from typing import Any, get_args, get_overloads, get_type_hints

import pytest

import openmla
from api import typed_calls
from api.docstrings import arguments, described, members, methods, raised_by
from openmla import errors
from openmla.api import options
from openmla.distributed import options as on_ranks
from openmla.formats import FORMATS, FormatName
from openmla.planning import BACKENDS
from openmla.problem import Backend

MODULES = ("api.attention", "api.merging", "api.quantizing", "planning", "indexer.api")
DESCRIBED = (
    "distributed",
    "nn",
    "nn.compressed",
    "compat.deep_gemm",
    "compat.flash_attn",
    "compat.flash_mla",
    "compressor",
    "indexer.groups",
)
CALLS = [name for name in openmla.__all__ if inspect.isfunction(getattr(openmla, name))]
PUBLIC: dict[str, Any] = {}
for module in DESCRIBED:  # a class that two modules export counts once
    PUBLIC |= {name: x for name, x in members(module).items() if x not in PUBLIC.values()}
CLASSES = {name: x for name, x in PUBLIC.items() if inspect.isclass(x)}
ROUTINES = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}
for owner in CLASSES:
    ROUTINES |= methods(owner, CLASSES[owner])
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
    assert arguments(call) and sorted(described(call.__doc__)) == sorted(arguments(call))
    assert "InvalidArgument" in described(call.__doc__, "Raises")


@pytest.mark.parametrize("method", ["allocate", "append", "gather"])
def test_every_argument_of_a_cache_is_described(method: str):
    call = getattr(openmla.LatentCache, method)
    assert sorted(described(call.__doc__)) == sorted(arguments(call))


@pytest.mark.parametrize("name", ROUTINES)
def test_every_argument_of_other_modules_is_described(name: str):
    """Functions, methods and constructors of `DESCRIBED`: arguments in the order of the call."""
    call = ROUTINES[name]
    assert described(call.__doc__) == arguments(call)


@pytest.mark.parametrize("name", ROUTINES)
def test_errors_of_other_modules_are_described(name: str):
    """What a function raises itself is among what it says; all that it says are errors."""
    said = described(ROUTINES[name].__doc__, "Raises")
    assert raised_by(ROUTINES[name]) <= set(said)
    assert all(hasattr(errors, error) or hasattr(builtins, error) for error in said)


@pytest.mark.parametrize("name", [n for n, v in CLASSES.items() if hasattr(v, "__annotations__")])
def test_every_field_of_a_record_is_described(name: str):
    """By the string after it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(CLASSES[name]))).body[0].body
    bare = [
        node.target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_")
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert bare == [] and not isinstance(body[-1], ast.AnnAssign)


def test_described_modules_are_found():
    """An empty list of names would pass all of the above."""
    found = {*ROUTINES, *CLASSES}
    assert {"distributed.prefill", "nn.MLAAttention.forward", "nn.MLAConfig"} <= found
    assert {"indexer.groups.expand_pools", "compat.flash_attn.flash_attn_varlen_func"} <= found
    assert len(ROUTINES) > 60


def test_literal_types_list_what_there_is():
    assert sorted(get_args(Backend)) == sorted(BACKENDS)
    assert list(get_args(FormatName)) == list(FORMATS)
