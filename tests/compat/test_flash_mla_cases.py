"""FlashMLA's conventions, case by case, on the CPU; an H200 runs the whole list."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compat import flash_mla_cases as flash_mla
from compat.flash_mla_cases import FlashCase, cases, problems

SMALL = [replace(case, heads=4) for case in cases() if case.s_q <= 62]


@pytest.mark.parametrize("case", SMALL[::3], ids=str)
def test_conventions_hold(case: FlashCase) -> None:
    assert problems(case, "cpu") == []


def test_the_list_is_what_it_says() -> None:
    listed = list(cases())
    assert {c.s_q for c in listed} == {1, 62, 213, 70000}
    assert {c.heads for c in listed} == {64, 128} and {c.d_qk for c in listed} == {512, 576}
    assert {c.topk for c in listed} >= {128, 256, 384, 512}
    assert any(c.s_kv % 2 for c in listed) and any(c.empty_rows for c in listed)


@pytest.mark.parametrize("wrong", ["out", "max_logits", "lse"])
def test_a_wrong_answer_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ["out", "max_logits", "lse"].index(wrong)

    def broken(*args: object, **options: object) -> list[torch.Tensor]:
        results = list(right(*args, **options))
        results[place] = results[place].clone()
        results[place][1, 0] += 0.5
        return results

    right = flash_mla.flash_mla_sparse_fwd
    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", broken)
    case = FlashCase(3, 40, 16, heads=2, d_qk=12, d_v=8)
    assert [wrong in p for p in problems(case, "cpu")] == [True]
