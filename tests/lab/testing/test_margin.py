"""Margins: what touches memory beside a tensor is found, on any device; here on the CPU."""

from dataclasses import replace

import pytest
import torch

from openmla.lab.testing.cases import Case, build, random_case
from openmla.lab.testing.memory.margin import MARGIN, MarginMemory, margin_problems

CASE = Case("dense", 2, 8, 4, 8, (3,), (5,), out="given")


def beside(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """One element, `elements` past the last one, or that far before the first."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    place = tensor.storage_offset() + (elements if elements < 0 else last + elements)
    return tensor.as_strided((1,), (1,), place)


@pytest.mark.parametrize("seed", range(40_000, 40_010))
def test_the_public_calls_stay_inside_their_tensors(seed):
    assert margin_problems(random_case(seed), lambda built: built.run(), "cpu") == []


@pytest.mark.parametrize("elements", [1, -1, 7, MARGIN // 2, -MARGIN // 2])
@pytest.mark.parametrize("out", ["fresh", "given", "aligned"])
def test_writing_beside_out_is_found(elements, out):
    def sloppy(built):
        outcome = built.run()
        if isinstance(built.memory, MarginMemory):
            beside(outcome.out, elements).fill_(1)
        return outcome

    (problem,) = margin_problems(replace(CASE, out=out), sloppy, "cpu")
    side = "before" if elements < 0 else "after"
    assert f"2 bytes {side} buffer" in problem and "were written" in problem


def test_writing_beside_an_input_is_found():
    def sloppy(built):
        if isinstance(built.memory, MarginMemory):
            beside(built.operands.cu_seqlens_q, 1).fill_(1)
        return built.run()

    assert any("after buffer" in p for p in margin_problems(CASE, sloppy, "cpu"))


@pytest.mark.parametrize("elements", [1, -1])
def test_reading_beside_an_input_is_found(elements):
    def leaky(built):
        outcome = built.run()
        if isinstance(built.memory, MarginMemory):
            outcome.out[0, 0, 0] += beside(built.operands.v, elements)[0] * 0  # 0 × NaN is NaN
        return outcome

    assert any("out differs" in p for p in margin_problems(CASE, leaky, "cpu"))


def test_tensors_are_aligned_as_torch_aligns_them():
    memory = MarginMemory()
    build(CASE, memory=memory)
    plain = torch.empty(100, dtype=torch.uint8).data_ptr() % 64
    assert {b.data_ptr() % 64 for b in memory.buffers if b.numel()} == {plain}
