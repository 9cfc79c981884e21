"""Cached launches: arguments of the long way's, with other tensors and other token counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kernels import cached_calls
from kernels.cached_calls import CALLS, dense, latent, scores, select, sparse, topk
from kernels.noted import Noted, difference, note_launches
from openmla import cached, dispatch
from openmla.errors import InvalidArgument
from openmla.kernels import prepared
from openmla.kernels.call import Extent, LaunchNumbers


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return note_launches(monkeypatch)


def beside_the_long_way(noted: Noted, first: Callable[..., Any], again: Callable[..., Any]) -> str:
    """How `again`, cached after `first`, differs from `again` planned anew."""
    noted.take(first)
    noted.take(first)
    got = noted.take(again)
    assert not got[1].long and got[1].cached
    cached.forget()
    return difference(noted.take(again), got)


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_are_those_of_the_long_way(name: str, noted: Noted) -> None:
    make, options, kernels = CALLS[name]
    assert beside_the_long_way(noted, make(**options), make(**options)) == ""
    assert len(noted.long) == kernels


@pytest.mark.parametrize("name", ["dense", "latent, fp8 in a workspace", "portable latent, split"])
def test_a_given_out_is_written_by_a_cached_launch(name: str, noted: Noted) -> None:
    make, options, _ = CALLS[name]
    call, other = make(**options), make(**options)
    (out, *_), _ = noted.take(call)
    cached.forget()
    noted.take(lambda: call(out=out))
    results, launched = noted.take(lambda: other(out=out))
    assert launched.cached and not launched.long and results[0] is out
    noted.take(other)  # and the same launch serves where none is given
    assert noted.cached


COUNTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "other counts": (dense, {}, {"q_len": 40, "k_len": 77, "batch": 2}),
    "shared keys": (dense, {"shared": True}, {"q_len": 40, "k_len": 77, "batch": 2}),
    "two query tiles": (dense, {"q_len": 2000, "k_len": 2000}, {"q_len": 2500, "k_len": 3000}),
    "split": (dense, {"q_len": 64, "k_len": 9000}, {"q_len": 30, "k_len": 8600}),
    "fp8": (dense, {**cached_calls.WIDE_V, "factors": True}, {"q_len": 40, "k_len": 77}),
    "fp8, one block": (dense, cached_calls.WIDE_V, {"q_len": 40, "k_len": 77}),
    "fp8, two query tiles": (
        dense,
        {**cached_calls.WIDE_V, "q_len": 2000, "k_len": 2000},
        {"q_len": 2500, "k_len": 3000},
    ),
    "fp8 values": (
        dense,
        {**cached_calls.E4M3, "factors": True},
        {"q_len": 40, "k_len": 777, "batch": 2},
    ),
    "fp8 values, split": (
        dense,
        {**cached_calls.E4M3, "q_len": 64, "k_len": 9000},
        {"q_len": 30, "k_len": 8600},
    ),
    "fp8 lists": (sparse, {**cached_calls.E4M3, "factors": True, "lengths": True}, {"tokens": 200}),
    "one fp8 list": (sparse, {**cached_calls.E4M3, "form": "fp8_token"}, {"tokens": 1}),
    "lists": (sparse, {"lengths": True}, {"tokens": 100}),
    "one list": (sparse, {}, {"tokens": 1}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_other_token_counts_take_the_same_kernels(name: str, noted: Noted) -> None:
    make, first, changed = COUNTS[name]
    again = make(**{**first, **changed, **cached_calls.LSE})
    assert beside_the_long_way(noted, make(**first, **cached_calls.LSE), again) == ""


@pytest.mark.parametrize(
    ("make", "first", "changed"),
    [
        (dense, {}, {"q_len": 2000, "k_len": 2000}),  # two query tiles
        (dense, {}, {"q_len": 64, "k_len": 9000}),  # split
        (dense, {"q_len": 64, "k_len": 9000}, {"k_len": 4500, "batch": 3}),  # more room for sums
        (dense, cached_calls.PORTABLE, {"q_len": 30}),
        (latent, cached_calls.HOPPER, {"tokens": 71}),
        (sparse, {"form": "fp8_656", "topk": 100}, {"tokens": 1000, "topk": 600}),  # a workspace
        (sparse, {}, {"tokens": 0}),
        (sparse, {"lengths": True}, {"tokens": 200}),  # to be drawn
        (sparse, {"topk": 600, "tokens": 100}, {"tokens": 1}),  # few
    ],
)
def test_counts_that_change_the_plan_go_the_long_way(
    make: Callable[..., Any], first: dict[str, Any], changed: dict[str, Any], noted: Noted
) -> None:
    noted.take(make(**first))
    noted.take(make(**{**first, **changed}))
    assert not noted.cached


def test_equal_offsets_are_never_split(noted: Noted) -> None:
    apart, equal = ({"q_len": 512, "k_len": 512, "batch": 16, "equal": e} for e in (False, True))
    for first, again, kernels in ((equal, apart, 2), (apart, equal, 1)):
        noted.take(dense(**first))
        assert len(noted.take(dense(**again))[1].long) == kernels
        cached.forget()


# Defects of a cached launch, as attributes of openmla.kernels.prepared that are put in place.


def stale_address(self: Any, stream: int, addresses: list[int]) -> None:
    self.__dict__.setdefault("first", list(addresses))
    RUN(self, stream, [*self.first[:1], *addresses[1:]])


def stale_length(self: Any, numbers: LaunchNumbers) -> Any:
    kept = {n: x for n, x in numbers.arguments.items() if n != "total_q"}
    return RESIZED(self, numbers._replace(arguments=kept))


def stale_descriptor(self: Any, extent: Extent) -> Any:
    return self


def stale_programs(self: Any, numbers: LaunchNumbers) -> Any:
    return RESIZED(self, numbers._replace(programs=self._programs))


def wrong_workspace(self: Any, x: Any, source: Any) -> tuple[int, int]:
    index, offset = FIND(self, x, source)
    return index, 0 if source in prepared.OWN else offset


def no_offset(self: Any, x: Any, source: Any) -> tuple[int, int]:
    return FIND(self, x, source)[0], 0


def small_workspace(self: Any, x: Any, source: Any) -> tuple[int, int]:
    found = FIND(self, x, source)
    self.sizes = {kind: min(size, 256) for kind, size in self.sizes.items()}
    return found


def stale_sizes(self: Any, numbers: Any) -> dict[str, int]:
    return dict(self._sizes)


RUN, RESIZED = prepared._Kernel.run, prepared._Kernel.resized
FIND = prepared._Space.find
DEFECTS: dict[str, tuple[type, str, Any, str]] = {
    "a stale address": (prepared._Kernel, "run", stale_address, "dense"),
    "a stale address, portable": (prepared._Kernel, "run", stale_address, "portable latent"),
    "a stale address, fp8": (prepared._Kernel, "run", stale_address, "latent, fp8 in the kernel"),
    "a wrong workspace": (prepared._Space, "find", wrong_workspace, "latent, fp8 in a workspace"),
    "a wrong workspace, portable": (
        prepared._Space,
        "find",
        wrong_workspace,
        "portable latent, split",
    ),
    "scales taken for rows": (prepared._Space, "find", no_offset, "sparse, fp8 in the kernel"),
    "rope taken for latents": (prepared._Space, "find", no_offset, "dense, rope from pages"),
    "a small workspace": (prepared._Space, "find", small_workspace, "sparse, fp8 in a workspace"),
    "scores over windows": (prepared._Space, "find", wrong_workspace, "index_topk"),
    "scores that do not fit": (prepared._Space, "find", small_workspace, "index_topk"),
    "a stale address, scores": (prepared._Kernel, "run", stale_address, "scores"),
    "scales of keys taken for keys": (prepared._Space, "find", no_offset, "portable scores"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(defect: str, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, function, call = DEFECTS[defect]
    make, options, _ = CALLS[call]
    monkeypatch.setattr(place, name, function)
    assert beside_the_long_way(noted, make(**options), make(**options)) != ""


@pytest.mark.parametrize(
    ("place", "name", "function"),
    [
        (prepared._Kernel, "resized", stale_length),
        (prepared._Kernel, "resized", stale_programs),
        (prepared._Descriptor, "resized", stale_descriptor),
    ],
)
@pytest.mark.parametrize("counts", ["other counts", "lists", "fp8", "fp8 values", "fp8 lists"])
def test_a_stale_count_is_seen(
    counts: str,
    place: type,
    name: str,
    function: Any,
    noted: Noted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, first, changed = COUNTS[counts]
    monkeypatch.setattr(place, name, function)
    assert beside_the_long_way(noted, make(**first), make(**{**first, **changed})) != ""


def test_a_copy_that_is_too_small_is_seen(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    make, first, changed = COUNTS["fp8 values"]
    monkeypatch.setattr(prepared.CachedLaunch, "_sizes_for", stale_sizes)
    assert beside_the_long_way(noted, make(**first), make(**{**first, **changed})) != ""


def test_a_declaration_that_misses_a_count_is_not_kept(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of the first call must be that call."""
    from openmla.kernels.hopper.latent import launch

    monkeypatch.setattr(launch, "numbers", lambda plan, problem: [LaunchNumbers(1, {"tiles": 1})])
    noted.take(sparse())
    assert noted.take(sparse(tokens=8))[1].long
    assert noted.take(sparse(tokens=8))[1].cached  # by its own key


