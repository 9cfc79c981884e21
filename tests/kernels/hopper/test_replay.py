"""Calls made again: the arguments of a launch that was planned, or no launch at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.hopper.replayed import Launches, arguments_of, learn, note_launches
from openmla import dispatch, fastpath
from openmla.kernels.hopper.dense import launch, replay
from openmla.operands import DenseOperands, Results, Weights

HEADS = 16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Filled instead of launching."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch, "_counter", lambda device: counter)
    monkeypatch.setattr(replay, "counter_of_stream", lambda device: (7, counter))
    return note_launches(monkeypatch, replay)


def make(
    q_len: int = 100, k_len: int = 300, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    gap: int = 0, heads: int = HEADS, lse: bool = True, **changed: Any,
) -> tuple[DenseOperands, Results]:  # fmt: skip
    def rows(count: int, *rest: int) -> torch.Tensor:
        return torch.zeros(count, *rest[:-1], rest[-1] + gap, dtype=dtype)[..., : rest[-1]]

    cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (q_len, k_len))
    total_q, total_k = batch * q_len, batch * k_len
    op = DenseOperands(
        rows(total_q, heads, 192), rows(total_k, heads, 128), rows(total_k, 64),
        rows(total_k, heads, 128), cu_q, cu_k, True, Weights(0.1),
    )  # fmt: skip
    out = torch.zeros(total_q, heads, 128, dtype=dtype)
    return replace(op, **changed), Results(out, torch.zeros(total_q, heads) if lse else None)


def expected(op: DenseOperands, results: Results) -> Launches:
    """What Triton's launcher would get for the planned calls."""
    plan = dispatch.plan_call(op, results, "hopper")
    return [(call.programs, arguments_of(call)) for call in launch.calls(plan, op, results)]


def same(got: Launches, wanted: Launches) -> bool:
    """But for the workspace, which is a new one each time."""
    first = "part_sums_ptr", "part_state_ptr"
    for (programs, flat), (wanted_programs, wanted_flat) in zip(got, wanted, strict=True):
        apart = [i for i, (a, b) in enumerate(zip(flat, wanted_flat, strict=True)) if a != b]
        if programs != wanted_programs or len(apart) > len(first):
            return False
        if any(flat[i] is None or wanted_flat[i] is None for i in apart):
            return False
    return True


SHAPES = {
    "same counts": {},
    "other counts": {"q_len": 40, "k_len": 77, "batch": 2},
    "two query tiles": {"q_len": 2000, "k_len": 2000},
    "split": {"q_len": 64, "k_len": 9000},
    "split, other counts": {"q_len": 30, "k_len": 4500, "batch": 3},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_call_has_the_arguments_of_a_planned_one(name: str, launches: Launches) -> None:
    for known in ({}, {"q_len": 2000, "k_len": 2000}, {"q_len": 64, "k_len": 8192}):
        learn(*make(**known), "hopper")
    op, results = make(**SHAPES[name])
    assert fastpath.run(op, results, "hopper")
    wanted = expected(op, results)
    assert len(launches) == len(wanted) and same(launches, wanted)
    assert len(wanted) == (2 if "split" in name else 1)


def test_equal_offsets_are_never_split(launches: Launches) -> None:
    op, results = make(q_len=512, k_len=512, batch=16)
    assert len(expected(op, results)) == 2  # by its counts alone one request might have 8192 keys
    op = replace(op, cu_seqlens_k=op.cu_seqlens_q)
    assert len(expected(op, results)) == 1
    learn(op, results, "hopper")
    assert fastpath.run(op, results, "hopper")
    assert same(launches, expected(op, results))


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": torch.float16},
    "strides": {"gap": 8},
    "heads": {"heads": 8},
    "no lse": {"lse": False},
    "full": {"causal": False},
    "scale": {"weights": Weights(0.2)},
    "sink": {"weights": Weights(0.1, torch.zeros(HEADS))},
    "rope per head": {"k_rope": torch.zeros(300, HEADS, 64, dtype=torch.bfloat16)},
    "int64 offsets": {"cu_seqlens_q": torch.tensor([0, 100])},
    "more rope than keys": {"k_rope": torch.zeros(301, 64, dtype=torch.bfloat16)},
    "offsets that do not match": {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)},
    "no offsets": {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)},
    "no queries": {"q_len": 0},
    "no keys": {"k_len": 0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_is_not_taken_for_known(name: str, launches: Launches) -> None:
    learn(*make(), "hopper")
    assert not fastpath.run(*make(**CHANGES[name]), "hopper") and not launches


def test_another_backend_is_not_known(launches: Launches) -> None:
    learn(*make(), "hopper")
    assert not fastpath.run(*make(), "auto") and not launches


def test_nothing_is_kept_of_other_kernels(launches: Launches) -> None:
    learn(*make(), "portable")
    assert not fastpath.may_repeat()
    learn(*make(), "hopper")
    assert fastpath.may_repeat() and not launches


def test_out_in_the_memory_of_an_input_is_not_known(launches: Launches) -> None:
    op, results = make(q_len=100, k_len=100)
    learn(op, results, "hopper")
    for inputs in ({"v": results.out}, {"k_nope": results.out}):
        assert not fastpath.run(replace(op, **inputs), results, "hopper")
    joint = torch.zeros(101, HEADS, 128, dtype=torch.bfloat16)
    shifted = replace(op, v=joint[1:]), replace(results, out=joint[:-1])
    assert not fastpath.run(*shifted, "hopper") and not launches
    inside = results.out.view(torch.int32).flatten()[8:10]
    assert not fastpath.run(replace(op, cu_seqlens_k=inside), results, "hopper")


def test_a_pointer_between_two_times_16_bytes_is_not_known(launches: Launches) -> None:
    op, results = make()
    learn(op, results, "hopper")
    moved = torch.zeros(op.q.numel() + 4, dtype=op.q.dtype)[4:].view(op.q.shape)
    assert not fastpath.run(replace(op, q=moved), results, "hopper") and not launches


def test_launches_that_a_profiler_watches_go_through_triton(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(*make(), "hopper")
    monkeypatch.setattr(replay, "hooked", lambda: True)
    assert not fastpath.run(*make(), "hopper") and not launches


def test_only_plain_tensors_on_a_gpu_are_looked_up() -> None:
    assert not fastpath.plain((torch.zeros(1),))
    assert not fastpath.plain((torch.nn.Parameter(torch.zeros(1)),))
    assert fastpath.plain((), None) and not fastpath.plain((None,))
