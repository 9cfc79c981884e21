"""Sparse calls made again: the arguments of a launch that was planned, or no launch at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.hopper.replayed import Launches, arguments_of, learn, note_launches
from openmla import dispatch, fastpath
from openmla.cache import LatentCache
from openmla.kernels.hopper.latent import launch as sparse_launch
from openmla.kernels.hopper.latent import replay as sparse_replay
from openmla.operands import Results, SparseOperands, Weights

HEADS, TOPK, ROWS = 20, 130, 300


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Filled instead of launching."""
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(sparse_replay, "driver", stream)
    return note_launches(monkeypatch, sparse_replay)


def make(
    tokens: int = 9, heads: int = HEADS, topk: int = TOPK, rows: int = ROWS, rope: int = 64,
    dtype: torch.dtype = torch.bfloat16, lengths: bool = False, gap: int = 0, lse: bool = True,
    logits: bool = False, page: int = 0, **changed: Any,
) -> tuple[SparseOperands, Results]:  # fmt: skip
    width = 512 + rope
    q = torch.zeros(tokens, heads, width + gap, dtype=dtype)[..., :width]
    pool: Any = torch.zeros(rows, width, dtype=dtype)
    if page:
        shape = {"num_pages": rows // page, "page_size": page, "latent": 512, "rope": rope}
        pool = LatentCache.allocate(**shape, format="bf16")
    lists = torch.zeros(tokens, topk, dtype=torch.int32)
    counts = torch.zeros(tokens, dtype=torch.int32) if lengths else None
    op = SparseOperands(q, pool, lists, counts, 512, Weights(0.1))
    per_head = torch.zeros(tokens, heads)
    out = torch.zeros(tokens, heads, 512, dtype=dtype)
    results = Results(out, per_head if lse else None, per_head.clone() if logits else None)
    return replace(op, **changed), results


def expected(op: SparseOperands, results: Results) -> Launches:
    """What Triton's launcher would get for the planned call."""
    plan = dispatch.plan_call(op, results, "hopper")
    return [(c.programs, arguments_of(c)) for c in sparse_launch.calls(plan, op, results)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two blocks of heads": {"heads": 70},
    "lengths, max logits": {"lengths": True, "logits": True},
    "no lse, no rope": {"lse": False, "rope": 0},
    "fp16, gaps": {"dtype": torch.float16, "gap": 8},
    "pages": {"page": 20},
    "sink": {"weights": Weights(0.1, torch.zeros(HEADS))},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_a_known_call_has_the_arguments_of_a_planned_one(
    kind: str, tokens: int, launches: Launches
) -> None:
    learn(*make(**KINDS[kind]), "hopper")
    op, results = make(tokens=tokens, **KINDS[kind])
    assert fastpath.run(op, results, "hopper")
    assert launches == expected(op, results) and len(launches) == 1


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": torch.float16},
    "strides": {"gap": 8},
    "heads": {"heads": 8},
    "length of lists": {"topk": 128},
    "pool": {"rows": 301},
    "pages": {"page": 20},
    "lengths": {"lengths": True},
    "no rope": {"rope": 0},
    "no lse": {"lse": False},
    "max logits": {"logits": True},
    "scale": {"weights": Weights(0.2)},
    "sink": {"weights": Weights(0.1, torch.zeros(HEADS))},
    "scales of tokens": {"weights": Weights(0.1, None, torch.ones(9), None)},
    "int64 lists": {"indices": torch.zeros(9, TOPK, dtype=torch.int64)},
    "more lists than queries": {"indices": torch.zeros(10, TOPK, dtype=torch.int32)},
    "lists with gaps": {"indices": torch.zeros(9, 2 * TOPK, dtype=torch.int32)[:, ::2]},
    "no queries": {"tokens": 0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_is_not_taken_for_known(name: str, launches: Launches) -> None:
    learn(*make(), "hopper")
    assert not fastpath.run(*make(**CHANGES[name]), "hopper") and not launches


def test_an_fp8_cache_is_planned_anew(launches: Launches) -> None:
    shape = {"num_pages": 5, "page_size": 64, "latent": 512, "rope": 64}
    cache = LatentCache.allocate(**shape, format="fp8_656")  # type: ignore[arg-type]
    learn(*make(cache=cache), "hopper")
    assert not fastpath.run(*make(cache=cache), "hopper") and not launches


def test_another_backend_is_not_known(launches: Launches) -> None:
    learn(*make(), "hopper")
    assert not fastpath.run(*make(), "auto") and not launches


def test_lists_with_gaps_are_not_learned(launches: Launches) -> None:
    wide = make(indices=torch.zeros(9, 2 * TOPK, dtype=torch.int32)[:, ::2])
    learn(*wide, "hopper")
    assert not fastpath.run(*wide, "hopper") and not launches


def test_out_in_the_memory_of_an_input_is_not_known(launches: Launches) -> None:
    op, results = make(heads=64, rope=0, rows=9 * 64)
    learn(op, results, "hopper")
    flat = results.out.view(9 * 64, 512)
    assert not fastpath.run(replace(op, q=results.out), results, "hopper")
    assert not fastpath.run(replace(op, cache=flat), results, "hopper")
    lists = flat.view(torch.int32).flatten()[8 : 8 + 9 * TOPK].view(9, TOPK)
    assert not fastpath.run(replace(op, indices=lists), results, "hopper")
    assert not launches and fastpath.run(op, results, "hopper")


def test_a_pointer_between_two_times_16_bytes_is_not_known(launches: Launches) -> None:
    op, results = make()
    learn(op, results, "hopper")
    for name in ("q", "cache"):
        given = getattr(op, name)
        moved = torch.zeros(given.numel() + 4, dtype=given.dtype)[4:].view(given.shape)
        assert not fastpath.run(replace(op, **{name: moved}), results, "hopper")
    assert not launches


def test_launches_that_a_profiler_watches_go_through_triton(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(*make(), "hopper")
    monkeypatch.setattr(sparse_replay, "hooked", lambda: True)
    assert not fastpath.run(*make(), "hopper") and not launches
