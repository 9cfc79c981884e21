"""Errors cross processes and torch.compile with their messages and attributes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from threading import Lock
from typing import Any

import pytest
import torch

import openmla
from openmla.errors import InvalidArgument, MissingExtra, OpenMLAError, PeerLost, Unsupported

SECONDS = 30.0
EXAMPLES: dict[str, OpenMLAError] = {
    "the base": OpenMLAError("a message"),
    "a wrong argument": InvalidArgument("q", "3 dimensions", "shape (4, 192)"),
    "a number that came": InvalidArgument("topk", "an int of at least 1", 0),
    "a dtype that came": InvalidArgument("v", "torch.bfloat16", torch.float64),
    "a tensor that came": InvalidArgument("scale", "a number", torch.zeros(2)),
    "a lock that came": InvalidArgument("sink", "a tensor", Lock()),
    "no kernel": Unsupported("no kernel for width 7"),
    "no kernel, but another form": Unsupported("no kernel for width 7", nearest="width 8"),
    "no extra": MissingExtra("openmla check --simulate", "gluon-sim", "sim", "no module"),
    "a lost peer": PeerLost("merge", 1, 4, "connection closed"),
}


def subclasses(kind: type[OpenMLAError]) -> Iterator[type[OpenMLAError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


def same(error: OpenMLAError, other: BaseException) -> bool:
    return (type(error), str(error), vars(error)) == (type(other), str(other), vars(other))


def pickled(error: OpenMLAError) -> Any:
    return pickle.loads(pickle.dumps(error))


def fail(name: str) -> None:
    """What a worker does."""
    raise EXAMPLES[name]


def test_there_is_an_example_of_every_error_of_the_package() -> None:
    declared = {kind for kind in subclasses(OpenMLAError) if kind.__module__.startswith("openmla")}
    assert declared == {type(error) for error in EXAMPLES.values()}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_an_error_is_copied_whole(name: str, again: Callable[[Any], Any]) -> None:
    error = EXAMPLES[name]
    found = again(error)
    assert found is not error and same(error, found)
    assert found.args == (str(error),)


def test_what_is_added_to_an_error_is_kept() -> None:
    error = Unsupported("no kernel", "another width")
    error.add_note("while the model was loaded")
    assert pickled(error).__notes__ == ["while the model was loaded"]


def test_an_error_of_somebody_elses_constructor_is_copied_too() -> None:
    found = pickled(Elsewhere(3))
    assert same(Elsewhere(3), found) and found.rows == 3


class Elsewhere(OpenMLAError):
    """As somebody might derive one."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"{rows} rows", "of a table")
        self.rows = rows


def test_a_process_pool_hands_every_error_over() -> None:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for name, error in EXAMPLES.items():
            raised = pool.submit(fail, name).exception(timeout=SECONDS)
            assert raised is not None and same(error, raised), name


def test_a_pool_of_multiprocessing_hands_every_error_over() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for name, error in EXAMPLES.items():
            with pytest.raises(OpenMLAError) as raised:
                pool.apply_async(fail, (name,)).get(timeout=SECONDS)
            assert same(error, raised.value), name


def test_what_came_is_kept_as_it_is_where_it_is_plain() -> None:
    for got in (3, 2.5, True, None, "text"):
        assert InvalidArgument("x", "y", got).got is got
    tensor = torch.zeros(2)
    assert InvalidArgument("x", "y", tensor).got == str(tensor)


def refused_in_a_graph(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the error of a call inside one graph."""
    torch.compiler.reset()
    compiled = torch.compile(lambda: function(*args, **options), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"InvalidArgument|Unsupported|expected") as raised:
        compiled()
    return str(raised.value)


def test_a_number_in_a_message_may_be_traced() -> None:
    """Sizes of a tensor whose shape is dynamic are symbols while they are traced."""

    def check(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            raise InvalidArgument("x", "at most 4 rows", x.shape[0])
        return x + 1

    compiled = torch.compile(check, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"'x', 'at most 4 rows', "):
        compiled(torch.zeros(6))


def test_the_indexers_errors_can_be_read_in_a_graph() -> None:
    scores = torch.zeros(3, 8)
    for options, parts in (
        ({"topk": 0}, ("topk", "an int of at least 1", "int 0")),
        ({"topk": 2, "starts": torch.zeros(3)}, ("starts", "torch.int32 [3]", "torch.float32 [3]")),
        ({"topk": 2, "backend": "abacus"}, ("backend", "one of auto", "abacus")),
    ):
        text = refused_in_a_graph(openmla.select_topk, scores, **options)
        assert all(part in text for part in parts), text


def test_what_has_no_kernel_says_so_in_a_graph() -> None:
    x = torch.zeros(2, 4, 8, requires_grad=True)
    text = refused_in_a_graph(openmla.quantize, x)
    assert "x requires a gradient" in text and "torch.no_grad()" in text


def test_outside_one_graph_the_error_is_itself() -> None:
    """A graph may end before the call, which is then made as ever."""

    def call(x: torch.Tensor) -> Any:
        return openmla.quantize(x + 1)

    torch.compiler.reset()
    with pytest.raises(InvalidArgument, match="x: expected") as raised:
        torch.compile(call, backend="eager")(torch.zeros(2, 4))
    assert raised.value.name == "x"