INDEX_CALLS = {"scores": scores, "select": select, "index_topk": topk}


@pytest.mark.parametrize("name", INDEX_CALLS)
def test_a_step_of_the_indexer_is_planned_once(
    name: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = INDEX_CALLS[name]()
    noted.take(call)
    monkeypatch.setattr(dispatch, "plan_for", None)  # whoever asks for a plan fails
    assert noted.take(call)[1].cached
    cached.forget()
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize("first", ["physical", "relative"])
def test_rows_of_a_cache_and_places_in_a_sequence_are_two_calls(first: str, noted: Noted) -> None:
    other = "relative" if first == "physical" else "physical"
    noted.take(topk(rows=first))
    assert noted.take(topk(rows=first))[1].cached
    launched = noted.take(topk(rows=other))[1]
    assert launched.long and not launched.cached


def test_keys_of_no_kind_are_refused_as_ever(noted: Noted) -> None:
    call = topk()
    noted.take(call)
    with pytest.raises(InvalidArgument, match="keys: expected"):
        call.func(call.args[0], None, *call.args[2:], **call.keywords)  # type: ignore[attr-defined]


def test_a_selection_in_parts_is_not_kept(noted: Noted) -> None:
    """The lists of all parts together would take more memory than the limit of the scores."""
    call = topk(scores_limit=8000)
    for _ in range(2):
        _, launched = noted.take(call)
        assert len(launched.long) == 1 + 2 * 4 and not launched.cached


@pytest.mark.parametrize(
    ("make", "changes", "refusal"),
    [
        (scores, {"starts": cached_calls.i32(*[1] * 18)}, "starts: expected None"),
        (scores, {"backend": "magic"}, "backend: expected one of"),
        (scores, {"out": torch.zeros(18, 192, dtype=torch.float16)}, "out: expected"),
        (select, {"page_size": 0}, "page_size: expected None"),
        (select, {"page_size": 64}, "page_size: expected None"),
        (select, {"add_starts": 0}, "add_starts: expected True or False"),
        (select, {"return_counts": 1}, "return_counts: expected True or False"),
        (topk, {"rows": "logical"}, "rows: expected one of physical, relative"),
        (topk, {"rows": None}, "rows: expected one of physical, relative"),
        (topk, {"keep_first": False}, "keep_first: expected an int"),
        (topk, {"scores_limit": 0}, "scores_limit: expected an int of at least 1"),
    ],
)
def test_what_is_refused_is_refused_after_a_call_was_kept(
    make: Callable[..., Any], changes: dict[str, Any], refusal: str, noted: Noted
) -> None:
    call = make()
    noted.take(call)
    assert noted.take(call)[1].cached
    with pytest.raises(InvalidArgument, match=refusal):
        call(**changes)


def test_scores_into_memory_of_their_own_are_refused_as_ever(noted: Noted) -> None:
    call = scores()
    (out,), _ = noted.take(call)
    weights = out[:, :64]
    with pytest.raises(InvalidArgument, match="out: expected memory of its own, apart from weig"):
        partial(call.func, *call.args[:2], weights, **call.keywords)(out=out)  # type: ignore[attr-defined]


def test_scores_of_another_shape_than_a_call_makes_are_not_made_by_it(noted: Noted) -> None:
    """Rows that are not padded: a call without `out` pads them, so that selections read vectors."""
    call, out = scores(contiguous=301), torch.zeros(18, 301)
    noted.take(lambda: call(out=out))
    (made,), launched = noted.take(call)
    assert launched.long and made.stride() == (304, 1)
    (made,), launched = noted.take(call)
    assert launched.cached and made.stride() == (304, 1) and made.shape == (18, 301)
