"""FlashMLA's decode over lists, case by case, on the CPU; tests/gpu runs the whole sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compat import flash_mla_decode_cases as decode
from compat.flash_mla_decode_cases import DecodeCase, cases, problems

SMALL = [
    replace(case, heads=5, requests=2, topk=min(case.topk, 130), rows=300)
    for case in cases()
    if case.requests == 4
]


@pytest.mark.parametrize("case", SMALL[::5], ids=lambda case: f"{case.format} {case.seed}")
def test_conventions_hold(case: DecodeCase) -> None:
    assert problems(case, "cpu") == []


def test_the_sweep_is_what_it_says() -> None:
    listed = list(cases())
    assert len(listed) == len({case.seed for case in listed}) > 100
    assert {case.heads for case in listed} == {64, 128}
    v41 = {"fp8_528_v41", "fp8_528_v41_split"}
    assert {case.format for case in listed} == {"fp8_584", "fp8_656", *v41}
    assert {2, 61, 64, 69, 576} == {case.extra[1] for case in listed if case.extra}
    assert {case.s_q for case in listed} >= {1, 2, 3}
    for name in ("lengths", "sink", "nothing"):
        assert {getattr(case, name) for case in listed} == {True, False}


@pytest.mark.parametrize("wrong", ["out", "lse", "one element"])
def test_a_wrong_answer_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.flash_mla_with_kvcache

    def broken(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args, **options)
        if wrong == "lse":
            return out, lse + 2e-4
        if wrong == "out":
            return out * 1.004, lse  # less than what one element may be off
        out[0, 0, 1, 7] += 0.1
        return out, lse

    monkeypatch.setattr(decode, "flash_mla_with_kvcache", broken)
    case = DecodeCase(2, 1, 3, 40, 100, extra=(16, 2), sink=False)
    found = problems(case, "cpu")
    assert len(found) >= 1 and all(p.startswith(wrong[:3].replace("one", "out")) for p in found)
