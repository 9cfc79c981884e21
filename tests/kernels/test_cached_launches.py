"""Cached launches: arguments of the long way's, with other tensors and other token counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels import cached_calls
from kernels.cached_calls import CALLS, dense, latent, sparse
from kernels.noted import Noted, difference, note_launches
from openmla import cached
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
